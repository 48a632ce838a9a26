"""Says in one sentence what a comparison found."""

import math
from collections.abc import Sequence

from evenkeel_moe.model.finding import doubts
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.planners import BASELINES
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S, WalkMetrics

BASELINE_WORDS = {
    "initial": "experts in order with spare slots filled in turn, and never a copy",
    "once": "eplb on the first window, and never again",
    "ewma": "eplb at every replan, on a mean of the past in which old steps weigh less",
}
"""Planner that is there only to compare with -> what it does."""


def baseline_words(comparison: Comparison) -> list[str]:
    """Return one sentence for each planner that is there only to compare with."""
    rows = {result.policy for result in comparison.results}
    return [f"{name}: {words}." for name, words in BASELINE_WORDS.items() if name in rows]


def headline(comparison: Comparison) -> str:
    """Return which policy has the least predicted MoE time, and what it gains.

    If the recording is in doubt, the sentence says that it holds for the counts as they are.
    """
    results, best = _best(comparison)
    if best is None:
        return "The scored steps have no load, so the policies cannot be compared."
    over = f"{best.time_over_fluid - 1:.1%} above a perfect split of tokens"
    moe_time = comparison.setup.objective.cost.basis.moe_time
    on = "On the counts as they are, which are in doubt, " if doubts(comparison.findings) else ""
    found = f"{best.policy} has the least predicted {moe_time}, {over}{_against(best, results)}."
    return on + found


def copies_words(comparison: Comparison) -> str:
    """Return what a replan of that policy copies, and how long it takes; empty if unknown."""
    best = _best(comparison)[1]
    if best is None:
        return ""
    replans = best.replans - 1
    if best.bytes == 0 or replans < 1:
        return f"After its first plan {best.policy} copies nothing."
    return (
        f"A replan of {best.policy} copies {best.bytes / replans / 1e9:.2g} GB between ranks, about"
        f" {best.copy_s / replans:.2g} s at {COPY_BYTES_PER_S / 1e9:g} GB/s per rank."
    )


def _best(comparison: Comparison) -> tuple[list[WalkMetrics], WalkMetrics | None]:
    """Return the results that can be compared, and the one of the best policy among them."""
    results = [one for one in comparison.results if math.isfinite(one.time_over_fluid)]
    chosen = [one for one in results if one.policy not in BASELINES] or results
    return results, min(chosen, key=lambda one: one.time_over_fluid, default=None)


def _against(best: WalkMetrics, results: Sequence[WalkMetrics]) -> str:
    """Return how much less that is than without plans, or than the next policy."""
    others = [one for one in results if one.policy != best.policy]
    if not others:
        return ""
    initial = next((one for one in others if one.policy == "initial"), None)
    other = initial or min(others, key=lambda one: one.time_over_fluid)
    saved = 1 - best.time_over_fluid / other.time_over_fluid
    name = "the initial placement" if initial is not None else other.policy
    return f", {abs(saved):.1%} {'less' if saved >= 0 else 'more'} than {name}"
