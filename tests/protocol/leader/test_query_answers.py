"""One question to all ranks: which answers count, and when they agree."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol.leader.query_round import Disagreement, GroupState, QueryRound
from tests.protocol.machines import AFTER_ONE, BASE, key_of, state_of

RANKS = frozenset((EpRank(0), EpRank(1)))


def answered(*states):
    asked = QueryRound(5, RANKS, all_checksums=True)
    for state in states:
        asked.take(state)
    return asked


def test_an_answer_counts_if_it_is_complete_and_of_this_query_or_a_later_one():
    without_map = dataclasses.replace(state_of(0, query=5), placement=None)
    asked = answered(state_of(1, query=4), without_map)
    assert asked.missing == (0, 1)
    asked.take(state_of(1, query=5))
    assert asked.missing == (0,)
    asked.take(state_of(0, query=6))
    assert asked.missing == ()


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        ({"weights_version": 2}, Reason.WEIGHTS_VERSION_CHANGED),
        ({"epoch": 1}, Reason.EPOCH_DISAGREES),
        ({"placement_digest": AFTER_ONE.digest}, Reason.EPOCH_DISAGREES),
        ({"checksums": (6,) * 8}, Reason.CHECKSUM_MISMATCH),
    ],
)
def test_all_answers_must_agree(difference, reason):
    group = answered(state_of(0, query=5), state_of(1, query=5, **difference)).group_state()
    assert isinstance(group, Disagreement)
    assert group.reason is reason and "[0, 1]" in group.detail


@pytest.mark.parametrize(("checksums", "known"), [((5,) * 8, (5,) * 8), (None, ())])
def test_the_state_of_the_group_is_what_all_answered(checksums, known):
    states = (state_of(rank, query=5, epoch=3, checksums=checksums) for rank in (1, 0))
    group = answered(*states).group_state()
    assert isinstance(group, GroupState)
    found = (group.epoch, group.placement, group.weights_version, group.checksums)
    assert found == (3, BASE, 1, known)


def test_the_wave_of_the_lowest_rank_that_holds_one_is_found():
    asked = answered(state_of(1, query=5, wave=key_of("b")), state_of(0, query=5))
    assert asked.held_wave() == key_of("b")
    asked.take(state_of(0, query=5, wave=key_of("a")))
    assert asked.held_wave() == key_of("a")
    assert answered(state_of(0, query=5)).held_wave() is None
