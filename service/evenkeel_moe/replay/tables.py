"""Shows comparisons and trace descriptions as tables on the terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff, goodput_words
from evenkeel_moe.replay.describe import TraceDescription
from evenkeel_moe.replay.planners import BASELINES
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S, WalkMetrics


def _plain(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison."""

    key: str
    """A field of `WalkMetrics`."""
    head: str
    show: Callable[[float], str]
    sign: int
    """1 where more is better, -1 where less is better, 0 where neither is."""
    explanation: str

    def best(self, values: Sequence[float]) -> set[int]:
        """Return the indices of all values that are shown like the best; none if `sign` is 0."""
        finite = [
            (self.sign * value, index) for index, value in enumerate(values) if math.isfinite(value)
        ]
        if not self.sign or not finite:
            return set()
        shown = self.show(values[max(finite)[1]])
        return {index for _, index in finite if self.show(values[index]) == shown}


COLUMNS = (
    Column(
        "balancedness_mean",
        "bal. mean",
        _plain(4),
        1,
        "balancedness (mean / largest load of a rank), mean over steps and layers",
    ),
    Column(
        "balancedness_p5",
        "bal. p5",
        _plain(3),
        1,
        "balancedness that 95 % of all steps and layers reach",
    ),
    Column(
        "balancedness_worst",
        "bal. worst",
        _plain(3),
        1,
        "balancedness of the worst layer, mean over steps",
    ),
    Column(
        "time_over_fluid",
        "time /fluid",
        _plain(4),
        -1,
        "predicted MoE time / that of a perfect split of the tokens; 1 is the least",
    ),
    Column(
        "step_time_p90",
        "p90 step",
        _plain(3),
        -1,
        "predicted MoE time that 90 % of the steps stay below / mean time of a perfect split",
    ),
    Column(
        "copies_per_layer",
        "copies /layer",
        _plain(1),
        0,
        "copies between ranks per layer and replan, after ranks were renamed so that the fewest"
        " experts move; without the first plan",
    ),
    Column("copies_per_layer_raw", "raw", _plain(1), 0, "the same before the renaming"),
    Column("first_copies_per_layer", "first", _plain(1), 0, "copies per layer of the first plan"),
    Column("bytes", "bytes", _bytes, 0, "bytes between ranks in all replans except the first"),
    Column("plan_ms", "plan ms", _plain(1), 0, "median time of one planning call"),
)
_COPY_TIME = Column(
    "copy_s",
    "copy s",
    _plain(2),
    0,
    f"time of these bytes, if all ranks copy at once at {COPY_BYTES_PER_S / 1e9:g} GB/s each",
)
PAGE_COLUMNS = (*COLUMNS[:-1], _COPY_TIME, COLUMNS[-1])
"""The columns of the page, which has room for more than a usual terminal."""
DROP_ORDER = (
    "balancedness_p5",
    "step_time_p90",
    "copies_per_layer_raw",
    "first_copies_per_layer",
    "plan_ms",
)
"""Columns to leave out, in this order, where a terminal is too narrow to show numbers whole."""


def best_by_column(results: Sequence[WalkMetrics]) -> dict[str, set[int]]:
    """Return the rows to print in bold, by key of the column."""
    return {c.key: c.best([getattr(result, c.key) for result in results]) for c in PAGE_COLUMNS}


def shown_columns(results: Sequence[WalkMetrics], width: int | None = None) -> list[Column]:
    """Return the columns that fit `width` characters; all of them if it is None."""
    columns = list(COLUMNS)
    while width is not None and _width(_table_of(results, columns)) > width:
        left_out = next((c for key in DROP_ORDER for c in columns if c.key == key), None)
        if left_out is None:
            break
        columns.remove(left_out)
    return columns


def comparison_table(results: Sequence[WalkMetrics], width: int | None = None) -> Table:
    """Return a table with one row for each policy; the best value of a column is bold.

    Args:
        results: the rows.
        width: characters available; None for as many as needed.
    """
    return _table_of(results, shown_columns(results, width))


def _width(table: Table) -> int:
    wide = Console(width=10_000)
    return table.__rich_measure__(wide, wide.options).maximum


def _table_of(results: Sequence[WalkMetrics], columns: Sequence[Column]) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="dim"
    )
    table.add_column("policy", no_wrap=True)
    best = best_by_column(results)
    for column in columns:
        table.add_column(column.head.replace(" ", "\n"), justify="right", no_wrap=True)
    for index, result in enumerate(results):
        cells = []
        for column in columns:
            text = column.show(getattr(result, column.key))
            cells.append(Text(text, style="bold" if index in best[column.key] else ""))
        table.add_row(result.policy, *cells, style="dim" if result.policy in BASELINES else None)
    return table


def _titled(title: str, *heads: str, show_header: bool = True) -> Table:
    """Return an empty table whose columns are aligned to the right."""
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title=title,
        title_justify="left",
        show_header=show_header,
    )
    for head in heads:
        table.add_column(head, justify="right")
    return table


TRADEOFF_TITLE = "Extra replicas against KV cache, on one rank"
TRADEOFF_HEADS = (
    "extra replicas", "balance", "MoE time", "KV tokens lost", "KV tokens", "sequences", "goodput",
)  # fmt: skip


def tradeoff_rows(tradeoff: ReplicaTradeoff) -> list[tuple[str, ...]]:
    """Return the cells under `TRADEOFF_HEADS` for each number of replicas; `-` is unknown."""
    rows = []
    for row in tradeoff.rows:
        counts = (row.kv_tokens_lost, row.kv_tokens, row.sequences)
        cells = (
            f"{row.name}{' (present)' if row.present else ''}",
            "-" if row.balancedness is None else _plain(3)(row.balancedness),
            f"{0.0 - row.gain:+.1%}" if math.isfinite(row.gain) else "-",
            *("-" if value is None else f"{value:,}" for value in counts),
            goodput_words(row.goodput_lower, row.goodput_upper).replace("unknown", "-"),
        )
        rows.append(cells)
    return rows


def tradeoff_table(tradeoff: ReplicaTradeoff) -> Table:
    """Return a table with one row for each number of replicas."""
    table = _titled(TRADEOFF_TITLE, *TRADEOFF_HEADS)
    table.columns[0].justify = "left"
    for cells in tradeoff_rows(tradeoff):
        table.add_row(*cells)
    return table


def description_tables(description: TraceDescription) -> tuple[Table, Table, Table]:
    """Return the tables of layers, correlated pairs and drift."""
    heads = ("layer", "max/mean", "in a step", "skew", "balancedness", "consistent", "temporal")
    layers = _titled("Layers", *heads)
    layers.columns[heads.index("skew")].justify = "left"
    for layer in description.layers:
        layers.add_row(
            str(layer.layer_id),
            _plain(2)(layer.skew),
            f"{layer.skew_step:.2f}",
            layer.skew_class,
            _plain(3)(layer.balancedness),
            _first_eight(layer.consistent),
            _first_eight(layer.temporal),
        )
    pairs = _titled("Most correlated pairs", "layer", "experts", "r first half", "r second half")
    for pair in description.pairs[:10]:
        pairs.add_row(
            str(pair.layer_id),
            f"{pair.experts[0]} {pair.experts[1]}",
            f"{pair.r_first_half:.2f}",
            f"{pair.r_second_half:.2f}",
        )
    drift = _titled("Drift", "", "", show_header=False)
    drift.columns[0].justify = "left"
    window = description.drift.window_steps
    rows = {
        f"autocorrelation of load shares at {lag} steps": _plain(2)(value)
        for lag, value in description.drift.autocorrelation.items()
    }
    rows[f"total variation between windows of {window} steps"] = _plain(3)(
        description.drift.between_windows
    )
    rows["total variation from sampling alone"] = _plain(3)(description.drift.within_windows)
    for index, value in enumerate(description.drift.by_window):
        rows[f"  at step {(index + 1) * window}"] = _plain(3)(value)
    for name, text in rows.items():
        drift.add_row(name, text)
    return layers, pairs, drift


def _first_eight(experts: Sequence[int]) -> str:
    shown = " ".join(map(str, experts[:8]))
    return f"{shown} +{len(experts) - 8}" if len(experts) > 8 else shown or "-"
