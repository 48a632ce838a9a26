"""Runs the demo under keel and under EPLB with the same traffic: python -m bench.demo.

Shows how many experts each policy moved and the balancedness that the ranks measured afterwards.
"""

import re
import subprocess
import sys

from bench.report import Row, write_report

POLICIES = ("keel", "eplb")


def run_demo(policy: str) -> str:
    """Return the output of the demo. Its checks may fail under EPLB; the bench ignores that."""
    command = [sys.executable, "-m", "evenkeel_moe", "demo", "--plain", "--policy", policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not re.search(r"^Plan 1 ", done.stdout, re.MULTILINE):
        raise SystemExit(f"the demo made no plan under {policy}:\n{done.stdout}{done.stderr}")
    return done.stdout


def rows_of(policy: str, printed: str) -> list[Row]:
    """Return the totals of all plans of the run, and the balancedness after the last plan."""
    moved = [int(count) for count in re.findall(r"^  moved +(\d+) expert", printed, re.MULTILINE)]
    after = [
        float(value)
        for value in re.findall(r"^  balancedness +[\d.]+ -> ([\d.]+)", printed, re.MULTILINE)
    ]
    return [
        Row(f"demo_{policy}_plans", float(len(moved)), "plans"),
        Row(f"demo_{policy}_copies", float(sum(moved)), "experts moved"),
        Row(
            f"demo_{policy}_balancedness_mean",
            sum(after) / len(after),
            "after a plan, measured by the ranks",
        ),
        Row(f"demo_{policy}_balancedness_last", after[-1], "after the last plan"),
    ]


def main() -> None:
    """Run the demo once with each policy and write the report."""
    write_report("demo", [row for policy in POLICIES for row in rows_of(policy, run_demo(policy))])


if __name__ == "__main__":
    main()
