import math
import re
import xml.etree.ElementTree as ET

import numpy as np

from evenkeel_moe.replay.charts import PALETTE, lines

STEPS = np.arange(4.0)


def _lines(**series):
    return lines("a < b", STEPS, {name: np.array(values) for name, values in series.items()})


def test_nan_leaves_a_gap_in_the_line():
    drawing = ET.fromstring(_lines(a=[1.0, math.nan, 2.0, 3.0]))
    assert drawing.get("aria-label") == "a < b by step"
    styled = [node for node in drawing.iter("path") if "var(--blue)" in node.get("style", "")]
    path = styled[0].get("d", "")
    assert (path.count("M"), path.count("L")) == (2, 1)


def test_the_legend_lists_lines_by_where_they_end():
    drawing = ET.fromstring(_lines(a=[0, 0, 0, 2], b=[0, 0, 0, 3], c=[4, 4, 1, math.nan]))
    texts = ["".join(node.itertext()).strip() for node in drawing.iter("text")]
    assert [text for text in texts if text in {"a", "b", "c"}] == ["b", "a", "c"]


def test_colours_are_left_to_the_page_and_equal_charts_are_equal_text():
    first, second = (_lines(a=[0.5, 1.0, 1.0, 1.0], b=[0.5, 1.0, 2.0, 1.0]) for _ in range(2))
    assert first == second
    assert not re.search("#[0-9a-f]{6}", first.replace("#m", ""))
    assert set(re.findall(r"var\(--(\w+)\)", first)) <= set(PALETTE)
