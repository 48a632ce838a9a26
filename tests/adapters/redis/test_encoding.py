"""The stored form: damaged and foreign bytes are unreadable, and counts take few bytes."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.adapters.redis.encoding import (
    Unreadable,
    pack_placement,
    pack_plan,
    pack_source,
    pack_window,
    unpack_placement,
    unpack_plan,
    unpack_source,
    unpack_window,
)
from tests.contracts.test_stores import (
    BASE,
    assert_same,
    make_record,
    make_window,
)

FORMS = [
    (pack_window(make_window(range(3))), unpack_window),
    (pack_source(make_window(range(3), source=True).source), unpack_source),
    (pack_placement(BASE), unpack_placement),
    (pack_plan(make_record()), unpack_plan),
]


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
)
def test_damaged_values_are_unreadable_and_nothing_worse(form, cuts):
    data, unpack = form
    damaged = bytearray(data)
    for position, value in cuts:
        damaged[position % len(damaged)] = value
    with contextlib.suppress(Unreadable):  # any other error fails the test
        unpack(bytes(damaged))


@given(st.sampled_from(FORMS), st.binary(max_size=60))
def test_foreign_values_are_unreadable_and_nothing_worse(form, data):
    for value in (data, form[0][: len(data)]):
        with pytest.raises(Unreadable):
            form[1](value)


@pytest.mark.parametrize(
    "most, width",
    [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), ((1 << 24) - 1, 3), ((1 << 32) - 1, 4)],
)
def test_counts_take_as_many_bytes_as_the_largest_needs(most, width):
    window = make_window(range(2), high=most + 1)
    window.counts[0, 0, 0] = most
    data = pack_window(window)
    assert data[1] == width
    assert_same(unpack_window(data), window)
    assert pack_window(*(window.slice(slice(i, i + 1)) for i in range(2))) == data


def test_a_chunk_that_claims_too_many_counts_is_not_unpacked():
    """One byte per count on the wire is four in memory."""
    head = struct.pack("<BBIIII", 2, 1, 1 << 14, 1 << 7, 1 << 8, 1)
    with pytest.raises(Unreadable, match="16384 x 128 x 256 counts"):
        unpack_window(head + b"anything")
