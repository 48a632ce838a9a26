"""`python -m tests.mutation PATH...` changes the package in small wrong ways, and runs its tests.

Each change is one mutant: a copy of a process that has imported everything and collected the tests.
It is killed if a test fails or does not end. The exit code is 0 only if every mutant is killed, or
listed in tests/mutation/equivalent.md.
"""

# Not mutmut: it leaves out decorated functions, so every property, and changes every text. Not
# cosmic-ray: it removes no statement, and starts an interpreter for each mutant.

import argparse
import gc
import importlib
import inspect
import os
import re
import signal
import sys
import time
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.mutation.changes import Change, changes

PACKAGE = Path(__file__).parents[2] / "service" / "evenkeel_moe"
EQUIVALENT = re.findall(
    r"^- `(.+?)( \*)?`$", Path(__file__).with_name("equivalent.md").read_text(), re.M
)
"""(text, " *" if it names all changes that begin like it)."""
TRANSFERS = ("tests/agent", "tests/adapters/torch", "tests/contracts/test_weight_transport.py")
REPLICAS = "tests/integration/test_store_replicas.py"
TESTS = {
    "protocol": ("tests/protocol", "tests/sim/test_sim.py::test_scenario"),
    "agent": TRANSFERS,
    "adapters/torch": TRANSFERS[1:],
    "adapters/redis": (
        "tests/adapters/redis",
        "tests/contracts/test_stores.py",
        "tests/controller/leadership/test_bad_records.py",
        f"{REPLICAS}::test_what_was_acknowledged_is_on_the_replica_that_takes_over",
    ),
    "controller/leadership": ("tests/controller/leadership",),
}
"""Folder of the package -> the tests that are meant to find its mutants."""
BROKEN = 2
"""The exit code of a copy that could not take its change."""


class Mutants:
    """A pytest plugin that runs the collected tests once, and then for each mutant."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.survived = 0
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        modules = [importlib.import_module(module_name(file)) for file in self.files]
        gc.freeze()
        began = time.monotonic()
        tests = partial(self._run, session.items)
        if killed(tests, 1800):
            sys.exit("the tests fail without a change")
        limit_s = int(20 + 4 * (time.monotonic() - began))
        for file, module in zip(self.files, modules, strict=True):
            found = {"killed": 0, "survived": 0, "equivalent": 0}
            for change in changes(file.read_text(), str(file)):
                key = key_of(file, change)
                if any(names(entry, key) for entry in EQUIVALENT):
                    found["equivalent"] += 1
                elif killed(tests, limit_s, partial(install, module, change.code)):
                    found["killed"] += 1
                else:
                    found["survived"] += 1
                    print(f"SURVIVED (line {change.line}) {key}", flush=True)
            print(f"{file.relative_to(PACKAGE)}: {found}", flush=True)
            self.survived += found["survived"]
        return True

    def _run(self, items: list[pytest.Item]) -> bool:
        """Run tests until one fails; return True if one did."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                return True
        return False


def key_of(file: Path, change: Change) -> str:
    return f"{file.relative_to(PACKAGE)}: {change.scope}: {change.before} -> {change.after}"


def names(entry: tuple[str, str], key: str) -> bool:
    """Return True if an entry of EQUIVALENT names a change."""
    text, rest = entry
    return key.startswith(text) if rest else key == text


def killed(tests: Any, limit_s: int, prepare: Any = lambda: None) -> bool:
    """Prepare a copy of this process and run tests in it; return True if they fail or hang.

    Raises:
        RuntimeError: the copy could not be prepared.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            prepare()
        except BaseException:
            os._exit(BROKEN)
        signal.alarm(limit_s)
        try:
            os._exit(tests())
        except BaseException:  # Also the exit of a test run.
            os._exit(1)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # The servers that its tests have started.
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == BROKEN:
        raise RuntimeError("a change could not be installed")
    return status != 0


def install(module: ModuleType, changed: CodeType) -> None:
    """Give every function of a module its code in the changed module."""
    codes = {}
    todo = [changed]
    while todo:
        todo += [const for const in todo.pop().co_consts if isinstance(const, CodeType)]
        codes.update({code.co_qualname: code for code in todo})
    for owner in [module, *(v for v in vars(module).values() if isinstance(v, type))]:
        for value in vars(owner).values():
            function = function_of(value)
            if function is not None and function.__code__.co_filename == changed.co_filename:
                code = codes[function.__qualname__]
                # A change may leave out the only use of `super`; the function still has its cell.
                free = function.__code__.co_freevars
                function.__code__ = code if code.co_freevars else code.replace(co_freevars=free)


def function_of(value: Any) -> FunctionType | None:
    """Return the function behind a method, a property or a decorated function."""
    for kind, name in ((property, "fget"), (cached_property, "func"), (staticmethod, "__func__")):
        value = getattr(value, name) if isinstance(value, kind) else value
    value = value.__func__ if isinstance(value, classmethod) else value
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    folders = [path.resolve() for path in parser.parse_args().paths]
    files = [f for p in folders for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    areas = {area for area in TESTS if any(f.is_relative_to(PACKAGE / area) for f in files)}
    tests = sorted({test for area in areas for test in TESTS[area]})
    mutants = Mutants(files)
    flags = ("-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider", "-s", "-q")
    code = pytest.main([*flags, *tests], plugins=[mutants])
    return int(code) or int(bool(mutants.survived))


if __name__ == "__main__":
    sys.exit(main())
