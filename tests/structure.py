"""Rules of the source tree that no linter has: `python -m tests.structure`, part of `make check`.

In the package a class name is used once, and a function has at most 60 lines. A file of the
package or of the tests has at most 600 lines. Paragraphs and tables of docstrings are whole. The
outside judge of chaos runs imports nothing of the package, and of the tests only itself.
"""

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "service" / "evenkeel_moe"
TESTS = Path(__file__).parent
JUDGE = TESTS / "chaos" / "judge"
JUDGE_NAME = "tests.chaos.judge"
MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 60


def modules(root: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of every module that is written by hand."""
    for path in sorted(root.rglob("*.py")):
        if "v1" not in path.relative_to(root).parts:
            yield str(path.relative_to(root)), path.read_text(encoding="utf-8")


def long_files(root: Path) -> list[str]:
    """Return one line for each module of `root` that is too long."""
    lines = ((name, text.count("\n")) for name, text in modules(root))
    return [
        f"{name}: {count} lines, at most {MOST_FILE_LINES}"
        for name, count in lines
        if count > MOST_FILE_LINES
    ]


_MAY_HANG = re.compile(r":$|  |^(-|\d+\.) |^[A-Z]\w+: ")
"""A line above an indented one: it ends in a colon, has columns, or begins an item or a section."""


def torn(docstring: str) -> bool:
    """Return True if a formatter took a docstring's prose for a section, or its table for prose."""
    lines = inspect.cleandoc(docstring).splitlines()
    return any(
        re.fullmatch(r"=+", line)
        or (line.startswith(" ") and re.match(r"\S", above) and not _MAY_HANG.search(above))
        for above, line in pairwise(lines)
    )


def faults(root: Path) -> list[str]:
    """Return one line for each rule that a module of the package in `root` breaks."""
    found = long_files(root)
    classes: dict[str, list[str]] = defaultdict(list)
    for name, text in modules(root):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{name}:{node.lineno}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    found.append(
                        f"{name}:{node.lineno}: {node.name} has {length} lines,"
                        f" at most {MOST_FUNCTION_LINES}"
                    )
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if torn(str(node.value.value)):
                    found.append(f"{name}:{node.lineno}: a torn paragraph or table")
    found += [
        f"class {name} is defined more than once: {', '.join(places)}"
        for name, places in sorted(classes.items())
        if len(places) > 1
    ]
    return found


def borrowed(root: Path) -> list[str]:
    """Return one line for each import with which the judge in `root` borrows code of ours."""
    found = []
    for name, text in modules(root):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = ["." * node.level + (node.module or "")]
            else:
                continue
            found += [
                f"{name}:{node.lineno}: the judge imports {one}"
                for one in imported
                if one.startswith(("evenkeel_moe", "tests", "bench", "."))
                and not f"{one}.".startswith(f"{JUDGE_NAME}.")
            ]
    return found


def main() -> None:
    """Print every fault; exit with 1 if there is one."""
    found = faults(SOURCE) + long_files(TESTS) + borrowed(JUDGE)
    print("\n".join(found) or "structure: every rule holds")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
