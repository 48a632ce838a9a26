"""The tests that pages name exist, and the page of conventions names one for each row."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
CONVENTIONS = re.findall(
    r"^\| (\d+) \| .+? \| (.+) \|$", (DOCS / "conventions.md").read_text(encoding="utf-8"), re.M
)


def test_all_forty_conventions_are_there():
    assert [int(number) for number, _ in CONVENTIONS] == list(range(1, 41))


@pytest.mark.parametrize(("number", "shown"), CONVENTIONS)
def test_every_convention_names_a_test(number, shown):
    names = NAMED.findall(shown)
    assert names and shown.count("::") == len(names), f"row {number}"


@pytest.mark.parametrize("page", ["conventions.md", "engines.md", "hostile.md"])
def test_every_test_that_a_page_names_exists(page):
    named = set(NAMED.findall((DOCS / page).read_text(encoding="utf-8")))
    missing = [
        f"{file}::{name}" for file, name in sorted(named) if name not in functions(TESTS / file)
    ]
    assert named and not missing


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
