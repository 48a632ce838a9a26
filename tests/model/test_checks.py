"""The words about counts that do not divide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape


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


def test_values_that_hold_sizes_say_them():
    with pytest.raises(InvalidInput, match="3 slots do not divide over 2 ranks: 2 or 4 slots"):
        Placement([[0, 1, 0]], 2, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="4 experts do not .* 3 expert groups: .* or 2 or 4 ex"):
        ModelShape(1, 4, 2, 2, 1, 1, 3)
