"""Writes a comparison as one self-contained HTML page that loads nothing and runs no script."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.replay.budget import BudgetPoint
from evenkeel_moe.replay.charts import PALETTE, SMALL, Series, Style, bars, heat_map, lines, ranges
from evenkeel_moe.replay.compare import Comparison
from evenkeel_moe.replay.headline import baseline_words, copies_words, headline
from evenkeel_moe.replay.planners import BASELINES, VERDICT
from evenkeel_moe.replay.tables import (
    PAGE_COLUMNS,
    TRADEOFF_HEADS,
    TRADEOFF_TITLE,
    best_by_column,
    tradeoff_rows,
)
from evenkeel_moe.replay.walk import Walk
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S, copy_seconds

MOST_DOTS = 60
"""Most points of a chart that are drawn as dots; with more there are only lines."""
MAX_POINTS = 120
"""Most points of a line: neighbouring steps are averaged, so that lines can be told apart."""

STYLES = {
    "initial": Style("grey", (0.75, 2)),
    "once": Style("grey", (3.5, 2)),
    "ewma": Style("grey", (4.5, 1.5, 1, 1.5)),
    "eplb": Style("orange"),
    "keel": Style("blue"),
    "craft": Style("green", (6, 1.5)),
    "gem": Style("purple", (2, 1)),
    "libra": Style("olive", (5, 1.5, 1.5, 1.5)),
    "metro": Style("orange", (3, 1.5)),
}
"""The look of each policy, the same on every page; baselines are grey."""


def _variables(theme: int) -> str:
    return "".join(f"--{name}:{colours[theme]};" for name, colours in PALETTE.items())


_CSS = f"""
:root{{{_variables(0)}}}
@media (prefers-color-scheme: dark){{:root{{{_variables(1)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}}
main{{max-width:1088px;margin:0 auto;padding:24px}}
h1{{font-size:24px;margin:0 0 4px}}h2{{font-size:17px;margin:36px 0 2px}}
p{{margin:2px 0 10px;color:var(--soft);max-width:76ch}}p.facts{{max-width:none}}
p.doubt{{color:var(--ink);border-left:4px solid var(--over);padding-left:10px}}
p.verdict{{color:var(--ink);font-size:18px;margin:8px 0 12px}}code{{overflow-wrap:anywhere}}
svg{{width:100%;height:auto;display:block}}
svg text{{font-family:system-ui,sans-serif!important}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:20px}}
.legend i{{display:inline-block;width:240px;height:13px;margin:0 8px;vertical-align:-1px;
background:linear-gradient(90deg,var(--under),var(--even),var(--over))}}
.scroll{{overflow-x:auto}}.scroll>svg{{min-width:760px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;margin:14px 0 6px}}
th,td{{padding:5px 9px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}}
th{{font-weight:600}}
thead th{{color:var(--soft);font-size:12.5px;white-space:normal;vertical-align:bottom}}
th:first-child{{text-align:left}}
"""


def render_report(
    comparison: Comparison, tradeoff: ReplicaTradeoff | None = None, made_by: str = ""
) -> str:
    """Return the page as HTML text.

    Args:
        comparison: what the page shows.
        tradeoff: replicas against KV cache; None leaves the table out.
        made_by: the command and the date, to be shown; empty if unknown.
    """
    sections = [_head(comparison, made_by), _table(comparison), *_charts(comparison)]
    if comparison.budget:
        sections.append(
            _section(
                "What replicas gain and cost",
                "The same replica rule at every budget, replanned and scored on later steps as in "
                "the rest of this page. Memory used for replicas is not available to the KV cache.",
                _budget(comparison.budget),
            )
        )
    if tradeoff is not None:
        text = f"{tradeoff.words} {tradeoff.craft_words}".strip()
        sections.append(_section(TRADEOFF_TITLE, text, _tradeoff(tradeoff)))
    title = escape(f"Replay of {comparison.name}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<style>{_CSS}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _charts(comparison: Comparison) -> list[str]:
    """Return the sections that every page has."""
    styles = _styles([walk.policy for walk in comparison.walks])
    horizon = comparison.setup.horizon_steps
    return [
        _section(
            "Balancedness over time",
            "Mean over layers of mean / max rank load, averaged over neighbouring steps. "
            "1 is a perfect split. Vertical lines mark replans.",
            _over_time(comparison, styles, _balance_by_step, "balancedness"),
        ),
        _section(
            f"Predicted {comparison.setup.objective.cost.basis.moe_time} of each step",
            "Time of a step over the time it would take if tokens could be split freely. "
            "Lower is better.",
            _over_time(comparison, styles, _time_by_step, "time / fluid bound"),
        ),
        _section(
            "Tail of the predicted step time",
            "Median, p90 (large mark) and p99 of a step's MoE time, divided by the mean fluid time "
            "of a step.",
            _tail(comparison, styles),
        ),
        _section(
            "Copies paid",
            "Time in which ranks copy experts from each other, all at once and each at "
            f"{COPY_BYTES_PER_S / 1e9:g} GB/s, summed over the replans so far. The first plan "
            "starts from the initial placement.",
            _copies(comparison, styles),
        ),
        _section(
            "Rank load per layer, before and after",
            f"Load of each rank divided by the mean of its layer, summed over the last {horizon} "
            "steps. One row per layer, one column per rank.",
            _heat_maps(comparison),
        ),
        _section(
            "Replicas per layer", "The last plan of each policy.", _replicas(comparison, styles)
        ),
    ]


def _styles(names: Sequence[str]) -> dict[str, Style]:
    """Return the look of each policy; unknown policies take the colours that are left."""
    left = [style for name, style in STYLES.items() if name not in (*BASELINES, *names)]
    styles: dict[str, Style] = {}
    for name in names:
        without_verdict = styles.get(name.removesuffix(VERDICT))
        if without_verdict is not None:
            styles[name] = Style(without_verdict.colour, (1, 1.5), opacity=0.6)
        else:
            styles[name] = STYLES.get(name) or (left.pop(0) if left else STYLES["eplb"])
    return styles


def _section(title: str, text: str, body: str) -> str:
    body = f'<div class="scroll">{body}</div>'
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{body}</section>"


def _head(comparison: Comparison, made_by: str) -> str:
    facts = " · ".join(
        f"{escape(str(value))} {escape(key)}" for key, value in comparison.facts().items()
    )
    grave = doubts(comparison.findings)
    above = "".join(f"<p class='doubt'>Doubt: {escape(each.words)}</p>" for each in grave)
    notes = "".join(
        f"<p>Note: {escape(each.words)}</p>" for each in comparison.findings if each not in grave
    )
    origin = f"<p class='facts'>Made by <code>{escape(made_by)}</code></p>" if made_by else ""
    cost = f"<p>Cost model: {escape(comparison.cost_model.words)}.</p>"
    if comparison.replicas is not None:
        cost += f"<p>{escape(comparison.replicas.words)}</p>"
    return (
        f"<header><h1>Replay of {escape(comparison.name)}</h1>"
        f"{above}<p class='verdict'>{escape(headline(comparison))}</p>"
        f"<p>{escape(copies_words(comparison))}</p>"
        f"<p class='facts'>{facts}</p>"
        "<p>Every plan was made on the steps before it and scored on the steps after it. Times are "
        "predictions from recorded loads, not measurements of an engine.</p>"
        f"{cost}{notes}{origin}</header>"
    )


def _table(comparison: Comparison) -> str:
    heads = "".join(
        f'<th scope="col" title="{escape(c.explanation, quote=True)}">{escape(c.head)}</th>'
        for c in PAGE_COLUMNS
    )
    best = best_by_column(comparison.results)
    rows = []
    for index, result in enumerate(comparison.results):
        cells = []
        for column in PAGE_COLUMNS:
            text = escape(column.show(getattr(result, column.key)))
            bold = index in best[column.key]
            cells.append(f"<td><b>{text}</b></td>" if bold else f"<td>{text}</td>")
        rows.append(f'<tr><th scope="row">{escape(result.policy)}</th>{"".join(cells)}</tr>')
    return (
        '<section><div class="scroll"><table><thead><tr><th scope="col">policy</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "<p>Bold: the best value of a column, or a tie."
        f"{''.join(f' {escape(words)}' for words in baseline_words(comparison))}</p></section>"
    )


def _tradeoff(tradeoff: ReplicaTradeoff) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in TRADEOFF_HEADS)
    rows = []
    for name, *cells in tradeoff_rows(tradeoff):
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _balance_by_step(walk: Walk) -> NDArray[np.float64]:
    values = metrics.balancedness(walk.rank_load)
    known = ~np.isnan(values)
    mean = np.where(known, values, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return np.asarray(mean, np.float64)


def _time_by_step(walk: Walk) -> NDArray[np.float64]:
    return _ratio(walk.times.sum(axis=1), walk.fluid.sum(axis=1))


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return part / whole, NaN where the whole is 0."""
    undefined = np.full(part.shape, np.nan)
    return np.asarray(np.divide(part, whole, out=undefined, where=whole > 0), np.float64)


def _over_time(
    comparison: Comparison,
    styles: Mapping[str, Style],
    by_step: Callable[[Walk], NDArray[np.float64]],
    label: str,
) -> str:
    first = int(comparison.walks[0].steps[0])
    series = []
    for walk in comparison.walks:
        values = by_step(walk)
        group = math.ceil(len(values) / MAX_POINTS)
        whole = len(values) // group * group
        means = values[:whole].reshape(-1, group).mean(axis=1)
        xs = first + group * (np.arange(len(means)) + 0.5)
        series.append(Series(walk.policy, styles[walk.policy], xs.tolist(), means.tolist()))
    marks = comparison.walks[0].steps.tolist()
    return lines(f"{label} by step", series, x_label="step", y_label=label, marks=marks)


def _tail(comparison: Comparison, styles: Mapping[str, Style]) -> str:
    rows = [
        (r.policy, styles[r.policy], (r.step_time_p50, r.step_time_p90, r.step_time_p99))
        for r in comparison.results
    ]
    return ranges(
        "p50, p90 and p99 of predicted step time",
        rows,
        ("p50", "p90", "p99"),
        x_label="step time / mean fluid time",
    )


def _copies(comparison: Comparison, styles: Mapping[str, Style]) -> str:
    each = copy_seconds(comparison.bytes_per_expert, comparison.setup.shape.num_ranks)
    series = [
        Series(
            walk.policy,
            styles[walk.policy],
            walk.steps.tolist(),
            (each * np.cumsum(walk.copies)).tolist(),
        )
        for walk in comparison.walks
    ]
    return lines(
        "time of copies so far",
        series,
        x_label="step of the replan",
        y_label="copy time [s]",
        from_zero=True,
        points=_few_points(series),
    )


def _few_points(series: Sequence[Series]) -> bool:
    """Return True if the points of all lines can be told apart."""
    return sum(len(one.xs) for one in series) <= MOST_DOTS


def _planning(comparison: Comparison) -> list[Walk]:
    """Return the walks of policies, without the baselines."""
    return [walk for walk in comparison.walks if walk.policy not in BASELINES]


def _heat_maps(comparison: Comparison) -> str:
    walks = _planning(comparison) or [w for w in comparison.walks if w.policy != "initial"]
    last = slice(-comparison.setup.horizon_steps, None)
    maps = {"before: initial": _relative(_initial_rank_load(comparison))}
    maps |= {f"after: {walk.policy}": _relative(walk.rank_load[last]) for walk in walks}
    distances = np.abs(np.concatenate([values.ravel() for values in maps.values()]) - 1)
    known = distances[np.isfinite(distances)]
    reach = max(0.1, float(np.percentile(known, 98))) if known.size else 1.0
    rows = [str(layer) for layer in comparison.layer_ids]
    drawn = "".join(
        f"<div>{heat_map(_with_worst(name, values), values, rows, reach)}</div>"
        for name, values in maps.items()
    )
    return (
        f'<p class="legend">{max(0.0, 1 - reach):.2f}<i></i>{1 + reach:.2f} and more &nbsp; '
        f'(1.00 = an even share)</p><div class="charts">{drawn}</div>'
    )


def _initial_rank_load(comparison: Comparison) -> NDArray[np.float64]:
    """Return the (horizon, L, R) load [tokens] of the last scored steps on the initial placement.

    The initial placement need not be among the policies compared.
    """
    setup = comparison.setup
    first = int(comparison.walks[0].steps[-1])
    last = first + setup.horizon_steps
    placement = Placement.initial(setup.shape)
    return metrics.rank_load(setup.load[first:last], placement, setup.split(first, last))


def _relative(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """(T, L, R) -> (L, R): load of each rank over the mean of its layer, NaN without load."""
    load = rank_load.sum(axis=0)
    return _ratio(load, np.repeat(load.mean(axis=1, keepdims=True), load.shape[1], axis=1))


def _with_worst(name: str, values: NDArray[np.float64]) -> str:
    known = values[np.isfinite(values)]
    return f"{name}, worst {known.max():.2f}" if known.size else f"{name}, no load"


def _replicas(comparison: Comparison, styles: Mapping[str, Style]) -> str:
    rows = range(len(comparison.layer_ids))
    ticks = {float(row): str(comparison.layer_ids[row]) for row in rows[:: max(1, len(rows) // 20)]}
    walks = _planning(comparison) or comparison.walks
    redundant: list[Series] = []
    most: list[Series] = []
    for index, walk in enumerate(walks):
        counts = walk.placements[-1].logcnt
        # Points lie side by side, so that no policy hides another.
        xs = [row + 0.5 * ((index + 0.5) / len(walks) - 0.5) for row in rows]
        style = styles[walk.policy]
        redundant.append(Series(walk.policy, style, xs, (counts - 1).sum(axis=1).tolist()))
        most.append(Series(walk.policy, style, xs, counts.max(axis=1).tolist()))

    def chart(label: str, series: Sequence[Series], y_label: str) -> str:
        return lines(
            label,
            series,
            x_label="layer",
            y_label=y_label,
            x_ticks=ticks,
            from_zero=True,
            points=_few_points(series),
            joined=not _few_points(series),
        )

    totals = {y for one in redundant for y in one.ys}
    if len(totals) > 1:
        first = chart("redundant copies per layer", redundant, "copies beyond one")
    else:
        first = (
            "<p>Slots are fixed per layer, so every layer of every policy has "
            f"{int(totals.pop())} redundant copies. Policies differ in which experts get them.</p>"
        )
    return first + chart("copies of the most replicated expert", most, "most copies of one expert")


def _budget(points: Sequence[BudgetPoint]) -> str:
    names = [str(point.replicas_per_layer) for point in points]
    xs = [float(index) for index in range(len(points))]
    gains = [point.gain_per_replica for point in points]
    lost_gb = [point.kv_bytes_lost / 1e9 for point in points]
    x_label, gained = "extra replicas per layer", "balancedness gained per replica"
    lost = "KV cache lost, GB per rank"
    drawings = (
        lines(
            "balancedness by budget",
            [Series("balancedness", STYLES["keel"], xs, [p.balancedness_mean for p in points])],
            x_label=x_label,
            y_label="balancedness",
            size=SMALL,
            x_ticks=dict(zip(xs, names, strict=True)),
            points=True,
        ),
        bars(gained, names, gains, x_label=x_label, y_label=gained),
        bars(lost, names, lost_gb, x_label=x_label, y_label=lost),
    )
    return f'<div class="charts">{"".join(f"<div>{drawing}</div>" for drawing in drawings)}</div>'
