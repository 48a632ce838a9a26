"""Says in one sentence what a comparison found."""

import math
from collections.abc import Sequence

from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.planners import BASELINES
from evenkeel_moe.replay.walk_metrics import WalkMetrics

COPY_BYTES_PER_S = 5e9
"""Rate of copies of one rank, as the controller assumes it (`planner.copy_bytes_per_s`)."""

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
    """Return which policy has the least predicted MoE time, what it gains and what it copies."""
    results = [one for one in comparison.results if math.isfinite(one.time_over_fluid)]
    if not results:
        return "The scored steps have no load, so the policies cannot be compared."
    chosen = [one for one in results if one.policy not in BASELINES] or results
    best = min(chosen, key=lambda one: one.time_over_fluid)
    over = f"{best.time_over_fluid - 1:.1%} above a perfect split of tokens"
    moe_time = comparison.setup.objective.cost.basis.moe_time
    text = f"{best.policy} has the least predicted {moe_time}, {over}{_against(best, results)}."
    replans = best.replans - 1
    if best.bytes == 0 or replans < 1:
        return f"{text} After its first plan it copies nothing."
    seconds = copy_seconds(best.bytes, comparison.setup.shape.num_ranks) / replans
    return (
        f"{text} A replan copies {best.bytes / replans / 1e9:.2g} GB between ranks, about"
        f" {seconds:.2g} s at {COPY_BYTES_PER_S / 1e9:g} GB/s per rank."
    )


def copy_seconds(nbytes: float, num_ranks: int) -> float:
    """Return the time of copies that all ranks make at once at `COPY_BYTES_PER_S`."""
    return nbytes / (num_ranks * COPY_BYTES_PER_S)


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
