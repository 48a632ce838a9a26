"""The check of the source tree finds what it is there to find."""

import shutil

import pytest

from tests.structure import JUDGE, TESTS, borrowed, faults, long_files


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
    write(tmp_path, "long.py", "x = 1\n" * 601)
    write(tmp_path, "slow.py", "def work():\n" + "    x = 1\n" * 60)
    assert faults(tmp_path) == [
        "long.py: 601 lines, at most 600",
        "slow.py:1: work has 61 lines, at most 60",
    ]
    write(tmp_path, "long.py", "x = 1\n" * 600)
    write(tmp_path, "slow.py", "def work():\n" + "    x = 1\n" * 59)
    assert faults(tmp_path) == []


@pytest.mark.fault("a reader of the code", "a formatter tore tables and paragraphs of docstrings")
def test_a_torn_docstring_is_found(tmp_path):
    prose = "Rule 1: a rank has one peer, and every\n    rank runs the same list.\n"
    table = "=====\n======== kind\nkeys\n"
    title = "Files in the folder\n    lock    locked\n"
    whole = (
        "Args:\n    load: (L, E), and\n        no more.\n\nSource: a paper, and\n    another.\n\n"
        "====  ===\na     one,\n      two\n====  ===\n\n- one,\n  and\n- two\n\nSo::\n\n    x = 1\n"
    )
    for number, text in enumerate((prose, table, title, whole)):
        write(tmp_path, f"m{number}.py", f'"""Say.\n\n{text}"""\n')
    torn = [f"m{number}.py:1: a torn paragraph or table" for number in range(3)]
    assert faults(tmp_path) == torn


def test_a_long_file_of_the_tests_is_found_and_a_repeated_class_name_is_not(tmp_path):
    shutil.copytree(TESTS / "model", tmp_path / "model")
    write(tmp_path, "model/test_long.py", "class Plan:\n    pass\n" + "x = 1\n" * 599)
    write(tmp_path, "model/test_other.py", "class Plan:\n    pass\n")
    assert long_files(tmp_path) == ["model/test_long.py: 601 lines, at most 600"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("from evenkeel_moe.wire.values import decode_wave", "evenkeel_moe.wire.values"),
        ("import evenkeel_moe.v1.agent_pb2", "evenkeel_moe.v1.agent_pb2"),
        ("def late():\n    from tests.chaos.checks import gaps", "tests.chaos.checks"),
        ("from .. import checks", ".."),
        ("from tests.chaos import judge", "tests.chaos"),
    ],
)
def test_code_that_the_judge_borrows_is_found(tmp_path, line, named):
    shutil.copytree(JUDGE, tmp_path / "judge")
    assert borrowed(tmp_path / "judge") == []
    text = (tmp_path / "judge" / "maps.py").read_text(encoding="utf-8")
    write(tmp_path, "judge/maps.py", f"{text}\n{line}\n")
    (found,) = borrowed(tmp_path / "judge")
    assert found.endswith(f"the judge imports {named}")
