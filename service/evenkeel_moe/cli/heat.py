"""Draws a heat map of load on the terminal, with a figure for every block of layers and ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from evenkeel_moe.model.quantities import age

_STEPS = (
    (0.5, "grey70", "."),
    (0.8, "cyan", "-"),
    (1.2, "default", "="),
    (1.5, "yellow", "+"),
    (2.0, "dark_orange", "#"),
    (math.inf, "red", "@"),
)
"""(upper bound of the load / mean, colour, character): the shape tells as much as the colour."""
_LABEL = 10
"""Characters of the row labels."""
_MOST_ROWS = 40
_EVERY = (1, 2, 4, 5, 8, 10, 16, 20, 40)
"""Distances between two columns whose number is named."""


class _Cells:
    """Draws the cells in the width that there is; neighbours share a cell and show their maximum.

    Args:
        rows: (layers, columns) load / mean; None is unknown.
        noun: what a column stands for.
    """

    def __init__(self, rows: Sequence[Sequence[float | None]], noun: str) -> None:
        self._rows = rows
        self._noun = noun

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one line for each block of layers."""
        width = len(self._rows[0])
        wide = 2 if width * 2 <= options.max_width - _LABEL else 1
        columns = _blocks(width, max(1, (options.max_width - _LABEL) // wide))
        layers = _blocks(len(self._rows), _MOST_ROWS)
        yield Text(f"{'':<{_LABEL}}{self._noun}", style="dim")
        yield Text(f"{'layer':<{_LABEL}}{_scale(columns, wide)}", style="dim")
        for first, last in layers:
            line = Text(f"{_span(first, last):<{_LABEL}}", style="dim")
            for left, right in columns:
                block = [row[left:right] for row in self._rows[first:last]]
                line.append_text(_mark(_largest(block), wide))
            yield line
        merged = (columns[0][1] - columns[0][0], layers[0][1] - layers[0][0])
        if merged != (1, 1):
            yield Text(
                f"a cell shows the largest of up to {merged[1]} layers x {merged[0]} {self._noun}s",
                style="dim",
            )


def heat_map(answer: Mapping[str, Any], experts: bool, now: float) -> RenderableType:
    """Return the heat map of an answer of the controller, with its scale and its worst cells.

    Args:
        now: Unix seconds, from which the age of the load counts.
    """
    noun = "expert" if experts else "rank"
    rows = answer[f"{noun}s"]
    if not rows or not rows[0]:
        what = (
            "no complete step is known yet" if not answer["steps"] else "the placement is unknown"
        )
        return Text(f"{answer['deployment']}: {what}")
    phase = answer["phase"] or "all phases"
    head = (
        f"{answer['deployment']}: load of each {noun} / mean of its layer, {phase},"
        f" {answer['steps']} steps up to step {answer['newest_step']}"
    )
    return Group(
        Text(head),
        Text(_reported(answer, now)),
        Text(),
        _Cells(rows, noun),
        Text(),
        _key(),
        _worst(rows, answer, noun),
    )


def _reported(answer: Mapping[str, Any], now: float) -> str:
    """Return how old the load is, and by how many ranks it is still reported."""
    at, connected = answer["newest_step_unix"], answer["ranks_connected"]
    when = (
        "it is unknown when it was last reported" if at is None else f"last reported {age(at, now)}"
    )
    who = {0: "no rank is connected", 1: "1 rank is connected"}
    return f"{when}, {who.get(connected, f'{connected} ranks are connected')}"


def _key() -> Text:
    key = Text("load / mean: ", style="dim")
    lower = 0.0
    for upper, _, _ in _STEPS:
        key.append_text(_mark((lower + min(upper, lower + 1)) / 2, 2))
        words = f" above {lower:g}  " if math.isinf(upper) else f" {lower:g}-{upper:g}  "
        key.append(words, style="dim")
        lower = upper
    return key.append("? unknown", style="dim")


def _worst(
    rows: Sequence[Sequence[float | None]], answer: Mapping[str, Any], noun: str
) -> RenderableType:
    first = answer["first_layer"]
    cells = [
        (value, layer, column)
        for layer, row in enumerate(rows)
        for column, value in enumerate(row)
        if value is not None
    ]
    shown = sorted(cells, reverse=True)[:3]
    words = ", ".join(
        f"{value:.2f} ({noun} {column} in layer {first + layer})" for value, layer, column in shown
    )
    return Text(f"largest: {words}" if words else "no layer had load")


def _blocks(count: int, most: int) -> list[tuple[int, int]]:
    """Return (start, end) of at most `most` blocks of equal size; the last may be smaller."""
    size = math.ceil(count / most)
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _span(first: int, last: int) -> str:
    return str(first) if last - first == 1 else f"{first}-{last - 1}"


def _scale(columns: Sequence[tuple[int, int]], wide: int) -> str:
    """Return the numbers of the columns, each above the beginning of its column.

    As many are named as fit with a space between them.
    """
    longest = len(str(columns[-1][0]))
    every = next(n for n in _EVERY if n * wide > longest or n >= len(columns))
    named = (str(first).ljust(every * wide) for first, _ in columns[::every])
    return "".join(named).rstrip()


def _largest(block: Sequence[Sequence[float | None]]) -> float | None:
    known = [value for row in block for value in row if value is not None]
    return max(known, default=None)


def _mark(value: float | None, wide: int) -> Text:
    if value is None:
        return Text("?" * wide, style="dim")
    _, colour, character = next(step for step in _STEPS if value <= step[0])
    return Text(character * wide, style=colour)
