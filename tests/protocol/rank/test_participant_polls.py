"""A poll counts once and for the wave that it saw, and what is refused stays refused."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState as State
from tests.protocol.machines import (
    LEADER,
    from_controller,
    key_of,
    next_digest,
    only,
    participant_in,
    participant_of,
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


KEY = key_of()


def test_wave_of_other_weights_is_refused():
    """R4: a wave carries the weights version it was planned for."""
    vote = only(
        participant_of().handle(from_controller(prepare_of(key=key_of(version=2))), 0.0), msg.Vote
    )
    assert (vote.yes, vote.reason) == (False, Reason.WEIGHTS_VERSION_CHANGED)


@pytest.mark.parametrize("state", [State.STAGING, State.PREPARED])
def test_reload_ends_a_wave_that_no_poll_can_pass(state):
    """R4: a reload ends waves of the old version."""
    rank = participant_in(state)
    actions = rank.handle(msg.ReloadRequested(), 0.0)
    assert only(actions, msg.CancelStaging).wave == KEY
    assert only(actions, msg.PermitReload)
    assert rank.state is State.ABORTED


def test_reload_waits_for_the_poll_in_flight_and_drops_when_it_did_not_pass():
    """R4: reload ends waves of the old weights, but not under a poll in flight."""
    rank = participant_in(State.ARMED, polled=True)
    assert rank.handle(msg.ReloadRequested(), 0.0) == []
    actions = rank.handle(msg.PollNotPassed(), 0.0)
    assert only(actions, msg.PermitReload) and only(actions, msg.CancelStaging)


def test_reload_waits_for_the_swap_of_a_poll_that_passed():
    rank = participant_in(State.ARMED, polled=True)
    rank.handle(msg.ReloadRequested(), 0.0)
    assert only(rank.handle(msg.PollPassed(Epoch(1)), 0.0), msg.Swap)
    actions = rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    assert only(actions, msg.PermitReload)
    assert rank.epoch == 1


def test_reload_without_permission_under_a_poll_leaves_the_group():
    rank = participant_in(State.ARMED, polled=True)
    assert (
        only(rank.handle(msg.WeightsReloaded(2), 0.0), msg.LeaveGroup).reason
        is Reason.WEIGHTS_VERSION_CHANGED
    )


def test_no_wave_is_taken_between_permission_and_reload():
    rank = participant_of()
    rank.handle(msg.ReloadRequested(), 0.0)
    assert not only(rank.handle(from_controller(prepare_of()), 0.0), msg.Vote).yes
    state = only(rank.handle(msg.WeightsReloaded(2, (6,) * 8), 0.0), msg.RankState)
    assert state.weights_version == 2
    of_old = prepare_of(key=key_of("old", version=2))
    vote = only(rank.handle(from_controller(of_old), 0.0), msg.Vote)
    assert vote.reason is Reason.CHECKSUM_MISMATCH, "its checksums are those of the old weights"
    of_new = dataclasses.replace(prepare_of(key=key_of(version=2)), checksums=(6,))
    assert only(rank.handle(from_controller(of_new), 0.0), msg.StartStaging)


def test_reload_given_up_lets_waves_in_again():
    rank = participant_of()
    rank.handle(msg.ReloadRequested(), 0.0)
    assert rank.handle(msg.WeightsReloaded(1), 0.0) == []
    assert only(rank.handle(from_controller(prepare_of()), 0.0), msg.StartStaging)


@pytest.mark.parametrize("state", State)
def test_disabled_rank_refuses_the_next_wave_and_finishes_the_one_it_holds(state):
    rank = participant_in(state)
    assert rank.handle(msg.MigrationDisabled(), 0.0) == []
    assert rank.state is state and not rank.takes_waves
    if state is State.IDLE:
        actions = rank.handle(from_controller(prepare_of()), 0.0)
        assert only(actions, msg.Vote).reason is Reason.OBSERVE_ONLY
        assert rank.handle(msg.MigrationEnabled(), 0.0) == []
        again = rank.handle(from_controller(prepare_of(key=key_of("p-2"))), 0.0)
        assert only(again, msg.StartStaging)
