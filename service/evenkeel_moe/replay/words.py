"""Says what a comparison found, in tables and sentences for the terminal and the HTML page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.quantities import bytes_text
from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff, goodput_words
from evenkeel_moe.planning.policies.registry import known_policies
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.planners import BASELINES, VERDICT
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S, WalkMetrics

# --- tables ---------------------------------------------------------------------------------------


def plain(value: float | None, decimals: int) -> str:
    """Return a number with this many decimals; `-` if it is unknown."""
    known = value is not None and math.isfinite(value)
    return f"{value:,.{decimals}f}" if known else "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison."""

    key: str
    """A field of `WalkMetrics`."""
    head: str
    decimals: int | None
    """None for bytes."""
    sign: int = 0
    """1 where more is better, -1 where less is better, 0 where neither is."""

    def cells(self, results: Sequence[WalkMetrics]) -> list[tuple[str, bool]]:
        """Return the text of each result, and whether it is shown like the best value."""
        values: list[float] = [getattr(result, self.key) for result in results]
        texts = [
            bytes_text(value) if self.decimals is None else plain(value, self.decimals)
            for value in values
        ]
        known = [value for value in values if math.isfinite(value)]
        if not self.sign or not known:
            return [(text, False) for text in texts]
        best = texts[values.index(max(known, key=lambda value: self.sign * value))]
        return [(text, text == best) for text in texts]


COLUMNS = (
    Column("balancedness_mean", "bal. mean", 4, sign=1),
    Column("balancedness_p5", "bal. p5", 3, sign=1),
    Column("balancedness_worst", "bal. worst", 3, sign=1),
    Column("time_over_fluid", "time /fluid", 4, sign=-1),
    Column("step_time_p90", "p90 step", 3, sign=-1),
    Column("copies_per_layer", "copies /layer", 1),
    Column("copies_per_layer_raw", "raw", 1),
    Column("first_copies_per_layer", "first", 1),
    Column("bytes", "bytes", None),
    Column("plan_ms", "plan ms", 1),
)
_COLUMN_WORDS = {
    "bal. mean": "balancedness (mean / largest load of a rank), mean over steps and layers",
    "bal. p5": "balancedness that 95 % of all steps and layers reach",
    "bal. worst": "balancedness of the worst layer, mean over steps",
    "time /fluid": "predicted MoE time / that of a perfect split of the tokens; 1 is the least",
    "p90 step": "predicted MoE time that 90 % of the steps stay below / mean time of a perfect"
    " split",
    "copies /layer": "copies between ranks per layer and replan, after ranks were renamed so that"
    " the fewest experts move; without the first plan",
    "raw": "the same before the renaming",
    "first": "copies per layer of the first plan",
    "bytes": "bytes between ranks in all replans except the first",
    "plan ms": "median time of one planning call",
}
"""Head of a column -> what it shows."""

TRADEOFF_TITLE = "Extra replicas against KV cache, on one rank, placed by a simple rule"


def tradeoff_columns(tradeoff: ReplicaTradeoff) -> dict[str, list[str]]:
    """Return the cells by head of column, the most important first; `-` is unknown.

    Columns without any value are left out, and that of memory where KV tokens tell the same.
    """
    rows = tradeoff.rows
    columns = {
        "extra replicas": [f"{row.name}{' (present)' if row.present else ''}" for row in rows],
        "balance": [plain(row.balancedness, 3) for row in rows],
        "MoE time": [f"{0.0 - row.gain:+.1%}" if math.isfinite(row.gain) else "-" for row in rows],
        "goodput": [
            goodput_words(row.goodput_lower, row.goodput_upper).replace("unknown", "-")
            for row in rows
        ],
        "sequences": [plain(row.sequences, 0) for row in rows],
        "KV tokens lost": [plain(row.kv_tokens_lost, 0) for row in rows],
        "KV tokens": [plain(row.kv_tokens, 0) for row in rows],
    }
    if tradeoff.kv is None:
        columns["more memory"] = [bytes_text(row.extra_bytes_per_rank) for row in rows]
    return {head: cells for head, cells in columns.items() if set(cells) != {"-"}}


# --- sentences ------------------------------------------------------------------------------------

_BASELINE_WORDS = {
    "initial": "experts in order with spare slots filled in turn, and never a copy",
    "once": "eplb on the first window, and never again",
    "ewma": "eplb at every replan, on a mean of the past in which old steps weigh less",
}
"""Name -> what it does."""


def legend_lines(comparison: Comparison) -> list[str]:
    """Return one line for each column, and for each policy of the comparison."""
    lines = [f"{head}: {words}" for head, words in _COLUMN_WORDS.items()]
    names = [result.policy for result in comparison.results]
    plain = dict.fromkeys(name.removesuffix(VERDICT) for name in names)
    words = _BASELINE_WORDS | {name: one.summary for name, one in known_policies().items()}
    lines += [f"{name}: {words[name]}" for name in plain if name in words]
    if any(name.endswith(VERDICT) for name in names):
        lines.append(
            f"{VERDICT}: the policy's plans are adopted only if later steps show that they pay"
        )
    return lines


def sentences(comparison: Comparison) -> list[str]:
    """Return what the comparison found, the verdict first, and what it rests on.

    The verdict names the policy with the least predicted MoE time, what it gains, and a baseline
    that has less. If the recording is in doubt, it says that it holds for the counts as they are.
    """
    known = [one for one in comparison.results if math.isfinite(one.time_over_fluid)]
    chosen = [one for one in known if one.policy not in BASELINES] or known
    best = min(chosen, key=lambda one: one.time_over_fluid, default=None)
    if best is None:
        found = ["The scored steps have no load, so the policies cannot be compared."]
    else:
        least = min(known, key=lambda one: one.time_over_fluid)
        better = least.time_over_fluid < best.time_over_fluid
        among = f" of the policies (the baseline {least.policy} has less)" if better else ""
        doubted = doubts(comparison.trace.findings)
        on = "On the counts as they are, which are in doubt, " if doubted else ""
        verdict = (
            f"{on}{best.policy} has the least predicted {comparison.cost_model.moe_time}{among},"
            f" {best.time_over_fluid - 1:.1%} above a perfect split of tokens"
            f"{_against(best, known)}."
        )
        found = [verdict, _copies_words(best)]
    found.append(f"Cost model: {comparison.cost_model.words}.")
    return found if comparison.replicas is None else [*found, comparison.replicas.words]


def _copies_words(best: WalkMetrics) -> str:
    """Return what a replan of a policy copies, and how long it takes."""
    replans = best.replans - 1
    if best.copies_per_layer == 0 or replans < 1:
        return f"After its first plan {best.policy} copies nothing."
    if math.isnan(best.bytes):
        return (
            f"A replan of {best.policy} copies {best.copies_per_layer:.1f} experts of each layer"
            " between ranks, of unknown size."
        )
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
