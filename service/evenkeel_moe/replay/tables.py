"""Comparisons and descriptions as tables for people and as plain values for JSON."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from evenkeel_moe.replay.describe import TraceDescription
from evenkeel_moe.replay.figures import Figures
from evenkeel_moe.replay.planners import BASELINES

__all__ = ["COLUMNS", "Column", "comparison_table", "description_tables"]


def _plain(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure as a column."""

    key: str
    head: str
    words: str
    show: Callable[[float], str]
    sign: int = 0
    """1 where more is better, -1 where less is, 0 where it is neither."""

    def best(self, values: Sequence[float]) -> set[int]:
        """Indices of the best, as shown; none where no order is meant."""
        finite = [
            (self.sign * value, index) for index, value in enumerate(values) if math.isfinite(value)
        ]
        if not self.sign or not finite:
            return set()
        shown = self.show(values[max(finite)[1]])
        return {index for _, index in finite if self.show(values[index]) == shown}


COLUMNS = (
    Column("balancedness_mean", "bal. mean", "mean / max rank load, mean over steps and layers", _plain(4), 1),
    Column("balancedness_p5", "bal. p5", "its 5th percentile over steps and layers", _plain(3), 1),
    Column("balancedness_worst", "bal. worst", "the worst layer's mean over steps", _plain(3), 1),
    Column("time_over_fluid", "time /fluid", "predicted MoE time over that of a perfect split", _plain(4), -1),
    Column("step_time_p90", "p90 step", "p90 over steps of predicted time, over the mean fluid time", _plain(3), -1),
    Column("copies_per_layer", "copies /layer", "between ranks, per layer and replan, relabelled, first plan apart", _plain(1)),
    Column("copies_per_layer_raw", "raw", "the same before relabelling", _plain(1)),
    Column("first_copies_per_layer", "first", "copies per layer of the first plan", _plain(1)),
    Column("bytes", "bytes", "between ranks in all replans but the first", _bytes),
    Column("plan_ms", "plan ms", "median time of one planning call", _plain(1)),
)  # fmt: skip
DROP_ORDER = (
    "balancedness_p5",
    "step_time_p90",
    "copies_per_layer_raw",
    "first_copies_per_layer",
    "plan_ms",
)
"""Columns left out, one after the other, where a terminal is too narrow: a cut number is worse than none."""


def comparison_table(figures: Sequence[Figures], width: int | None = None) -> Table:
    """One row a policy; the best of a column is bold.

    Args:
        figures: the rows.
        width: columns of text there are; None for as many as needed.
    """
    columns = list(COLUMNS)
    while (table := _table_of(figures, columns)) and width is not None and _width(table) > width:
        left_out = next((c for key in DROP_ORDER for c in columns if c.key == key), None)
        if left_out is None:
            break
        columns.remove(left_out)
    return table


def _width(table: Table) -> int:
    wide = Console(width=10_000)
    return table.__rich_measure__(wide, wide.options).maximum


def _table_of(figures: Sequence[Figures], columns: Sequence[Column]) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="dim"
    )
    table.add_column("policy", no_wrap=True)
    best = {
        column.key: column.best([getattr(one, column.key) for one in figures]) for column in columns
    }
    for column in columns:
        table.add_column(column.head.replace(" ", "\n"), justify="right", no_wrap=True)
    for index, one in enumerate(figures):
        cells = []
        for column in columns:
            text = column.show(getattr(one, column.key))
            cells.append(f"[bold]{text}[/bold]" if index in best[column.key] else text)
        table.add_row(one.policy, *cells, style="dim" if one.policy in BASELINES else None)
    return table


def description_tables(description: TraceDescription) -> tuple[Table, Table, Table]:
    """Layers, pairs, drift."""
    layers = Table(
        box=None, pad_edge=False, header_style="dim", title="Layers", title_justify="left"
    )
    for head in (
        "layer",
        "max/mean",
        "in a step",
        "skew",
        "balancedness",
        "consistent",
        "temporal",
    ):
        layers.add_column(head, justify="right" if head != "skew" else "left")
    for layer in description.layers:
        layers.add_row(
            str(layer.layer_id),
            _plain(2)(layer.skew),
            f"{layer.skew_step:.2f}",
            layer.skew_class,
            _plain(3)(layer.balancedness),
            _listed(layer.consistent),
            _listed(layer.temporal),
        )
    pairs = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title="Most correlated pairs",
        title_justify="left",
    )
    for head in ("layer", "experts", "r first half", "r second half"):
        pairs.add_column(head, justify="right")
    for pair in description.pairs[:10]:
        pairs.add_row(
            str(pair.layer_id),
            f"{pair.experts[0]} {pair.experts[1]}",
            f"{pair.r_first_half:.2f}",
            f"{pair.r_second_half:.2f}",
        )
    drift = Table(box=None, pad_edge=False, show_header=False, title="Drift", title_justify="left")
    drift.add_column()
    drift.add_column(justify="right")
    for lag, value in description.drift.autocorrelation.items():
        drift.add_row(f"autocorrelation of shares at {lag} steps", _plain(2)(value))
    window = description.drift.window_steps
    drift.add_row(
        f"total variation between windows of {window} steps",
        _plain(3)(description.drift.between_windows),
    )
    drift.add_row(
        "the same inside two windows (sampling alone)", _plain(3)(description.drift.within_windows)
    )
    for index, value in enumerate(description.drift.by_window):
        drift.add_row(f"  at step {(index + 1) * window}", _plain(3)(value))
    return layers, pairs, drift


def _listed(experts: Sequence[int]) -> str:
    shown = " ".join(map(str, experts[:8]))
    return f"{shown} +{len(experts) - 8}" if len(experts) > 8 else shown or "-"
