import math
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.replay.svg import Panel, Series, bars, heat_map, lines, ranges

values = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan))


def _inside(svg):
    """Parse; every coordinate is a number inside the drawing."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    for node in root.iter():
        for key, most in (
            ("x", width),
            ("cx", width),
            ("x1", width),
            ("x2", width),
            ("y", height),
            ("cy", height),
            ("y1", height),
            ("y2", height),
        ):
            if node.get(key) is not None:
                assert -0.1 <= float(node.get(key)) <= most + 0.1, (node.tag, key, node.get(key))
        for point in (node.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert -0.1 <= x <= width + 0.1
            assert -0.1 <= y <= height + 0.1
    return root


@given(st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=7))
def test_lines_stay_inside_whatever_the_values(runs):
    series = [
        Series(f"<{i}>", f"hue-{i}", list(range(len(run))), run) for i, run in enumerate(runs)
    ]
    _inside(lines('a "title" & more', Panel(), series, points=True))


def test_a_gap_breaks_the_line():
    root = _inside(
        lines("t", Panel(), [Series("a", "hue-0", [0, 1, 2, 3], [1.0, math.nan, 2.0, 3.0])])
    )
    runs = [node.get("points") for node in root.iter() if node.tag.endswith("polyline")]
    assert [len(run.split()) for run in runs] == [1, 2]


def test_labels_at_line_ends_do_not_touch():
    series = [
        Series(name, "hue-0", [0, 1], [0.5, 0.5 + i / 1000]) for i, name in enumerate("abcdef")
    ]
    root = _inside(lines("t", Panel(), series))
    at = sorted(float(node.get("y")) for node in root.iter() if node.get("class") == "name")
    assert len(at) == 6
    assert min(b - a for a, b in zip(at[:-1], at[1:], strict=True)) >= 13.9


@given(st.lists(values, min_size=1, max_size=8))
def test_bars_stand_on_zero(heights):
    root = _inside(bars("t", Panel(340, 240), [str(i) for i in range(len(heights))], heights))
    drawn = [node for node in root.iter() if node.get("class") == "bar plain"]
    assert len(drawn) == sum(not math.isnan(height) for height in heights)


@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=6))
def test_ranges_stay_inside(rows):
    _inside(
        ranges(
            "t",
            Panel(),
            [
                (str(i), "hue-0", sorted(row, key=lambda v: (v != v, v)))
                for i, row in enumerate(rows)
            ],
            ("a", "b", "c"),
        )
    )


def test_heat_map_shades_by_distance_from_an_even_share():
    root = _inside(heat_map("t", [[1.0, 1.5, 0.5], [math.nan, 9.0, 1.01]], ["3", "4"], 1.0))
    assert [node.get("class") for node in root.iter() if node.tag.endswith("rect")] == [
        "e",
        "o5",
        "u5",
        "o10",
        "e",
    ]
