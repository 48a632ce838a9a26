"""The page of conventions names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "conventions.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", PAGE, re.M)


def test_all_forty_are_there():
    assert [int(number) for number, _ in ROWS] == list(range(1, 41))


@pytest.mark.parametrize(("number", "shown"), ROWS)
def test_every_convention_names_a_test_that_exists(number, shown):
    names = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
    assert names and shown.count("::") == len(names), f"row {number}"
    for file, name in names:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        found = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in found, f"row {number}: {file} has no {name}"
