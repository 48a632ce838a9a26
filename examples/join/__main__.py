"""`python -m examples.join`: a controller, and a toy engine on two processes that it balances."""

import argparse
import sys
import tempfile
from pathlib import Path

from examples.join.rank import run
from examples.local_fleet import local_controller, run_ranks


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    options.add_argument(
        "--limit-s",
        type=float,
        default=300.0,
        help="seconds to wait for a plan; on a busy machine give more (default: %(default)s)",
    )
    options.add_argument(
        "--forget-hook",
        action="store_true",
        help="do not renew what was derived from the weights, to see the probe find it",
    )
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_controller(folder) as address:
            seen = run_ranks(run, asked.ranks, address, asked.limit_s, asked.forget_hook)
        ends = [detail for _, kind, detail in seen if kind == "end"]
        fault = judge(ends, asked.ranks, asked.limit_s)
        if fault:
            print(f"FAILED: {fault}")
            print((folder / "controller.log").read_text(errors="replace")[-2000:])
            return 1
    print("experts moved on the same step of every rank, and no bit of an output changed")
    return 0


def judge(ends: list[dict], size: int, limit_s: float) -> str:
    """Return what went wrong, and what to do about it; empty if nothing did."""
    left = [detail["left"] for detail in ends if detail["left"]]
    if left:
        cause = next((text for text in left if not text.startswith("lost a peer")), left[0])
        return f"{len(left)} ranks left the group: {cause}"
    if len(ends) < size:
        return f"{size - len(ends)} ranks did not finish"
    troubles = [detail["trouble"] for detail in ends if detail["trouble"]]
    if troubles:
        return f"{len(troubles)} ranks take no more plans: {troubles[0]}"
    if any(detail["wrong"] for detail in ends):
        return "an output changed"
    if len({detail["digest"] for detail in ends}) > 1:
        return "the ranks ended with different maps"
    if not all(detail["epoch"] for detail in ends):
        return (
            f"no plan was carried out in time: within {limit_s:g} s no expert moved, so this run"
            f" shows nothing. Run it again with --limit-s {3 * limit_s:g}; if that changes nothing,"
            " the last `reason` below says what the controller waits for"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main())
