"""The small wrong changes, each against the text they are made from."""

import pytest

from tests.mutation.changes import changes


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
    assert {(c.scope, c.first_line, c.last_line, c.before) for c in found} == {
        ("A.b", 3, 3, "if self.c:"),
        ("A.b", 4, 4, "return 1"),
        ("A.b", 5, 5, "return 5"),
    }
    results = set()
    for change in found:
        module: dict = {}
        exec(change.code, module)
        thing = module["A"]()
        thing.c = True
        results.add(thing.b())
    assert results == {1, 5, 2, 0, None}
