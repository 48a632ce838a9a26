"""Explains the columns and the policies of a comparison, in one line each."""

from collections.abc import Iterable, Sequence

from evenkeel_moe.replay.headline import BASELINE_WORDS
from evenkeel_moe.replay.planners import VERDICT
from evenkeel_moe.replay.tables import Column

POLICY_WORDS = {
    **BASELINE_WORDS,
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


def policy_lines(names: Iterable[str]) -> list[str]:
    """Return one line for each policy among the names, in order."""
    names = list(names)
    plain = dict.fromkeys(name.removesuffix(VERDICT) for name in names)
    lines = [f"{name}: {POLICY_WORDS[name]}" for name in plain if name in POLICY_WORDS]
    if any(name.endswith(VERDICT) for name in names):
        lines.append(
            f"{VERDICT}: the policy's plans are adopted only if later steps show that they pay"
        )
    return lines


def column_lines(columns: Sequence[Column]) -> list[str]:
    """Return one line for each column, in order."""
    return [f"{column.head}: {column.explanation}" for column in columns]
