"""One rank tells the whole placement and all checksums, the others their digests (R4, R15)."""

import dataclasses
from dataclasses import replace

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.query_round import Disagreement, GroupState, QueryRound
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    BASE,
    control_of,
    from_rank,
    key_of,
    of_kind,
    only,
    state_of,
)

RANKS = frozenset(map(EpRank, range(3)))


def short(rank, **changes):
    """Return the answer of a rank that was asked neither for its placement nor its checksums."""
    return replace(state_of(rank, query=1), **changes)


def queries(actions):
    return {a.rank: a.message for a in of_kind(actions, ctl.SendToRank)}


def recovering():
    """Return a machine in recovery and the questions of its round."""
    control = control_of(S.RECOVERING)
    assert control.as_leader.recovery.round is not None
    return control, queries(control.as_leader.recovery.begin(0.0))


def test_only_one_rank_is_asked_for_its_placement_and_checksums():
    _, asked = recovering()
    assert [(q.want_placement, q.want_checksums) for _, q in sorted(asked.items())] == [
        (True, True),
        (False, False),
    ]


def test_the_answers_of_the_other_ranks_agree_by_digest():
    found = QueryRound(1, RANKS)
    for rank in (2, 1):
        found.take(short(rank, placement=None, checksums=None))
    assert not found.complete and found.missing == (0,)
    found.take(short(0))
    assert found.complete
    state = found.group_state()
    assert isinstance(state, GroupState)
    assert (state.placement, state.checksums) == (BASE, (5,) * 8)


def test_another_digest_is_a_disagreement():
    found = QueryRound(1, RANKS)
    for rank, digest in ((0, BASE.digest), (1, "other"), (2, BASE.digest)):
        found.take(short(rank, placement_digest=digest))
    state = found.group_state()
    assert isinstance(state, Disagreement) and state.reason is Reason.EPOCH_DISAGREES


def test_the_witness_has_to_tell_its_placement():
    found = QueryRound(1, RANKS)
    found.take(short(0, placement=None))
    assert found.missing == (0, 1, 2)


def test_a_placement_that_its_digest_does_not_name_is_no_answer():
    found = QueryRound(1, RANKS)
    found.take(short(0, placement=AFTER_ONE, placement_digest=BASE.digest))
    assert found.missing == (0, 1, 2)


def test_an_answer_to_a_later_question_that_asked_for_no_checksums_does_not_say_there_are_none():
    found = QueryRound(1, RANKS, all_checksums=True)
    for rank in RANKS:
        found.take(short(rank))
    found.answers.pop(EpRank(1))
    found.take(short(1, query=2, placement=None, checksums=None))
    assert found.missing == (1,)
    found.take(short(1))
    assert isinstance(found.group_state(), GroupState)


def test_a_thousand_answers_keep_one_placement():
    ranks = frozenset(map(EpRank, range(1000)))
    found = QueryRound(1, ranks, all_checksums=True)
    for rank in ranks:
        found.take(short(rank))
    assert all(a.placement is None and a.checksums is None for a in found.answers.values())
    assert found.complete and len(found.checksums) == 1


def test_after_a_reload_all_ranks_tell_their_checksums():
    """R4: their Hellos told the checksums of the weights before."""
    control, _ = recovering()
    recovery = control.as_leader.recovery
    told = short(1, query=recovery.query, weights_version=2, placement=None, checksums=None)
    again = queries(control.handle(from_rank(1, told), 0.0))
    assert [(q.want_placement, q.want_checksums) for _, q in sorted(again.items())] == [
        (True, True),
        (False, True),
    ]
    for rank, checksums in ((0, (5,) * 8), (1, (6,) * 8)):
        answer = short(rank, query=recovery.query, weights_version=2, checksums=checksums)
        actions = control.handle(from_rank(rank, answer), 0.0)
    assert only(actions, ctl.Alert).reason is Reason.CHECKSUM_MISMATCH
    assert control.state is S.RECOVERING
    again = queries(control.handle(msg.Tick(), 2.0))
    assert all(q.want_checksums for q in again.values())


def test_a_member_keeps_no_placement_of_an_answer():
    control = control_of(S.READY)
    for member in control.membership.members.values():
        assert member.state is not None
        assert (member.state.placement, member.state.checksums) == (None, None)


PAIR = frozenset((EpRank(0), EpRank(1)))


def answered(*states):
    asked = QueryRound(5, PAIR, all_checksums=True)
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
