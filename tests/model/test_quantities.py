import math

import pytest

from evenkeel_moe.model.quantities import (
    age,
    bytes_text,
    duration_text,
    figure,
    figure_name,
    saving,
    saving_range,
    share,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_999, "1 MB"),
        (1_250_000_000, "1.25 GB"),
        (3.4e12, "3.4 TB"),
        (-2_000, "-2 kB"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_bytes_have_decimal_units(value, text):
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.012, "12 ms"),
        (119, "119 s"),
        (600, "10 min"),
        (9000, "2.5 h"),
        (3 * 86400, "3 d"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_durations_have_the_unit_that_keeps_them_short(value, text):
    assert duration_text(value) == text


def test_a_moment_is_told_relative_to_now():
    assert age(100.0, 112.4) == "12 s ago"
    assert age(700.0, 100.0) == "in 10 min"
    assert age(100.0, 365.0) == "4 min ago"
    assert age(0.0, 7320.0) == "2 h ago"
    assert age(None, 1.0) == "-"


def test_shares_are_percent_without_a_negative_zero():
    assert share(0.0813) == "8.1%"
    assert share(-0.0001) == "0.0%"
    assert share(None) == share(math.nan) == "-"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("gain_lower", 0.0123, "1.2%"),
        ("idle_experts", 0.375, "37.5%"),
        ("max_layer_deviation", 0.005, "0.5%"),
        ("bytes", 2e9, "2 GB"),
        ("max_bytes", 2e9, "2 GB"),
        ("cooldown_s", 30.0, "30 s"),
        ("balancedness_mean", 0.8, "0.800"),
        ("plan_below", 0.9, "0.900"),
        ("max_payback_steps", 20_000.0, "20,000"),
        ("change_strength", 12.3456, "12.35"),
        ("gain_upper", math.nan, "-"),
        ("copies", None, "-"),
    ],
)
def test_a_figure_has_the_unit_that_its_name_implies(name, value, text):
    assert figure(name, value) == text


def test_names_of_figures_are_words():
    assert figure_name("since_plan_s") == "since plan"


def test_shares_of_a_story_are_in_percent():
    assert figure("delivered_gain", 0.3339) == "33.4%"
    assert figure("promised_lower", -0.1) == "-10.0%"


def test_a_loss_of_time_is_told_in_words():
    gains = (0.217, 0.0, -0.0004, -0.0006, -0.2, -1.0, -2.519, None, math.nan)
    assert [saving(gain) for gain in gains] == [
        *("21.7% saved", "0.0% saved", "0.0% saved", "0.1% slower", "20.0% slower"),
        *("2.0x as long", "3.5x as long", "-", "-"),
    ]
    assert saving_range(0.1, 0.2) == "10.0% to 20.0%"
    assert saving_range(-0.1, 0.2) == "10.0% slower to 20.0% saved"
    assert saving_range(-0.651, -0.4) == "40.0% slower to 65.1% slower"
