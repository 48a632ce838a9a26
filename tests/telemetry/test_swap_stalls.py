"""The expected stall of a plan follows the swaps that were measured."""

import pytest

from evenkeel_moe.telemetry.swap_stalls import SwapStalls, most_bytes
from tests.protocol.machines import SHAPE, key_of, wave_of

PER_RANK = SHAPE.slots_per_rank


def twice(wave):
    """Return the wave with every transfer done twice: twice the bytes into the same rank."""
    return type(wave)(wave.index, wave.layers, wave.rows, wave.batches * 2)


def test_nothing_is_expected_before_a_swap_was_measured():
    stalls = SwapStalls()
    assert stalls.expected_s([wave_of()], PER_RANK) is None
    stalls.begins(key_of(), wave_of(), PER_RANK)
    stalls.measured(key_of(), 0.0)  # A repeated acknowledgement.
    stalls.measured(key_of("other"), 3.0)  # A wave that this leader did not send.
    assert stalls.expected_s([wave_of()], PER_RANK) is None


def test_the_slowest_rank_counts_and_larger_waves_take_longer_in_proportion():
    stalls = SwapStalls()
    stalls.begins(key_of(), wave_of(), PER_RANK)
    for seconds in (0.002, 0.003, 0.001):
        stalls.measured(key_of(), seconds)
    assert stalls.expected_s([wave_of()], PER_RANK) == 0.003
    assert stalls.expected_s([wave_of(), twice(wave_of())], PER_RANK) == pytest.approx(0.006)
    assert stalls.expected_s([], PER_RANK) == 0.003
    stalls.forget()
    assert stalls.expected_s([wave_of()], PER_RANK) is None


def test_old_waves_are_forgotten():
    stalls = SwapStalls()
    for index in range(40):
        stalls.begins(key_of(index=index), wave_of(), PER_RANK)
        stalls.measured(key_of(index=index), 1.0 if index == 0 else 0.5)
    assert stalls.expected_s([wave_of()], PER_RANK) == 0.5


def test_bytes_are_those_into_the_fullest_rank():
    one, other = wave_of(src=4, dst=2), wave_of(src=2, dst=4)
    both = type(one)(0, one.layers, one.rows, (*one.batches, *other.batches, *other.batches))
    assert most_bytes(both, PER_RANK) == 2 * SHAPE.bytes_per_expert
