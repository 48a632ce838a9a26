"""The vector of a poll, what it means, and the calls at which nothing is polled."""

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.plan import hash_of
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState as State
from evenkeel_moe.protocol.rank.gate import Gate, PollResolved
from tests.protocol.machines import (
    LEADER,
    from_controller,
    key_of,
    next_digest,
    participant_in,
    participant_of,
    prepare_of,
    wave_of,
)

KEY = key_of()


def gate_of(*participants, poll_every=3, resolve_after=2):
    gate = Gate(participants, poll_every=poll_every, resolve_after=resolve_after)
    gate.settle(gate.agreement())
    return gate


def poll(gate, now=0.0):
    """Take steps up to the next poll; return its vector as a list."""
    while not (gate.advance() and gate.poll_due):
        pass
    return gate.begin_poll(now).tolist()


def number_of(gate):
    return int(gate.agreement()[0])


def test_a_vector_has_the_rebuild_the_digest_and_what_each_participant_says():
    rank = participant_in(State.ARMED)
    gate = gate_of(rank)
    number, h = number_of(gate), hash_of(f"{KEY.fingerprint}/{next_digest(rank)}")
    assert poll(gate) == [0, number, -number, 3, -3, 1, -1, h, -h, 0]
    asks = gate_of(participant_in(State.PREPARED))
    asks.request_rebuild(4)
    assert poll(asks, now=99.0) == [-5, number, -number, 3, -3, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "other",
    [prepare_of(key=key_of("q")), prepare_of(wave_of(dst=3))],
    ids=["another wave", "another map under the same key"],
)
def test_ranks_that_are_armed_for_different_waves_or_maps_do_not_pass(other):
    vectors = []
    for prepare in (prepare_of(), other):
        rank = participant_of()
        rank.handle(from_controller(prepare), 0.0)
        rank.handle(msg.StagingFinished(prepare.wave), 0.0)
        rank.handle(from_controller(msg.Commit(LEADER, prepare.wave)), 0.0)
        assert rank.state is State.ARMED
        vectors.append(poll(gate_of(rank)))
    minima = np.minimum(*np.array(vectors))[5:].tolist()
    assert gate_of(participant_of()).verdict(minima) == msg.PollNotPassed()


def test_a_participant_that_fails_in_the_snapshot_is_not_armed_and_drops_nothing(monkeypatch):
    """R9."""
    rank = participant_in(State.ARMED)
    gate = gate_of(rank)
    monkeypatch.setattr(rank, "snapshot", lambda now: 1 / 0)
    assert poll(gate, now=99.0)[5:] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [
        ((3, -3, 7, -7, 0), msg.PollPassed(Epoch(3))),
        ((3, -4, 7, -7, 0), msg.PollNotPassed()),
        ((3, -3, 7, -8, 0), msg.PollNotPassed()),
        ((0, -3, 0, -7, 0), msg.PollNotPassed()),
        ((0, 0, 0, 0, 1), msg.PollDropped()),
        ((0, 0, 0, 0, 0), msg.PollNotPassed()),
        ((0, -3, 0, -7, 1), msg.PollNotPassed()),
    ],
)
def test_all_armed_for_one_wave_pass_and_none_armed_may_drop(entries, verdict):
    assert gate_of(participant_of()).verdict(list(entries)) == verdict


def test_nothing_is_polled_before_the_ranks_have_agreed_nor_after_they_disagreed():
    rank = participant_of()
    gate = Gate([rank], poll_every=1, resolve_after=1)
    assert not any(gate.advance() or gate.poll_due for _ in range(5))
    assert not gate.settle(gate.agreement() + 1)
    assert not any(gate.advance() or gate.poll_due for _ in range(5))
    assert rank.observe_only


def test_a_rank_that_only_observes_still_does_after_the_ranks_have_agreed():
    rank = participant_of(observe_only=True)
    assert gate_of(rank).observe_only is False
    assert rank.observe_only


def test_a_poll_in_flight_is_used_before_the_next_begins():
    gate = gate_of(participant_of(), poll_every=3, resolve_after=3)
    assert not gate.polling
    vector = np.array(poll(gate))
    assert gate.polling
    for _ in range(3):
        assert not gate.poll_due
        gate.advance()
    assert gate.resolve_due and not gate.poll_due
    gate.handle(PollResolved(vector), 0.0)
    assert gate.poll_due and not gate.polling


def test_a_boundary_at_which_the_gate_rests_is_counted():
    rank = participant_of()
    gate = gate_of(rank, poll_every=2, resolve_after=1)
    gate.rest()
    assert (gate.calls, rank.step) == (1, 1)
    assert gate.advance() and gate.poll_due


def test_a_longer_vector_is_another_gates():
    """R8."""
    gate = gate_of(participant_of())
    vector = [*poll(gate), 0]
    (item,) = gate.handle(PollResolved(np.array(vector)), 0.0)
    assert isinstance(item.action, msg.LeaveGroup) and gate.left


def test_a_rank_that_was_not_armed_for_what_passed_leaves_with_the_reason():
    """R8."""
    rank, other = participant_in(State.PREPARED), key_of("q")
    gate = gate_of(rank)
    number = number_of(gate)
    poll(gate)
    rank.handle(from_controller(msg.Abort(LEADER, KEY)), 0.0)
    rank.handle(msg.TransportDrained(KEY), 0.0)
    rank.handle(from_controller(prepare_of(key=other)), 0.0)
    rank.handle(msg.StagingFinished(other), 0.0)
    rank.handle(from_controller(msg.Commit(LEADER, other)), 0.0)
    h = other.fingerprint
    (item,) = gate.handle(PollResolved(np.array([0, number, -number, 3, -3, 1, -1, h, -h, 0])), 0.0)
    assert isinstance(item.action, msg.LeaveGroup)
    assert (item.action.reason, gate.left) == (Reason.EPOCH_MISMATCH, True)
    assert not any(gate.advance() or gate.poll_due for _ in range(9))
