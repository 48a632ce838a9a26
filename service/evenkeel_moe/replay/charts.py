"""Draws the charts of the HTML report with matplotlib, as inline SVG.

The colours are CSS variables, so the page can set them for light and for dark screens. Every mark
has a tooltip with its value, and lines differ by dashes as well as by colour.

matplotlib belongs to the optional extra `plots`: import this module only where charts are drawn.
"""

import io
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

PALETTE = {
    "paper": ("#ffffff", "#14181c"),
    "ink": ("#1c2126", "#e8ebee"),
    "soft": ("#5b646e", "#a3adb7"),
    "grid": ("#e4e7ea", "#2b3238"),
    "even": ("#eef0f2", "#262c32"),
    "over": ("#b3490b", "#f0883e"),
    "under": ("#14568f", "#58a6e6"),
    "orange": ("#b85c00", "#f0923d"),
    "blue": ("#0063b2", "#62b0f5"),
    "green": ("#00785a", "#35c79c"),
    "purple": ("#a33b7d", "#e78bc0"),
    "olive": ("#6b5d00", "#d9c650"),
    "grey": ("#7b858f", "#98a2ac"),
}
"""The colours by name, on a light and on a dark screen. No pair is red against green."""

_LIGHT = {name: light for name, (light, _) in PALETTE.items()}
_SVG = "{http://www.w3.org/2000/svg}"
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # Text stays text; the page sets the font.
    "svg.hashsalt": "evenkeel",  # Equal comparisons give equal bytes.
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 12,
    "text.color": _LIGHT["ink"],
    "axes.labelcolor": _LIGHT["ink"],
    "axes.edgecolor": _LIGHT["soft"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 7),
    "grid.color": _LIGHT["grid"],
    "xtick.color": _LIGHT["soft"],
    "ytick.color": _LIGHT["soft"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 2.5,
    "lines.linewidth": 2,
}


SMALL = (340, 240)
"""Width and height in pixels of a chart that stands beside others."""

_Tips = dict[str, tuple[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Style:
    """The look of one policy."""

    colour: str
    """A name in `PALETTE`."""
    dashes: tuple[float, ...] = ()
    """Lengths of strokes and gaps in line widths; empty for a solid line."""
    opacity: float = 1.0
    """Opacity of the points."""


@dataclass(frozen=True, slots=True)
class Series:
    """One named line; NaN leaves a gap."""

    name: str
    style: Style
    xs: Sequence[float]
    ys: Sequence[float]


@matplotlib.rc_context(_RC)
def lines(
    label: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = (1040, 260),
    x_ticks: Mapping[float, str] | None = None,
    marks: Sequence[float] = (),
    from_zero: bool = False,
    points: bool = False,
    joined: bool = True,
) -> str:
    """Draw lines over common axes.

    Args:
        label: the name of the chart for screen readers.
        series: the lines; several get a legend, ordered by where they end.
        x_label: text below the horizontal axis.
        y_label: text beside the vertical axis.
        size: width and height in pixels.
        x_ticks: text by position; None for round numbers.
        marks: positions of vertical lines, for events.
        from_zero: True to begin the vertical axis at 0.
        points: True to draw every point, with a tooltip.
        joined: False to leave out the lines between the points.
    """
    figure, axes = _axes(size, x_label, y_label)
    axes.grid(axis="y")
    tips: _Tips = {}
    for at in marks:
        axes.axvline(at, color=_LIGHT["soft"], linewidth=1, linestyle=(0, (2, 4)), alpha=0.55)
    for number, one in enumerate(series):
        colour, style = _LIGHT[one.style.colour], one.style
        axes.plot(
            one.xs,
            one.ys,
            color=colour,
            linestyle=(0, style.dashes or None) if joined else "",
            marker="o" if points else "",
            markerfacecolor=(colour, style.opacity),
            markeredgecolor=_LIGHT["paper"],
            label=one.name,
            gid=f"series {number}",
        )
        known = zip(one.xs, one.ys, strict=True) if points else ()
        shown = [f"{one.name}: {x:g}, {y:.4g}" for x, y in known if math.isfinite(y)]
        tips[f"series {number}"] = (one.name, shown)
    if x_ticks is not None:
        axes.set_xticks(list(x_ticks), list(x_ticks.values()))
    if from_zero:
        axes.set_ylim(bottom=0)
    if all(y == int(y) for one in series for y in one.ys if math.isfinite(y)):
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(series) > 1:
        drawn = zip(series, axes.get_lines()[len(marks) :], strict=True)
        by_end = sorted(drawn, key=lambda pair: _last(pair[0].ys), reverse=True)
        figure.legend(handles=[line for _, line in by_end], loc="outside right upper")
    return _svg(figure, label, tips)


def _last(values: Sequence[float]) -> float:
    """Return the last value that is not NaN, or -inf."""
    return next((value for value in reversed(values) if math.isfinite(value)), -math.inf)


@matplotlib.rc_context(_RC)
def bars(
    label: str, names: Sequence[str], values: Sequence[float], *, x_label: str, y_label: str
) -> str:
    """Draw one bar for each name, from zero; NaN leaves a gap."""
    figure, axes = _axes(SMALL, x_label, y_label)
    axes.grid(axis="y")
    tips: _Tips = {}
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        if math.isfinite(value):
            axes.bar(position, value, 0.64, color=_LIGHT["blue"], gid=name)
            tips[name] = (f"{name}: {value:.4g}", [])
    axes.set_xticks(range(len(names)), names)
    axes.axhline(0, color=_LIGHT["soft"], linewidth=0.8)
    return _svg(figure, label, tips)


@matplotlib.rc_context(_RC)
def ranges(
    label: str,
    rows: Sequence[tuple[str, Style, Sequence[float]]],
    words: tuple[str, str, str],
    *,
    x_label: str,
) -> str:
    """Draw each row as a line from the first to the last of three values, with a mark at each.

    Args:
        label: the name of the chart for screen readers.
        rows: name, look and three rising values; a row with NaN stays empty.
        words: the names of the three values.
        x_label: text below the axis.
    """
    figure, axes = _axes((1040, 54 + 26 * len(rows)), x_label, "")
    axes.grid(axis="x")
    tips: _Tips = {}
    for row, (name, style, values) in enumerate(rows):
        if all(map(math.isfinite, values)):
            colour = _LIGHT[style.colour]
            dashes = (0, style.dashes or None)
            axes.plot(values, [row] * 3, color=colour, linestyle=dashes)
            axes.scatter(
                values,
                [row] * 3,
                (40, 110, 40),
                color=[(colour, style.opacity)],
                edgecolor=_LIGHT["paper"],
                zorder=3,
                gid=name,
            )
            shown = [
                f"{name} {word}: {value:.4f}" for word, value in zip(words, values, strict=True)
            ]
            tips[name] = (name, shown)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], color=_LIGHT["ink"])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return _svg(figure, label, tips)


@matplotlib.rc_context(_RC)
def heat_map(
    label: str, values: NDArray[np.float64], row_names: Sequence[str], reach: float
) -> str:
    """Draw one cell for each value, shaded by its distance from 1.

    Args:
        label: drawn above, and the name of the chart for screen readers.
        values: (L, R) load of each rank over the mean of its layer; NaN leaves the cell blank.
        row_names: a name for each row; some are left out where they would touch.
        reach: the distance from 1 that gets the full shade.
    """
    height = 16 if len(values) <= 30 else 9
    width = max(9.0, 240 / values.shape[1]) * values.shape[1]
    size = width + 40, height * len(values) + 54
    figure, axes = _axes(size, f"rank 0 to {values.shape[1] - 1}", "")
    axes.spines["bottom"].set_visible(False)
    axes.set_title(label, fontsize=12, loc="left")
    axes.set_facecolor(_LIGHT["even"])
    colours = heat_colours(values, reach)
    axes.pcolormesh(colours, edgecolor=_LIGHT["paper"], linewidth=1, gid="cells")
    axes.set_xticks([])
    every = math.ceil(11 / height)
    axes.set_yticks(np.arange(0, len(values), every) + 0.5, row_names[::every])
    axes.invert_yaxis()
    shown = [
        f"layer {name} rank {rank}: {value:.2f}"
        for name, row in zip(row_names, values, strict=True)
        for rank, value in enumerate(row)
    ]
    return _svg(figure, label, {"cells": (label, shown)})


def heat_colours(values: NDArray[np.float64], reach: float) -> NDArray[np.float64]:
    """Return the (L, R, 4) colours of the cells, to be laid over the colour of an even share."""
    sides = np.array([to_rgb(_LIGHT["under"]), to_rgb(_LIGHT["over"])])
    distance = values - 1
    opacity = np.minimum(np.abs(distance) / reach, 1)
    colours = np.dstack([sides[(distance > 0).astype(int)], opacity])
    colours[~np.isfinite(values)] = *to_rgb(_LIGHT["paper"]), 1
    return colours


def _axes(size: tuple[float, float], x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return a figure of this many pixels and its only axes."""
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.margins(x=0.02, y=0.08)
    return figure, axes


def _svg(figure: Figure, label: str, tips: _Tips) -> str:
    """Return the figure as an SVG element for an HTML page, with its tooltips.

    Args:
        figure: what to draw.
        label: its name for screen readers.
        tips: by group id, the tooltip of the group and those of the marks in it, in order.
    """
    for artist in figure.findobj():
        artist.set_clip_on(False)
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    root = ET.fromstring(buffer.getvalue())
    for node in list(root.iter()):
        # HTML needs no namespaces.
        node.tag = node.tag.rpartition("}")[2]
        for key in [key for key in node.attrib if "}" in key]:
            node.set(key.rpartition("}")[2], node.attrib.pop(key))
    for group in root.iter("g"):
        # The ids of groups would occur in every drawing of the page.
        tip, shown = tips.get(group.attrib.pop("id", ""), ("", []))
        if tip:
            marks = list(group.iter("use")) or list(group.iter("path"))
            for mark, text in zip(marks, shown, strict=bool(shown)):
                _add_tip(mark, text)
            _add_tip(group, tip)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    _add_tip(root, label)
    drawing = ET.tostring(root, encoding="unicode")
    for name, colour in _LIGHT.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return drawing


def _add_tip(node: ET.Element, text: str) -> None:
    title = ET.Element("title")
    title.text = text
    node.insert(0, title)
