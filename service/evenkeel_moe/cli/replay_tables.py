"""Renders comparisons and descriptions of recorded traffic for `evenkeel replay`."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from evenkeel_moe.cli.console import Listing, TableColumn
from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.describe import TraceDescription
from evenkeel_moe.replay.planners import BASELINES
from evenkeel_moe.replay.words import (
    COLUMNS,
    TRADEOFF_TITLE,
    legend_lines,
    plain,
    sentences,
    tradeoff_columns,
)


def comparison_parts(comparison: Comparison) -> list[RenderableType]:
    """Return the table of the policies, the sentences about it and the lines that explain it."""
    names = [result.policy for result in comparison.results]
    cells = [[Text(name) for name in names]]
    for column in COLUMNS:
        shown = column.cells(comparison.results)
        cells.append([Text(text, style="bold" if best else "") for text, best in shown])
    rows = list(zip(*cells, strict=True))
    for name, row in zip(names, rows, strict=True):
        if name in BASELINES:
            for cell in row:
                cell.stylize("dim")
    columns = [
        TableColumn(one.head.replace(" ", "\n"), index, right=True)
        for index, one in enumerate(COLUMNS, start=1)
    ]
    return [
        Listing([TableColumn("policy", 0), *columns], rows, gap=1),
        *map(Text, sentences(comparison)),
        *tradeoff_parts(comparison.tradeoff),
        Text("\n".join(("", *legend_lines(comparison))), style="dim"),
    ]


def tradeoff_parts(tradeoff: ReplicaTradeoff | None) -> list[RenderableType]:
    """Return replicas against KV cache as a table and sentences; empty if not asked for."""
    if tradeoff is None:
        return []
    columns = tradeoff_columns(tradeoff)
    words = (Text(tradeoff.words), Text(tradeoff.craft_words))
    return [
        *_titled(TRADEOFF_TITLE, list(columns), list(zip(*columns.values(), strict=True))),
        *words,
    ]


def description_parts(description: TraceDescription) -> list[RenderableType]:
    """Return the tables of layers, correlated pairs and drift."""
    layers = [
        (
            str(layer.layer_id),
            plain(layer.skew, 2),
            plain(layer.skew_step, 2),
            layer.skew_class,
            plain(layer.balancedness, 3),
            _first_eight(layer.consistent),
            _first_eight(layer.temporal),
        )
        for layer in description.layers
    ]
    pairs = [
        (
            str(pair.layer_id),
            f"{pair.experts[0]} {pair.experts[1]}",
            plain(pair.r_first_half, 2),
            plain(pair.r_second_half, 2),
        )
        for pair in description.pairs[:10]
    ]
    drift = description.drift
    window = drift.window_steps
    changes = [
        *(
            (f"autocorrelation of load shares at {lag} steps", plain(value, 2))
            for lag, value in drift.autocorrelation.items()
        ),
        (f"total variation between windows of {window} steps", plain(drift.between_windows, 3)),
        ("total variation from sampling alone", plain(drift.within_windows, 3)),
        *(
            (f"  at step {number * window}", plain(value, 3))
            for number, value in enumerate(drift.by_window, start=1)
        ),
    ]
    heads = ("layer", "max/mean", "in a step", "skew", "balancedness", "consistent", "temporal")
    return [
        *_titled("Layers", heads, layers),
        *_titled(
            "Most correlated pairs", ("layer", "experts", "r first half", "r second half"), pairs
        ),
        *_titled("Drift", ("", ""), changes),
    ]


def _titled(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[RenderableType]:
    """Return a title and a table whose columns, but the first, are aligned to the right."""
    columns = [TableColumn(head, index, right=index > 0) for index, head in enumerate(heads)]
    return [Text(f"\n{title}", style="bold"), Listing(columns, rows)]


def _first_eight(experts: Sequence[int]) -> str:
    shown = " ".join(map(str, experts[:8]))
    return f"{shown} +{len(experts) - 8}" if len(experts) > 8 else shown or "-"
