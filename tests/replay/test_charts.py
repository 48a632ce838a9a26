import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.replay.charts import (
    PALETTE,
    Series,
    Style,
    bars,
    heat_colours,
    heat_map,
    lines,
    ranges,
)

BLUE = Style("blue")
values = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan))
few = settings(max_examples=15, deadline=None)


def _lines(series: Sequence[Series], label: str = "chart", points: bool = True) -> ET.Element:
    return ET.fromstring(lines(label, series, x_label="x", y_label="y", points=points))


def _tips(drawing: ET.Element) -> list[str]:
    """Return the tooltips of the marks: points, bars and cells."""
    marks = [node for node in drawing.iter() if node.tag in ("use", "path")]
    return [title.text or "" for mark in marks for title in mark.findall("title")]


@few
@given(st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=7))
def test_every_known_point_has_a_tooltip(runs):
    series = [
        Series(f"<{number}>", BLUE, list(range(len(run))), run) for number, run in enumerate(runs)
    ]
    drawing = _lines(series, label='a "title" & more')
    assert drawing.get("aria-label") == 'a "title" & more'
    assert _tips(drawing) == [
        f"<{number}>: {x:g}, {y:.4g}"
        for number, run in enumerate(runs)
        for x, y in enumerate(run)
        if not math.isnan(y)
    ]


def test_nan_leaves_a_gap_in_the_line():
    drawing = _lines([Series("a", BLUE, [0, 1, 2, 3], [1.0, math.nan, 2.0, 3.0])], points=False)
    colour = "var(--blue)"
    (line,) = [
        node for node in drawing.iter("path") if f"stroke: {colour}" in node.get("style", "")
    ]
    path = line.get("d", "")
    assert (path.count("M"), path.count("L")) == (2, 1)


def test_the_legend_lists_lines_by_where_they_end():
    series = [
        Series(name, BLUE, [0, 1], [0.5, end]) for name, end in zip("abc", (2, 3, 1), strict=True)
    ]
    texts = ["".join(node.itertext()).strip() for node in _lines(series).iter("text")]
    assert [text for text in texts if text in {"a", "b", "c"}] == ["b", "a", "c"]


@few
@given(st.lists(values, min_size=1, max_size=8))
def test_a_bar_without_a_value_is_left_out(heights):
    names = [f"n{number}" for number in range(len(heights))]
    drawing = ET.fromstring(bars("chart", names, heights, x_label="x", y_label="y"))
    titles = {node.text for node in drawing.iter("title")}
    assert titles == {
        "chart",
        *(
            f"{name}: {value:.4g}"
            for name, value in zip(names, heights, strict=True)
            if not math.isnan(value)
        ),
    }


@few
@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=6))
def test_rows_with_all_three_values_are_drawn(rows):
    rising = [sorted(row, key=lambda value: (value != value, value)) for row in rows]
    named = [(f"r{number}", BLUE, row) for number, row in enumerate(rising)]
    drawing = ET.fromstring(ranges("chart", named, ("a", "b", "c"), x_label="x"))
    assert _tips(drawing) == [
        f"{name} {word}: {value:.4f}"
        for name, _, row in named
        if not any(map(math.isnan, row))
        for word, value in zip("abc", row, strict=True)
    ]


def test_cells_are_shaded_by_their_distance_from_an_even_share():
    shares = np.array([[1.0, 1.5, 0.5], [math.nan, 9.0, 1.0]])
    colours = heat_colours(shares, 1.0)
    assert colours[..., 3].tolist() == [[0.0, 0.5, 0.5], [1.0, 1.0, 0.0]]
    over, under, blank = colours[0, 1, :3], colours[0, 2, :3], colours[1, 0, :3]
    assert over[0] > over[2]
    assert under[0] < under[2]
    assert blank.tolist() == [1.0, 1.0, 1.0]
    drawing = ET.fromstring(heat_map("chart", shares, ["3", "4"], 1.0))
    assert _tips(drawing)[:3] == [
        f"layer 3 rank {rank}: {shares[0, rank]:.2f}" for rank in range(3)
    ]


def test_colours_are_left_to_the_page_and_equal_charts_are_equal_text():
    series = [Series("a", BLUE, [0, 1], [0.5, 1.0]), Series("b", BLUE, [0, 1], [0.5, 1.0])]
    first, second = (lines("t", series, x_label="x", y_label="y", points=True) for _ in range(2))
    assert first == second
    assert not re.search("#[0-9a-f]{6}", first.replace("#m", ""))
    assert set(re.findall(r"var\(--(\w+)\)", first)) <= set(PALETTE)
