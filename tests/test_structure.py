"""The check of the source tree finds what it is there to find."""

from tests.structure import faults


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_class_name_in_two_modules_is_found(tmp_path):
    write(tmp_path, "a/one.py", "class Plan:\n    pass\n")
    write(tmp_path, "b/two.py", "class Plan:\n    pass\n")
    assert faults(tmp_path) == ["class Plan is defined more than once: a/one.py:1, b/two.py:1"]


def test_generated_modules_are_not_read(tmp_path):
    write(tmp_path, "one.py", "class Plan:\n    pass\n")
    write(tmp_path, "v1/plan_pb2.py", "class Plan:\n    pass\n")
    assert faults(tmp_path) == []


def test_a_long_file_and_a_long_function_are_found(tmp_path):
    write(tmp_path, "long.py", "x = 1\n" * 401)
    write(tmp_path, "slow.py", "def work():\n" + "    x = 1\n" * 60)
    assert faults(tmp_path) == [
        "long.py: 401 lines, at most 400",
        "slow.py:1: work has 61 lines, at most 60",
    ]
    write(tmp_path, "long.py", "x = 1\n" * 400)
    write(tmp_path, "slow.py", "def work():\n" + "    x = 1\n" * 59)
    assert faults(tmp_path) == []
