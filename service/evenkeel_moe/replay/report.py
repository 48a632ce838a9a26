"""Writes a comparison as one self-contained HTML page that loads nothing and runs no script."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.finding import Severity
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.replay.charts import PALETTE, lines
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.planners import BASELINES
from evenkeel_moe.replay.walk import Walk
from evenkeel_moe.replay.walk_metrics import ratio
from evenkeel_moe.replay.words import (
    COLUMNS,
    TRADEOFF_TITLE,
    legend_lines,
    sentences,
    tradeoff_columns,
)

MAX_POINTS = 120
"""Most points of a line: neighbouring steps are averaged, so that lines can be told apart."""


_METHOD = (
    "Every plan was made on the steps before it and scored on the steps after it. Times are"
    " predictions from recorded loads, not measurements of an engine."
)


def render_report(comparison: Comparison, made_by: str = "") -> str:
    """Return the page as HTML text.

    Args:
        comparison: what the page shows.
        made_by: the command and the date, to be shown; empty if unknown.
    """
    tradeoff = comparison.tradeoff
    cost_model, horizon = comparison.cost_model, comparison.setup.horizon_steps
    sections = [
        _head(comparison, made_by),
        _results(comparison),
        _section(
            "Balancedness over time",
            "Mean over layers of mean / max rank load, averaged over neighbouring steps. "
            "1 is a perfect split. Vertical lines mark replans.",
            _over_time(comparison, _balance_by_step, "balancedness"),
        ),
        _section(
            f"Predicted {cost_model.moe_time} of each step",
            "Time of a step over the time it would take if tokens could be split freely. "
            "Lower is better.",
            _over_time(comparison, _time_by_step, "time / fluid bound"),
        ),
        _section(
            "Rank load per layer, before and after",
            f"Load of each rank divided by the mean of its layer, summed over the last {horizon} "
            "steps. One row per layer, one column per rank.",
            _heat_maps(comparison),
        ),
    ]
    if tradeoff is not None:
        text = f"{tradeoff.words} {tradeoff.craft_words}".strip()
        columns = tradeoff_columns(tradeoff)
        table = _table(columns, zip(*columns.values(), strict=True))
        sections.append(_section(TRADEOFF_TITLE, text, table))
    title = escape(f"Replay of {comparison.trace.name}")
    page = Template(resources.files(__package__).joinpath("report.html").read_text("utf-8"))
    light, dark = (
        "".join(f"--{name}:{colours[theme]};" for name, colours in PALETTE.items())
        for theme in (0, 1)
    )
    return page.substitute(title=title, light=light, dark=dark, sections="".join(sections))


def _section(title: str, text: str, body: str) -> str:
    return (
        f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>"
        f'<div class="scroll">{body}</div></section>'
    )


def _head(comparison: Comparison, made_by: str) -> str:
    """Return what stands above the tables: the doubts first, then the verdict."""

    def told(severity: Severity) -> str:
        return "".join(
            f'<p class="{severity}">{severity.capitalize()}: {escape(each.words)}</p>'
            for each in comparison.trace.findings
            if each.severity is severity
        )

    verdict, *texts = (escape(text) for text in sentences(comparison))
    facts = " · ".join(f"{value} {name}" for name, value in comparison.facts().items())
    origin = f'<p class="facts">Made by <code>{escape(made_by)}</code></p>' if made_by else ""
    return (
        f"<header><h1>Replay of {escape(comparison.trace.name)}</h1>"
        f'{told(Severity.DOUBT)}<p class="verdict">{verdict}</p><p class="facts">{facts}</p>'
        f"{''.join(f'<p>{text}</p>' for text in [*texts, _METHOD])}{told(Severity.NOTE)}{origin}"
        "</header>"
    )


def _results(comparison: Comparison) -> str:
    """Return the table of the policies and the lines that explain it."""
    names = [result.policy for result in comparison.results]
    columns = [
        [f"<b>{text}</b>" if best else text for text, best in column.cells(comparison.results)]
        for column in COLUMNS
    ]
    heads = [column.head for column in COLUMNS]
    words = ["Bold: the best value of a column, or a tie.", *legend_lines(comparison)]
    return (
        f'<section><div class="scroll">'
        f"{_table(['policy', *heads], zip(map(escape, names), *columns, strict=True))}</div>"
        f'<p class="legend">{"<br>".join(map(escape, words))}</p></section>'
    )


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already; the first of a row names it."""
    lines = [
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    ]
    titles = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _balance_by_step(walk: Walk) -> NDArray[np.float64]:
    """Return the mean over layers of each step, NaN without load."""
    return metrics.balancedness_by_layer(walk.rank_load.swapaxes(0, 1))


def _time_by_step(walk: Walk) -> NDArray[np.float64]:
    return ratio(walk.times.sum(axis=1), walk.fluid.sum(axis=1))


def _over_time(
    comparison: Comparison, by_step: Callable[[Walk], NDArray[np.float64]], label: str
) -> str:
    steps = comparison.walks[0].steps
    count = len(steps) * comparison.setup.horizon_steps
    group = math.ceil(count / MAX_POINTS)

    def means(values: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = count // group * group
        return np.asarray(values[:whole].reshape(-1, group).mean(axis=1), np.float64)

    xs = means(steps[0] + 0.5 + np.arange(count))
    series = {walk.policy: means(by_step(walk)) for walk in comparison.walks}
    return lines(label, xs, series, marks=steps.tolist(), grey=BASELINES)


def _heat_maps(comparison: Comparison) -> str:
    """Return a map of layers and ranks for the initial placement and for each policy's last one."""
    setup = comparison.setup
    first = int(comparison.walks[0].steps[-1])
    last = first + setup.horizon_steps
    load, split = setup.load[first:last], setup.split(first, last)
    initial = metrics.rank_load(load, Placement.initial(setup.shape), split).sum(axis=0)
    planned = [walk for walk in comparison.walks if walk.policy not in BASELINES]
    shown = planned or [walk for walk in comparison.walks if walk.policy != "initial"]
    loads = {"before: initial": initial}
    loads |= {
        f"after: {walk.policy}": walk.rank_load[-setup.horizon_steps :].sum(axis=0)
        for walk in shown
    }
    maps = {name: ratio(load, load.mean(axis=1, keepdims=True)) for name, load in loads.items()}
    distances = np.abs(np.concatenate([values.ravel() for values in maps.values()]) - 1)
    known = distances[np.isfinite(distances)]
    reach = max(0.1, float(np.percentile(known, 98))) if known.size else 1.0
    drawn = "".join(
        _heat_map(name, values, comparison.trace.layer_ids, reach) for name, values in maps.items()
    )
    return (
        f"<p>Blue: {max(0.0, 1 - reach):.2f} of an even share or less. Orange: {1 + reach:.2f} or"
        f' more. Point at a cell to see its number.</p><div class="maps">{drawn}</div>'
    )


def _heat_map(
    name: str, values: NDArray[np.float64], layer_ids: Sequence[int], reach: float
) -> str:
    """Return a table with one cell for each rank of each layer, shaded by its distance from 1.

    Args:
        name: of the map.
        values: (L, R) load of each rank over the mean of its layer; NaN leaves the cell blank.
        layer_ids: (L,) names of the rows.
        reach: the distance from 1 that gets the full shade.
    """
    known = values[np.isfinite(values)]
    caption = f"{name}, worst {known.max():.2f}" if known.size else f"{name}, no load"
    rows = []
    for layer, row in zip(layer_ids, values.tolist(), strict=True):
        cells = [
            f'<td style="--side:{_shade(value, reach)}"'
            f' title="layer {layer} rank {rank}: {value:.2f}"></td>'
            for rank, value in enumerate(row)
        ]
        rows.append(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>')
    return f'<table class="map"><caption>{escape(caption)}</caption>{"".join(rows)}</table>'


def _shade(value: float, reach: float) -> str:
    """Return the colour that is laid over that of an even share."""
    if not math.isfinite(value):
        return "var(--paper)"
    side = "over" if value > 1 else "under"
    return f"color-mix(in srgb,var(--{side}) {min(abs(value - 1) / reach, 1):.0%},transparent)"
