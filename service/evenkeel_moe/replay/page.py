"""One self-contained page about a comparison: no script, no font, no image from anywhere else."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.replay.budget import BudgetPoint
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.planners import BASELINES, VERDICT
from evenkeel_moe.replay.style import CSS, HUES
from evenkeel_moe.replay.svg import Panel, Series, bars, heat_map, lines, ranges
from evenkeel_moe.replay.tables import COLUMNS
from evenkeel_moe.replay.walk import Walk

__all__ = ["render_page"]

MOST_POINTS = 120
"""Points per line: steps are averaged in groups so that lines can be told apart."""


def render_page(comparison: Comparison) -> str:
    """The page as HTML text."""
    walks = comparison.walks
    styles = _styles([walk.policy for walk in walks])
    sections = [
        _head(comparison),
        _table(comparison),
        _section(
            "Balancedness over time",
            "Mean over layers of mean / max rank load, averaged over neighbouring steps. 1 is a perfect split. "
            "Hairlines mark replans.",
            _over_time(comparison, styles, _balance_by_step, "balancedness"),
        ),
        _section(
            "Predicted MoE time over time",
            "Time of a step over the time it would take if tokens could be split freely. Lower is better.",
            _over_time(comparison, styles, _time_by_step, "time / fluid bound"),
        ),
        _section(
            "Tail of the predicted step time",
            "Median, p90 (large mark) and p99 of a step's MoE time, over the mean fluid time of a step.",
            _tail(comparison, styles),
        ),
        _section(
            "Copies paid",
            "Experts copied between ranks so far, per layer, after relabelling. The first plan starts from the "
            "initial placement.",
            _copies(walks, styles),
        ),
        _section(
            "Rank load per layer, before and after",
            f"Load of each rank over the mean of its layer, summed over the last {comparison.setup.horizon_steps} "
            "steps. One row a layer, one column a rank.",
            _heat_maps(comparison),
        ),
        _section(
            "Replicas per layer",
            "Of the last plan of each policy.",
            _replicas(comparison, styles),
        ),
    ]
    if comparison.budget:
        sections.append(
            _section(
                "What replicas buy and cost",
                "The same replica rule at every budget, replanned and scored on later steps like everything "
                "here. Memory of replicas is KV cache that cannot be.",
                _budget(comparison.budget),
            )
        )
    title = f"Replay of {comparison.name}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{CSS}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _styles(names: Sequence[str]) -> dict[str, str]:
    """A colour and dash class for each policy; the same policy looks the same on every page."""
    free = [hue for hue in HUES.values() if hue not in {HUES.get(name) for name in names}]
    styles: dict[str, str] = {}
    for name in names:
        ungated = name.removesuffix(VERDICT)
        if ungated != name and ungated in styles:
            styles[name] = f"{styles[ungated]} gated"
        elif name in BASELINES:
            styles[name] = f"base-{name}"
        elif name in HUES:
            styles[name] = HUES[name]
        else:
            styles[name] = free.pop(0) if free else "hue-0"
    return styles


def _section(title: str, words: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>{body}</section>"


def _head(comparison: Comparison) -> str:
    facts = " · ".join(
        f"{escape(str(value))} {escape(key)}" for key, value in comparison.facts().items()
    )
    notes = "".join(f"<p>Note: {escape(note)}.</p>" for note in comparison.notes)
    return (
        f"<header><h1>Replay of {escape(comparison.name)}</h1><p class='facts'>{facts}</p>"
        "<p>Every plan was made on the steps before it and scored on the steps after it. Times are predictions "
        f"from recorded loads, not measurements of an engine.</p>{notes}</header>"
    )


def _table(comparison: Comparison) -> str:
    heads = "".join(
        f'<th scope="col" title="{escape(c.words, quote=True)}">{escape(c.head)}</th>'
        for c in COLUMNS
    )
    rows = []
    best = {c.key: c.best([getattr(f, c.key) for f in comparison.figures]) for c in COLUMNS}
    for index, figures in enumerate(comparison.figures):
        cells = []
        for column in COLUMNS:
            text = escape(column.show(getattr(figures, column.key)))
            cells.append(
                f"<td><b>{text}</b></td>" if index in best[column.key] else f"<td>{text}</td>"
            )
        rows.append(f'<tr><th scope="row">{escape(figures.policy)}</th>{"".join(cells)}</tr>')
    return (
        f'<section><div class="scroll"><table><thead><tr><th scope="col">policy</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><p>Bold: best among those that plan, or a tie.</p></section>"
    )


def _balance_by_step(walk: Walk) -> NDArray[np.float64]:
    values = metrics.balancedness(walk.rank_load)
    known = ~np.isnan(values)
    mean = np.where(known, values, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return np.asarray(mean, np.float64)


def _time_by_step(walk: Walk) -> NDArray[np.float64]:
    fluid = walk.fluid.sum(axis=1)
    ratio = np.divide(
        walk.times.sum(axis=1), fluid, out=np.full(len(fluid), np.nan), where=fluid > 0
    )
    return np.asarray(ratio, np.float64)


def _over_time(
    comparison: Comparison,
    styles: Mapping[str, str],
    by_step: Callable[[Walk], NDArray[np.float64]],
    label: str,
) -> str:
    first = int(comparison.walks[0].steps[0])
    series = []
    for walk in comparison.walks:
        values = by_step(walk)
        group = max(1, math.ceil(len(values) / MOST_POINTS))
        whole = len(values) // group * group
        means = values[:whole].reshape(-1, group).mean(axis=1)
        xs = first + group * (np.arange(len(means)) + 0.5)
        series.append(Series(walk.policy, styles[walk.policy], xs.tolist(), means.tolist()))
    marks = [float(step) for step in comparison.walks[0].steps]
    return lines(f"{label} by step", Panel(x_label="step", y_label=label), series, marks=marks)


def _tail(comparison: Comparison, styles: Mapping[str, str]) -> str:
    rows = [
        (f.policy, styles[f.policy], (f.step_time_p50, f.step_time_p90, f.step_time_p99))
        for f in comparison.figures
    ]
    return ranges(
        "p50, p90 and p99 of predicted step time",
        Panel(x_label="step time / mean fluid time"),
        rows,
        ("p50", "p90", "p99"),
    )


def _copies(walks: Sequence[Walk], styles: Mapping[str, str]) -> str:
    series = [
        Series(
            walk.policy,
            styles[walk.policy],
            walk.steps.tolist(),
            (np.cumsum(walk.copies) / walk.placements[0].num_layers).tolist(),
        )
        for walk in walks
    ]
    panel = Panel(x_label="step of the replan", y_label="copies per layer")
    return lines("copies per layer so far", panel, series, y_low=0.0, points=True)


def _heat_maps(comparison: Comparison) -> str:
    planning = [walk for walk in comparison.walks if walk.policy not in BASELINES]
    shown = planning or [walk for walk in comparison.walks if walk.policy != "initial"]
    last = slice(-comparison.setup.horizon_steps, None)
    relative = [("before: initial", _relative(_before(comparison)))]
    relative += [(f"after: {walk.policy}", _relative(walk.rank_load[last])) for walk in shown]
    every = np.concatenate([values.ravel() for _, values in relative])
    reach = (
        max(0.1, float(np.nanpercentile(np.abs(every - 1), 98)))
        if np.isfinite(every).any()
        else 1.0
    )
    rows = [str(layer) for layer in comparison.layer_ids]
    maps = "".join(
        f"<div>{heat_map(_with_worst(name, values), values.tolist(), rows, reach)}</div>"
        for name, values in relative
    )
    swatches = "".join(f'<i class="{css}"></i>' for css in _shades())
    legend = f'<p class="legend">{max(0.0, 1 - reach):.2f}{swatches}{1 + reach:.2f} and more &nbsp; (1.00 = an even share)</p>'
    return f'{legend}<div class="maps">{maps}</div>'


def _before(comparison: Comparison) -> NDArray[np.float64]:
    """(horizon, L, R) [tokens] on the last steps scored, under the initial placement, whoever was compared."""
    setup = comparison.setup
    first = int(comparison.walks[0].steps[-1])
    last = first + setup.horizon_steps
    placement = Placement.initial(setup.shape)
    return metrics.rank_load(setup.load[first:last], placement, setup.split(first, last))


def _relative(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """(T, L, R) -> (L, R): load of each rank over the mean of its layer, NaN without load."""
    load = rank_load.sum(axis=0)
    mean = load.mean(axis=1, keepdims=True)
    return np.asarray(
        np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0), np.float64
    )


def _with_worst(name: str, values: NDArray[np.float64]) -> str:
    known = values[np.isfinite(values)]
    return f"{name}, worst {known.max():.2f}" if known.size else f"{name}, no load"


def _shades() -> list[str]:
    under = [f"u{level}" for level in (10, 8, 6, 4, 2)]
    return [*under, "e", *(css.replace("u", "o") for css in reversed(under))]


def _replicas(comparison: Comparison, styles: Mapping[str, str]) -> str:
    rows = range(len(comparison.layer_ids))
    ticks = [
        (float(row), str(comparison.layer_ids[row])) for row in rows[:: max(1, len(rows) // 20)]
    ]
    shown = [walk for walk in comparison.walks if walk.policy not in BASELINES] or comparison.walks
    extra: list[Series] = []
    most: list[Series] = []
    for index, walk in enumerate(shown):
        counts = walk.placements[-1].logcnt
        # Side by side, or the last policy would hide the others.
        xs = [row + 0.5 * ((index + 0.5) / len(shown) - 0.5) for row in rows]
        style = f"{styles[walk.policy]} unjoined"
        extra.append(Series(walk.policy, style, xs, (counts - 1).sum(axis=1).tolist()))
        most.append(Series(walk.policy, style, xs, counts.max(axis=1).tolist()))
    totals = {y for one in extra for y in one.ys}
    if len(totals) > 1:
        panel = Panel(x_label="layer", y_label="copies beyond one")
        first = lines(
            "redundant copies per layer", panel, extra, x_ticks=ticks, y_low=0.0, points=True
        )
    else:
        first = (
            f"<p>Slots are fixed per layer, so every layer of every policy has {int(totals.pop())} redundant copies."
            " What differs is to whom they go.</p>"
        )
    panel = Panel(x_label="layer", y_label="copies of one expert, most")
    return first + lines(
        "copies of the most replicated expert", panel, most, x_ticks=ticks, y_low=0.0, points=True
    )


def _budget(points: Sequence[BudgetPoint]) -> str:
    names = [str(point.replicas_per_layer) for point in points]
    xs = [float(index) for index in range(len(points))]
    ticks = [(float(index), name) for index, name in enumerate(names)]

    def panel(y_label: str) -> Panel:
        return Panel(340, 240, "replicas per layer", y_label, left=68, right=12)

    balance = Series("balancedness", "hue-1", xs, [point.balancedness_mean for point in points])
    gains = [point.gain_per_replica for point in points]
    lost = [point.kv_bytes_lost / 1e9 for point in points]
    drawings = (
        lines(
            "balancedness by budget", panel("balancedness"), [balance], x_ticks=ticks, points=True
        ),
        bars("marginal gain per replica", panel("gain per replica"), names, gains),
        bars("KV-cache bytes lost", panel("KV cache lost, GB per rank"), names, lost),
    )
    return f'<div class="maps">{"".join(f"<div>{drawing}</div>" for drawing in drawings)}</div>'
