import math
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.placement import Placement
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
from evenkeel_moe.model.texts import printable_line, printable_lines, refused
from evenkeel_moe.model.topology import ModelShape

forged = pytest.mark.fault(
    "an operator", "words of a rank forged a line of `evenkeel status` in a pipe"
)
INVISIBLE = {
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0",
    *map(chr, range(0xFE00, 0xFE10)),
    *map(chr, range(0xE0100, 0xE01F0)),
}
"""Characters that Unicode calls ignorable by default, though their category is of visible ones."""


def steers(char):
    """Return True for a character that moves the cursor, ends a line or takes no place in it."""
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") or char in INVISIBLE


@forged
def test_all_controls_are_replaced_and_no_other_character():
    for char in map(chr, range(sys.maxunicode + 1)):
        shown = "\ufffd" if steers(char) else char
        assert printable_line(f"a{char}") == "a" + (" " if char in "\t\n\r" else shown)
        assert printable_lines(f"a{char}") == "a" + (char if char in "\t\n" else shown)


@forged
@pytest.mark.parametrize(
    "end", ["\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85"]
)
def test_nothing_but_an_end_of_line_ends_a_line(end):
    assert printable_line(f"a{end}b").splitlines() == ["a\ufffdb"]
    assert printable_lines(f"a{end}b\nc").splitlines() == ["a\ufffdb", "c"]


@forged
@pytest.mark.parametrize("mark", ["\u0301", "\u0489", "\u0e49", "\u20dd", "\U0001e8d0"])
def test_marks_are_not_stacked_and_not_put_on_what_stands_before_a_text(mark):
    assert printable_line(f"e{mark}") == f"e{mark}"
    assert printable_line(f"e{mark * 2}e{mark * 2}") == f"e{mark * 2}e{mark * 2}"
    assert printable_lines(f"e{mark * 200}.") == f"e{mark * 2}" + "\ufffd" * 198 + "."
    assert printable_line(f"{mark}e") == "\ufffde"
    assert printable_line(f"a\n{mark}e") == "a \ufffde"
    assert printable_line(f"e{mark}\u200b{mark}") == f"e{mark}\ufffd\ufffd"


def test_texts_of_all_languages_stay():
    for words in (
        "Tiếng Việt",
        "Tie\u0302\u0301ng Vie\u0323\u0302t",
        "ภาษาไทย นี้",
        "עִבְרִית",
        "日本語　中文",
        "é🙂",
    ):
        assert printable_line(words) == words == printable_lines(words)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "wrong; it is -1"),
        ("x" * 50, f"wrong; it is {'x' * 40}"),
        ("a\nb\x1b", "wrong; it is a b\ufffd"),
        (10**5000, "wrong; it has thousands of digits"),
        (None, "wrong"),
        ([1], "wrong"),
        ({"token": "secret"}, "wrong"),
    ],
    ids=lambda value: str(type(value)),
)
def test_a_refusal_names_the_value_on_one_line(value, text):
    assert refused("wrong", value) == text


# --- quantities -----------------------------------------------------------------------------------


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


# --- The words about counts that do not divide ----------------------------------------------------


@pytest.mark.fault(
    "a user with 10 slots on 3 ranks", "was told that they do not divide, not which numbers do"
)
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((10, 3), "10 slots do not divide over 3 ranks: 9 or 12 slots would, or 2 or 5 ranks"),
        ((2, 3), "2 slots do not divide over 3 ranks: 3 slots would, or 2 ranks"),
        ((7, 2), "7 slots do not divide over 2 ranks: 6 or 8 slots would, or 1 or 7 ranks"),
        ((-1, 2), "-1 slots do not divide over 2 ranks"),
        ((10, 0), "10 slots do not divide over 0 ranks"),
        ((12, 3), ""),
    ],
)
def test_the_nearest_numbers_that_divide_are_named(sizes, words):
    assert undivided(sizes[0], "slots", sizes[1], "ranks") == words


def test_fewer_slots_than_experts_are_not_proposed():
    words = undivided(10, "slots", 4, "ranks", least=9)
    assert words == "10 slots do not divide over 4 ranks: 12 slots would, or 2 or 5 ranks"


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_words_are_empty_exactly_where_the_count_divides(count, parts):
    words = undivided(count, "a", parts, "b")
    assert (words == "") == (count % parts == 0)
    if words:
        said = words.partition(": ")[2]
        wholes = [n for n in range(parts, count + parts + 1) if n % parts == 0]
        near = [
            n
            for n in (
                max(filter(count.__ge__, wholes), default=0),
                min(filter(count.__lt__, wholes)),
            )
            if n
        ]
        assert said.partition(" a would")[0] == " or ".join(map(str, near))


@pytest.mark.fault(
    "a controller whose rank said 4194301 experts in 4194300 groups",
    "searched their divisors one by one while no other message was read",
)
def test_numbers_that_are_far_from_any_divisor_are_not_searched():
    prime = (1 << 61) - 1
    words = undivided(prime, "experts", prime - 1, "groups")
    assert words.endswith(f"{prime - 1} or {2 * prime - 2} experts would, or {prime} groups")
    words = undivided(prime, "experts", prime // 2, "groups")
    assert words.endswith(" would") and words.count("groups") == 1


def test_values_that_hold_sizes_say_them():
    with pytest.raises(InvalidInput, match="3 slots do not divide over 2 ranks: 2 or 4 slots"):
        Placement([[0, 1, 0]], 2, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="4 experts do not .* 3 expert groups: .* or 2 or 4 ex"):
        ModelShape(1, 4, 2, 2, 1, 1, 3)
