"""A poll counts once and for the wave that it saw, and what is refused stays refused."""

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState as State
from tests.protocol.machines import (
    LEADER,
    from_controller,
    key_of,
    only,
    participant_in,
    prepare_of,
)

KEY, OTHER = key_of(), key_of("q")
ABORT = from_controller(msg.Abort(LEADER, KEY))
COMMIT = from_controller(msg.Commit(LEADER, KEY))
PASSED = msg.PollPassed(Epoch(1))


def holding_another_wave_than_the_poll_saw():
    rank = participant_in(State.PREPARED)
    rank.snapshot(50.0)
    rank.handle(ABORT, 50.0)
    rank.handle(msg.TransportDrained(KEY), 50.0)
    rank.handle(from_controller(prepare_of(key=OTHER)), 50.0)
    assert rank.wave == OTHER
    return rank


@pytest.mark.parametrize("state", [State.PREPARED, State.ARMED])
def test_a_resolved_poll_does_not_pass_later(state):
    """R8: nobody has seen this rank armed since."""
    rank = participant_in(state)
    rank.snapshot(0.0)
    rank.handle(msg.PollNotPassed(), 0.0)
    if state is State.PREPARED:
        rank.handle(COMMIT, 0.0)
    assert only(rank.handle(PASSED, 0.0), msg.LeaveGroup).reason is Reason.EPOCH_MISMATCH


def test_a_resolved_poll_holds_no_abort_back():
    rank = participant_in(State.ARMED, polled=True)
    rank.handle(msg.PollNotPassed(), 0.0)
    assert only(rank.handle(ABORT, 0.0), msg.AbortAnswer).outcome is msg.WaveOutcome.DROPPED


def test_a_poll_drops_only_the_wave_that_it_saw():
    """R6: the other ranks drop what they held at the poll."""
    rank = holding_another_wave_than_the_poll_saw()
    assert rank.handle(msg.PollDropped(), 50.0) == []
    assert rank.state is State.STAGING
    never_polled = participant_in(State.PREPARED)
    assert never_polled.handle(msg.PollDropped(), 50.0) == []
    assert never_polled.state is State.PREPARED


def test_a_wave_that_was_given_up_gets_no_yes_any_more():
    """R7: its staging memory may be gone."""
    for event in (ABORT, msg.ReloadRequested()):
        rank = participant_in(State.PREPARED)
        rank.handle(event, 0.0)
        vote = only(rank.handle(from_controller(prepare_of()), 0.0), msg.Vote)
        assert (vote.yes, vote.reason) == (False, Reason.WAVE_DROPPED)


@pytest.mark.parametrize(
    ("state", "reason"),
    [(State.PREPARED, Reason.BUSY), (State.ABORTED, Reason.TRANSPORT_NOT_DRAINED)],
)
def test_a_rank_that_holds_a_wave_votes_no_for_another(state, reason):
    rank = participant_in(state)
    vote = only(rank.handle(from_controller(prepare_of(key=OTHER)), 0.0), msg.Vote)
    assert (vote.wave, vote.yes, vote.reason) == (OTHER, False, reason)
