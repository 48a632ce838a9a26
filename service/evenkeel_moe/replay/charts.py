"""Draws the charts of the HTML report with matplotlib, as inline SVG.

The colours are CSS variables, so the page can set them for light and for dark screens. Lines differ
by dashes as well as by colour.

matplotlib belongs to the optional extra `plots`: import this module only where charts are drawn.
"""

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

PALETTE = {
    "paper": ("#ffffff", "#14181c"),
    "ink": ("#1c2126", "#e8ebee"),
    "soft": ("#5b646e", "#a3adb7"),
    "grid": ("#e4e7ea", "#2b3238"),
    "even": ("#eef0f2", "#262c32"),
    "over": ("#b3490b", "#f0883e"),
    "under": ("#14568f", "#58a6e6"),
    "grey": ("#7b858f", "#98a2ac"),
    "blue": ("#0063b2", "#62b0f5"),
    "orange": ("#b85c00", "#f0923d"),
    "green": ("#00785a", "#35c79c"),
    "purple": ("#a33b7d", "#e78bc0"),
    "olive": ("#6b5d00", "#d9c650"),
}
"""The colours by name, on a light and on a dark screen. No pair is red against green."""

_LIGHT = {name: light for name, (light, _) in PALETTE.items()}
_COLOURS = ("blue", "orange", "green", "purple", "olive")
_DASHES = ("-", "--", "-.", ":")
"""With five colours they give twenty lines that differ."""
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
    "axes.formatter.useoffset": False,
    "grid.color": _LIGHT["grid"],
    "xtick.color": _LIGHT["soft"],
    "ytick.color": _LIGHT["soft"],
    "legend.frameon": False,
}


@matplotlib.rc_context(_RC)
def lines(
    label: str,
    xs: NDArray[np.float64],
    series: Mapping[str, NDArray[np.float64]],
    *,
    marks: Sequence[float] = (),
    grey: Collection[str] = (),
) -> str:
    """Draw lines over the steps of a trace; return an SVG element for an HTML page.

    Args:
        label: text beside the vertical axis.
        xs: (N,) steps.
        series: (N,) values by the name of the line; NaN leaves a gap. The legend is ordered by
            where the lines end.
        marks: steps of vertical lines, for events.
        grey: names of lines that stand back.
    """
    figure = Figure(figsize=(14.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel=label)
    axes.margins(x=0.02, y=0.08)
    axes.grid(axis="y")
    for at in marks:
        axes.axvline(at, color=_LIGHT["soft"], linewidth=1, linestyle=":")
    drawn = []
    for index, (name, ys) in enumerate(series.items()):
        colour = "grey" if name in grey else _COLOURS[index % len(_COLOURS)]
        dashes = _DASHES[index % len(_DASHES)]
        drawn += axes.plot(xs, ys, dashes, color=_LIGHT[colour], label=name)
    by_end = sorted(drawn, key=lambda line: _last(series[str(line.get_label())]), reverse=True)
    figure.legend(handles=by_end, loc="outside right upper")
    return _svg(figure, f"{label} by step")


def _last(values: NDArray[np.float64]) -> float:
    """Return the last value that is not NaN, or -inf."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else -math.inf


def _svg(figure: Figure, label: str) -> str:
    """Return the figure as an SVG element, without what would clash with other drawings.

    `label` is its name for screen readers.
    """
    for artist in figure.findobj():
        artist.set_clip_on(False)
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg ") :]
    # HTML needs no namespaces, and the ids of groups would occur in every drawing of the page.
    drawing = re.sub(r' xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"', "", drawing)
    drawing = drawing.replace("xlink:href", "href")
    for name, colour in _LIGHT.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
