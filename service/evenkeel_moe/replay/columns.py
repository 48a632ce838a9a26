"""Defines the tables of a comparison, which the terminal and the HTML page both show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenkeel_moe.model.quantities import bytes_text
from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff, goodput_words
from evenkeel_moe.replay.walk_metrics import WalkMetrics


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
    explanation: str
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
    Column(
        "balancedness_mean",
        "bal. mean",
        4,
        "balancedness (mean / largest load of a rank), mean over steps and layers",
        sign=1,
    ),
    Column(
        "balancedness_p5",
        "bal. p5",
        3,
        "balancedness that 95 % of all steps and layers reach",
        sign=1,
    ),
    Column(
        "balancedness_worst",
        "bal. worst",
        3,
        "balancedness of the worst layer, mean over steps",
        sign=1,
    ),
    Column(
        "time_over_fluid",
        "time /fluid",
        4,
        "predicted MoE time / that of a perfect split of the tokens; 1 is the least",
        sign=-1,
    ),
    Column(
        "step_time_p90",
        "p90 step",
        3,
        "predicted MoE time that 90 % of the steps stay below / mean time of a perfect split",
        sign=-1,
    ),
    Column(
        "copies_per_layer",
        "copies /layer",
        1,
        "copies between ranks per layer and replan, after ranks were renamed so that the fewest"
        " experts move; without the first plan",
    ),
    Column("copies_per_layer_raw", "raw", 1, "the same before the renaming"),
    Column("first_copies_per_layer", "first", 1, "copies per layer of the first plan"),
    Column("bytes", "bytes", None, "bytes between ranks in all replans except the first"),
    Column("plan_ms", "plan ms", 1, "median time of one planning call"),
)

TRADEOFF_TITLE = "Extra replicas against KV cache, on one rank"


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
