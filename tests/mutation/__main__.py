"""`python -m tests.mutation PATH...` changes the package in small wrong ways, and runs its tests.

Each change is one mutant. It is killed if a test fails that runs the changed line. The exit code
is 0 only if every mutant is killed, or listed in tests/mutation/equivalent.md.

    --again      run only the mutants that survived the last run of their file
    --like TEXT  run only mutants whose line in the output contains TEXT
    --killers    print for each killed mutant the test that failed, and its error
"""

# Not mutmut: it leaves out decorated functions, so every property, and changes every text. Not
# cosmic-ray: it removes no statement, and starts an interpreter for each mutant. Here each mutant
# is a copy of one process that has imported everything and collected the tests.

import argparse
import faulthandler
import gc
import importlib
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import coverage
import pytest

from tests.mutation.changes import Change, changes

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "service" / "evenkeel_moe"
EQUIVALENT = Path(__file__).parent / "equivalent.md"
CACHE = ROOT / ".cache" / "mutation"
RUNNING = CACHE / "running"
"""Holds the name of the test that a mutant runs."""
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


class Mutants:
    """A pytest plugin that runs the collected tests once, and then those of each mutant.

    Args:
        files: modules to change.
    """

    def __init__(self, files: list[Path], options: argparse.Namespace) -> None:
        self.files, self.options = files, options
        self.left: list[str] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed = self._error = ""
        self._kills = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed and not self._failed:
            self._failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self._error = crash.message.split("\n", 1)[0] if crash else ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        names = [module_name(file) for file in self.files]
        modules = [importlib.import_module(name) for name in names]
        gc.freeze()
        looked = in_child(lambda: self._look(session.items), 1800)
        if looked is None or looked[0]:
            sys.exit(f"the tests fail without a change: {looked and looked[0]}")
        _, self._seconds, lines = looked
        for file, module in zip(self.files, modules, strict=True):
            self._run_file(file, module, lines.get(str(file), {}), session.items)
        return True

    def _run_tests(self, items: list[pytest.Item], watch: coverage.Coverage | None = None) -> str:
        """Run tests until one fails; return its name."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            if watch is not None:
                watch.switch_context(item.nodeid)
            else:
                RUNNING.write_text(item.nodeid)
                limit_s = 3 + 4 * self._seconds[item.nodeid]
                faulthandler.dump_traceback_later(limit_s, exit=True)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                break
        return self._failed

    def _look(self, items: list[pytest.Item]) -> tuple[str, dict[str, float], dict[str, Any]]:
        """Run all tests; return the first failure, the seconds of each, and the tests by line."""
        watch = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)
        watch.start()
        failed = self._run_tests(items, watch)
        watch.stop()
        data = watch.get_data()
        return failed, self._seconds, {f: data.contexts_by_lineno(f) for f in data.measured_files()}

    def _run_file(
        self, file: Path, module: ModuleType, lines: dict[str, list[str]], items: list[pytest.Item]
    ) -> None:
        name, found, left = str(file.relative_to(PACKAGE)), Counter[str](), []
        listed = re.findall(r"^- `(.+?)( \*)?`$", EQUIVALENT.read_text(), re.M)
        kept, began = CACHE / f"{name.replace('/', '.')}.survivors", time.monotonic()
        again = set(kept.read_text().splitlines()) if self.options.again else None
        for change in changes(file.read_text(), str(file)):
            key = f"{name}: {change.scope}: {change.before} -> {change.after}"
            if self.options.like not in key or (again is not None and key not in again):
                continue
            if any(key.startswith(text) if rest else key == text for text, rest in listed):
                found["equivalent"] += 1
                continue
            span = range(change.first_line, change.last_line + 1)
            tests = {test for line in span for test in lines.get(str(line), [])}
            killer, error = self._killer(module, change, [i for i in items if i.nodeid in tests])
            self._kills[killer] += error != "timeout"
            if killer and self.options.killers:
                print(f"killed by {killer} ({error}) {key}", flush=True)
            found["killed" if killer else "survived"] += 1
            if not killer:
                left.append(key)
                print(f"SURVIVED ({len(tests)} tests, line {change.first_line}) {key}", flush=True)
        kept.write_text("\n".join(left))
        print(f"{name}: {dict(found)}, {time.monotonic() - began:.0f} s", flush=True)
        self.left += left

    def _killer(
        self, module: ModuleType, change: Change, items: list[pytest.Item]
    ) -> tuple[str, str]:
        """Return the test that finds the change and its error; empty if it survives."""
        # First the tests that have found most mutants, then the fastest.
        items = sorted(items, key=lambda i: (-self._kills[i.nodeid], self._seconds[i.nodeid]))

        def work() -> tuple[str, str]:
            install(module, change.code)
            return self._run_tests(items), self._error

        if not items:
            return "", ""
        found = in_child(work, 20 + 5 * sum(self._seconds[item.nodeid] for item in items))
        return (RUNNING.read_text(), "timeout") if found is None else tuple(found)


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


def in_child(work: Any, timeout_s: float) -> Any:
    """Return what `work` returns in a copy of this process; None if it takes too long."""
    answer = CACHE / f"answer-{os.getpid()}"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            answer.write_text(json.dumps({"found": work()}))
        except BaseException:  # Also the exit of a test run: the parent tells it.
            answer.write_text(json.dumps({"error": traceback.format_exc()}))
        finally:
            os._exit(0)
    ends_at, ended, status = time.monotonic() + timeout_s, 0, 0
    while not ended and time.monotonic() < ends_at:
        time.sleep(0.002)
        ended, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # Also the servers that its tests have started.
    if not ended:
        os.waitpid(child, 0)
    if not ended or status != 0:
        return None
    told = json.loads(answer.read_text())
    if "error" in told:
        raise RuntimeError(told["error"])
    return told["found"]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--like", default="")
    parser.add_argument("--killers", action="store_true")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    folders = [path.resolve() for path in options.paths]
    files = [f for p in folders for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    areas = {area for area in TESTS if any(f.is_relative_to(PACKAGE / area) for f in files)}
    tests = sorted({test for area in areas for test in TESTS[area]})
    mutants = Mutants(files, options)
    flags = ("-p", "no:randomly", "-p", "no:xdist", "-p", "no:cacheprovider", "-s", "-q")
    code = pytest.main([*flags, *tests], plugins=[mutants])
    return int(code) or int(bool(mutants.left))


if __name__ == "__main__":
    sys.exit(main())
