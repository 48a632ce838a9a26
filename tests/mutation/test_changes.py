"""The small wrong changes, each against the text they are made from."""

import importlib

import pytest

from tests.mutation.__main__ import EQUIVALENT, PACKAGE, install, key_of, killed, names
from tests.mutation.changes import changes

SOURCE = """
class Base:
    def __init__(self):
        self.kept = 1

class Part(Base):
    def __init__(self):
        super().__init__()
        self.own = 2
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a = b < c", {"a = b >= c", "a = b <= c"}),
        ("a = b is None", {"a = b is not None"}),
        ("a = b and c or d", {"a = d", "a = b and c", "a = c or d", "a = b or d"}),
        ("a = not b", {"a = b"}),
        ("a = b + 1", {"a = b - 1", "a = b + 2", "a = b + 0"}),
        ("a = min(b, 256)", {"a = max(b, 256)"}),
        ("a = b if c else True", {"a = b if not c else True", "a = b if c else False"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass"}),
        ("raise Wrong(1)", {"pass"}),
        ("f(b)", {"pass"}),
        ("_log.info('text', number=1)", set()),
        ("assert b == 1, 'text'", set()),
        ('"""A docstring."""', set()),
        ("a: int = f'{b + 1}'", set()),
    ],
)
def test_a_statement_has_these_changes(before, after):
    found = list(changes(f"def f(b=1):\n    {before}", "module.py"))
    assert {change.after for change in found} == after


def test_a_change_knows_its_place_and_is_the_only_one():
    source = (
        "class A:\n    def b(self):\n        if self.c:\n            return 1\n        return 5"
    )
    found = list(changes(source, "module.py"))
    assert {(c.scope, c.line, c.before) for c in found} == {
        ("A.b", 3, "if self.c:"),
        ("A.b", 4, "return 1"),
        ("A.b", 5, "return 5"),
    }
    results = set()
    for change in found:
        module: dict = {}
        exec(change.code, module)
        thing = module["A"]()
        thing.c = True
        results.add(thing.b())
    assert results == {1, 5, 2, 0, None}


def test_a_change_that_leaves_out_super_is_installed(tmp_path, monkeypatch):
    path = tmp_path / "changed_part.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("changed_part")
    change = next(c for c in changes(SOURCE, str(path)) if c.before == "super().__init__()")
    assert vars(module.Part()) == {"kept": 1, "own": 2}
    install(module, change.code)
    assert vars(module.Part()) == {"own": 2}


def test_a_mutant_is_killed_by_a_failure_or_by_time_and_never_by_its_own_preparation():
    assert killed(lambda: True, 20)
    assert not killed(lambda: False, 20)
    assert killed(lambda: [None for _ in iter(int, 1)], 1)
    with pytest.raises(RuntimeError):
        killed(lambda: False, 20, lambda: 1 / 0)


def test_every_equivalent_change_is_a_change_of_the_package():
    files = sorted({PACKAGE / text.partition(":")[0] for text, _ in EQUIVALENT})
    keys = [key_of(file, one) for file in files for one in changes(file.read_text(), str(file))]
    assert [entry for entry in EQUIVALENT if not any(names(entry, key) for key in keys)] == []
