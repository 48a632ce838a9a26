"""`python -m examples.join`: a controller, and a toy engine on two processes that it balances."""

import argparse
import re
import sys

from evenkeel_moe.api.words.reasons import sentence
from examples.join.rank import run
from examples.local_fleet import Event, run_example


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
    size, limit_s = asked.ranks, asked.limit_s

    def fault(seen: list[Event], log: str) -> str:
        ends = [detail for _, kind, detail in seen if kind == "end"]
        return judge(ends, size, limit_s, last_reason(log))

    if run_example(run, size, limit_s, fault, asked.forget_hook) != 0:
        return 1
    print("experts moved on the same step of every rank, and no bit of an output changed")
    return 0


def last_reason(log: str) -> str | None:
    """Return the reason of the last cycle before a rank stopped; None if no cycle ended."""
    reasons = re.findall(
        r'"reason": "(\w+)".*"event": "decision"', log.partition('"event": "rank_stopped"')[0]
    )
    return reasons[-1] if reasons else None


def judge(ends: list[dict], size: int, limit_s: float, reason: str | None) -> str:
    """Return what went wrong, and what to do about it; empty if nothing did.

    Args:
        ends: what the ranks said at their end.
        size: the number of ranks.
        limit_s: seconds that they waited for a plan.
        reason: of the controller's last cycle; None if no cycle ended.
    """
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
        waits = "no cycle of the controller ended"
        if reason is not None:
            waits = f"the controller's last cycle ended with {reason}: {sentence(reason)}"
        return (
            f"no plan was carried out in time: within {limit_s:g} s no expert moved, so this run"
            f" shows nothing. Run it again with --limit-s {3 * limit_s:g}; {waits}"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main())
