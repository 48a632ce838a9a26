"""Small SVG drawings as text: lines, bars, ranges and heat maps.

Colours are CSS classes, so that the page decides them for light and dark. Every mark has a tooltip, every
line a dash pattern and a label at its end: nothing is told by colour alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

__all__ = ["Panel", "Series", "bars", "heat_map", "lines", "ranges"]

HEAT_LEVELS = 10
"""Shades on each side of an even load."""


@dataclass(frozen=True, slots=True)
class Series:
    """A named run of points; NaN breaks the line."""

    name: str
    style: str
    """CSS class of colour and dashes."""
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Size and words of one drawing, in SVG units (pixels at full width)."""

    width: int = 1040
    height: int = 260
    x_label: str = ""
    y_label: str = ""
    left: int = 56
    right: int = 24
    top: int = 12
    bottom: int = 42


def _text(
    x: float, y: float, words: str, anchor: str = "start", css: str = "tick", extra: str = ""
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}"{extra}>{escape(words)}</text>'


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover low..high."""
    span = max(high - low, 1e-9)
    raw = span / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _room(words: Sequence[str]) -> int:
    """Pixels the widest of some words takes at the page's text size, a little generously."""
    return math.ceil(7 * max((len(word) for word in words), default=0))


class _Frame:
    """Axes of a panel: data to pixels, and the grid. The left margin grows with the numbers that stand there."""

    def __init__(
        self, panel: Panel, x_range: tuple[float, float], y_range: tuple[float, float]
    ) -> None:
        numbers = [_number(value) for value in _ticks(y_range[0], y_range[1])]
        panel = replace(panel, left=max(panel.left, 28 + _room(numbers)))
        self.panel = panel
        self.x_low, self.x_high = x_range[0], max(x_range[1], x_range[0] + 1e-9)
        self.y_low, self.y_high = y_range[0], max(y_range[1], y_range[0] + 1e-9)
        self.x0, self.x1 = panel.left, panel.width - panel.right
        self.y0, self.y1 = panel.height - panel.bottom, panel.top

    def x(self, value: float) -> float:
        return self.x0 + (value - self.x_low) / (self.x_high - self.x_low) * (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return self.y0 - (value - self.y_low) / (self.y_high - self.y_low) * (self.y0 - self.y1)

    def grid(self, x_ticks: Sequence[tuple[float, str]]) -> list[str]:
        panel = self.panel
        parts = []
        for value in _ticks(self.y_low, self.y_high):
            y = self.y(value)
            parts.append(
                f'<line x1="{self.x0}" x2="{self.x1}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            )
            parts.append(_text(self.x0 - 6, y + 4, _number(value), "end"))
        for value, words in x_ticks:
            parts.append(_text(self.x(value), self.y0 + 16, words, "middle"))
        parts.append(
            f'<line x1="{self.x0}" x2="{self.x1}" y1="{self.y0}" y2="{self.y0}" class="axis"/>'
        )
        if panel.x_label:
            parts.append(
                _text((self.x0 + self.x1) / 2, panel.height - 6, panel.x_label, "middle", "label")
            )
        if panel.y_label:
            middle = (self.y0 + self.y1) / 2
            turn = f' transform="rotate(-90 13 {middle:.1f})"'
            parts.append(_text(13, middle, panel.y_label, "middle", "label", turn))
        return parts


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The values moved apart to at least `gap`, in order, inside low..high where they fit."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    placed = [0.0] * len(values)
    last = low - gap
    for index in order:
        last = placed[index] = max(values[index], last + gap)
    over = last - high
    if over > 0:
        limit = high
        for index in reversed(order):
            placed[index] = min(placed[index], limit)
            limit = placed[index] - gap
    return placed


def lines(
    title: str,
    panel: Panel,
    series: Sequence[Series],
    *,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_low: float | None = None,
    marks: Sequence[float] = (),
    points: bool = False,
) -> str:
    """Lines over a common axis, labelled at their right end.

    Args:
        title: what a screen reader says.
        panel: size and axis labels.
        series: the lines.
        x_ticks: positions and words; None for round numbers.
        y_low: where the vertical axis begins; None for just under the data.
        marks: vertical hairlines, for events.
        points: also draw every point.
    """
    xs = [x for one in series for x in one.xs] or [0.0]
    ys = [y for one in series for y in one.ys if math.isfinite(y)] or [0.0, 1.0]
    xs = [*xs, *marks]
    pad = 0.06 * max(max(ys) - min(ys), 1e-6)
    low = min(ys) - pad if y_low is None else y_low
    if len(series) > 1:
        panel = replace(panel, right=34 + _room([one.name for one in series]))
    frame = _Frame(panel, (min(xs), max(xs)), (low, max(ys) + pad))
    ticks = (
        x_ticks
        if x_ticks is not None
        else [(value, _number(value)) for value in _ticks(min(xs), max(xs), 8)]
    )
    parts = [
        f'<line x1="{frame.x(at):.1f}" x2="{frame.x(at):.1f}" y1="{frame.y0}" y2="{frame.y1}" class="mark"/>'
        for at in marks
    ]
    parts += frame.grid(ticks)
    ends: list[tuple[Series, float]] = []
    for one in series:
        runs: list[list[str]] = [[]]
        for x, y in zip(one.xs, one.ys, strict=True):
            if math.isfinite(y):
                runs[-1].append(f"{frame.x(x):.1f},{frame.y(y):.1f}")
            elif runs[-1]:
                runs.append([])
        tip = f"<title>{escape(one.name)}</title>"
        parts += [
            f'<polyline points="{" ".join(run)}" class="line {one.style}">{tip}</polyline>'
            for run in runs
        ]
        if points:
            parts += [
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5" class="dot {one.style}">'
                f"<title>{escape(one.name)}: {_number(x)}, {y:.4g}</title></circle>"
                for x, y in zip(one.xs, one.ys, strict=True)
                if math.isfinite(y)
            ]
        finite = [y for y in one.ys if math.isfinite(y)]
        if finite:
            ends.append((one, frame.y(finite[-1])))
    if len(series) > 1:
        for (one, y), moved in zip(
            ends, _spread([y for _, y in ends], 14, frame.y1 + 4, frame.y0), strict=True
        ):
            parts.append(
                f'<path d="M{frame.x1 + 2},{y:.1f} L{frame.x1 + 9},{moved:.1f}" class="leader"/>'
                f'<line x1="{frame.x1 + 10}" x2="{frame.x1 + 26}" y1="{moved:.1f}" y2="{moved:.1f}" class="line {one.style}"/>'
            )
            parts.append(_text(frame.x1 + 30, moved + 4, one.name, css="name"))
    return _svg(panel.width, panel.height, parts, title)


def bars(
    title: str, panel: Panel, names: Sequence[str], values: Sequence[float], style: str = "plain"
) -> str:
    """One bar a name, from zero; NaN leaves a gap."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(0.0, *finite), max(0.0, *finite)
    pad = 0.08 * max(high - low, 1e-9)
    frame = _Frame(panel, (-0.5, len(names) - 0.5), (low - (pad if low < 0 else 0), high + pad))
    parts = frame.grid([(index, name) for index, name in enumerate(names)])
    half = 0.32 * (frame.x(1) - frame.x(0))
    zero = frame.y(0.0)
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if not math.isfinite(value):
            continue
        y = frame.y(value)
        parts.append(
            f'<rect x="{frame.x(index) - half:.1f}" y="{min(y, zero):.1f}" width="{2 * half:.1f}"'
            f' height="{max(abs(y - zero), 0.8):.1f}" class="bar {style}">'
            f"<title>{escape(name)}: {value:.4g}</title></rect>"
        )
    if low < 0:
        parts.append(
            f'<line x1="{frame.x0}" x2="{frame.x1}" y1="{zero:.1f}" y2="{zero:.1f}" class="axis"/>'
        )
    return _svg(panel.width, panel.height, parts, title)


def ranges(
    title: str, panel: Panel, rows: Sequence[tuple[str, str, Sequence[float]]], words: Sequence[str]
) -> str:
    """One row a name: a line from the first to the last value, with a mark at each.

    Args:
        title: what a screen reader says.
        panel: size and axis label; height is taken from the rows.
        rows: (name, CSS class, rising values).
        words: what each value is.
    """
    every = [value for _, _, values in rows for value in values if math.isfinite(value)] or [
        0.0,
        1.0,
    ]
    pad = 0.05 * max(max(every) - min(every), 1e-6)
    height = panel.top + 26 * len(rows) + panel.bottom
    left = 16 + _room([name for name, _, _ in rows])
    sized = replace(panel, height=height, y_label="", left=left, right=24)
    frame = _Frame(sized, (min(every) - pad, max(every) + pad), (0, len(rows)))
    parts = []
    for value in _ticks(frame.x_low, frame.x_high, 8):
        x = frame.x(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y0}" y2="{frame.y1}" class="grid"/>'
        )
        parts.append(_text(x, frame.y0 + 16, _number(value), "middle"))
    parts.append(_text((frame.x0 + frame.x1) / 2, height - 6, panel.x_label, "middle", "label"))
    for index, (name, style, values) in enumerate(rows):
        y = frame.y1 + 26 * (index + 0.5)
        parts.append(_text(frame.x0 - 8, y + 4, name, "end", "name"))
        if not all(math.isfinite(value) for value in values):
            continue
        first, last = frame.x(values[0]), frame.x(values[-1])
        parts.append(
            f'<line x1="{first:.1f}" x2="{last:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="line {style} solid"/>'
        )
        for position, (word, value) in enumerate(zip(words, values, strict=True)):
            big = 6 if position == 1 else 3.5
            parts.append(
                f'<circle cx="{frame.x(value):.1f}" cy="{y:.1f}" r="{big}" class="dot {style}">'
                f"<title>{escape(name)} {escape(word)}: {value:.4f}</title></circle>"
            )
    return _svg(sized.width, height, parts, title)


def heat_map(
    title: str, values: Sequence[Sequence[float]], row_names: Sequence[str], reach: float
) -> str:
    """Cells shaded by distance from 1.

    Args:
        title: drawn above.
        values: (rows, columns) around 1; NaN stays blank.
        row_names: one a row; thinned out where they would touch.
        reach: distance from 1 at which the shade is full.
    """
    columns = max((len(row) for row in values), default=0)
    cell_w = max(9.0, 240 / max(columns, 1))
    cell_h = 16.0 if len(values) <= 30 else 9.0
    left, top = 30.0, 24.0
    parts = [_text(left, 14, title, css="name")]
    every = max(1, math.ceil(11 / cell_h))
    for index, (name, row) in enumerate(zip(row_names, values, strict=True)):
        y = top + index * cell_h
        if index % every == 0:
            parts.append(_text(left - 5, y + cell_h / 2 + 4, name, "end"))
        for column, value in enumerate(row):
            if not math.isfinite(value):
                continue
            level = round(min(1.0, abs(value - 1) / reach) * HEAT_LEVELS)
            css = f"{'o' if value >= 1 else 'u'}{level}" if level else "e"
            parts.append(
                f'<rect x="{left + column * cell_w:.1f}" y="{y:.1f}" width="{cell_w - 1:.1f}"'
                f' height="{cell_h - 1:.1f}" class="{css}"><title>layer {escape(name)} rank {column}:'
                f" {value:.2f}</title></rect>"
            )
    height = top + len(values) * cell_h
    parts.append(
        _text(
            left + columns * cell_w / 2, height + 14, f"rank 0 to {columns - 1}", "middle", "label"
        )
    )
    return _svg(left + columns * cell_w + 4, height + 22, parts, title)
