"""Says in sentences what a comparison found, and what its policies and columns are."""

import math
from collections.abc import Collection, Sequence

from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.quantities import bytes_text
from evenkeel_moe.replay.columns import COLUMNS
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.planners import BASELINES, VERDICT
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S, WalkMetrics

POLICY_WORDS = {
    "initial": "experts in order with spare slots filled in turn, and never a copy",
    "once": "eplb on the first window, and never again",
    "ewma": "eplb at every replan, on a mean of the past in which old steps weigh less",
    "eplb": "DeepSeek's algorithm: replicas for the experts with most tokens, then an even split"
    " of the tokens over the ranks",
    "eplb-global": "eplb over all ranks at once, for decode",
    "eplb-hierarchical": "eplb over nodes first and then inside each node, for prefill",
    "craft": "for each layer its own number of replicas, so that they use little memory",
    "gem": "no replicas; the slowest rank of each step gets less, also if ranks differ in speed",
    "libra": "replicas near the ranks whose tokens choose the expert, as the paper prints it",
    "metro": "eplb, with the steps in which an expert has tokens at all as its load",
    "keel": "the least predicted MoE time of the slowest ranks, plus a price for each copy;"
    " Evenkeel's default",
}
"""Name -> what it does."""


def legend_lines(comparison: Comparison, heads: Collection[str]) -> list[str]:
    """Return one line for each column of these heads, and for each policy of the comparison."""
    lines = [f"{one.head}: {one.explanation}" for one in COLUMNS if one.head in heads]
    names = [result.policy for result in comparison.results]
    plain = dict.fromkeys(name.removesuffix(VERDICT) for name in names)
    lines += [f"{name}: {POLICY_WORDS[name]}" for name in plain if name in POLICY_WORDS]
    if any(name.endswith(VERDICT) for name in names):
        lines.append(
            f"{VERDICT}: the policy's plans are adopted only if later steps show that they pay"
        )
    return lines


def sentences(comparison: Comparison) -> list[str]:
    """Return what the comparison found, the verdict first, and what it rests on.

    The verdict names the policy with the least predicted MoE time and what it gains. If the
    recording is in doubt, it says that it holds for the counts as they are.
    """
    known = [one for one in comparison.results if math.isfinite(one.time_over_fluid)]
    chosen = [one for one in known if one.policy not in BASELINES] or known
    best = min(chosen, key=lambda one: one.time_over_fluid, default=None)
    if best is None:
        found = ["The scored steps have no load, so the policies cannot be compared."]
    else:
        doubted = doubts(comparison.trace.findings)
        on = "On the counts as they are, which are in doubt, " if doubted else ""
        verdict = (
            f"{on}{best.policy} has the least predicted {comparison.cost_model.moe_time},"
            f" {best.time_over_fluid - 1:.1%} above a perfect split of tokens"
            f"{_against(best, known)}."
        )
        found = [verdict, _copies_words(best)]
    found.append(f"Cost model: {comparison.cost_model.words}.")
    return found if comparison.replicas is None else [*found, comparison.replicas.words]


def _copies_words(best: WalkMetrics) -> str:
    """Return what a replan of a policy copies, and how long it takes."""
    replans = best.replans - 1
    if best.bytes == 0 or replans < 1:
        return f"After its first plan {best.policy} copies nothing."
    return (
        f"A replan of {best.policy} copies {bytes_text(best.bytes / replans)} between ranks, about"
        f" {best.copy_s / replans:.2g} s at {COPY_BYTES_PER_S / 1e9:g} GB/s per rank."
    )


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
