"""Runs the tests of the faults that people met, and lists one line for each: `make faults`.

Such a test has the mark `fault(whom, what)`: to whom it happened, and what happened. Tests of one
fault share the mark. Those that need an engine or a browser run with the tests of that kind.
"""

import sys
from collections import defaultdict
from pathlib import Path

import pytest

ELSEWHERE = ("engines", "vllm", "promtool", "buf", "timed", "browser", "slow")
"""Marks of tests that need more than `make test` installs."""
PROPERTY = "fault"


def attach_faults(items: list[pytest.Item]) -> None:
    """Let the report of each test carry the fault it is marked with, also from a worker."""
    for item in items:
        for mark in item.iter_markers("fault"):
            whom, what = mark.args
            item.user_properties.append((PROPERTY, f"{whom}: {what}"))


class FaultList:
    """Collects the outcome of the tests of each fault and prints the list."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = defaultdict(list)
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test of a report, and whether any of its phases failed."""
        for name, fault in report.user_properties:
            if name != PROPERTY:
                continue
            test = report.nodeid.partition("[")[0]
            if test not in self.tests[str(fault)]:
                self.tests[str(fault)].append(test)
            if not report.passed:
                self.failed.add(str(fault))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line for each fault."""
        terminalreporter.section("faults")
        for fault, tests in sorted(self.tests.items()):
            state = "FAILS" if fault in self.failed else "holds"
            terminalreporter.write_line(f"{state}  {fault}  ({', '.join(tests)})")
        held = len(self.tests) - len(self.failed)
        terminalreporter.write_line(f"{held} of {len(self.tests)} faults stay mended")


def main() -> int:
    """Run the marked tests and return the exit code of pytest."""
    chosen = f"fault and not ({' or '.join(ELSEWHERE)})"
    flags = ["-q", "--no-header", "-n", "3", "--dist", "worksteal", "--durations=0", "-m", chosen]
    return int(pytest.main([*flags, str(Path(__file__).parent)], plugins=[FaultList()]))


if __name__ == "__main__":
    sys.exit(main())
