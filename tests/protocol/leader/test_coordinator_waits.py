"""For whom and for how long a wave waits, at its bounds, and what it says meanwhile (R14)."""

import pytest

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.messages import WaveOutcome
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    LEADER,
    PEERS,
    TIMING,
    coordinator_in,
    from_rank,
    key_of,
    of_kind,
    only,
    prepare_of,
    recovering_coordinator,
    sent,
    state_of,
)

KEY = key_of()
LOST, BACK = ctl.RankLost(EpRank(1)), ctl.RankConnected(EpRank(1), 1, 60)
ACK = msg.Ack(KEY, Epoch(1), "digest")


def tick(wave, now, step=None):
    """Return the change of health at a tick, after the group's step was heard."""
    if step is not None:
        wave.handle(ctl.GroupProgress(step), now)
    return [(h.stalled, h.reason) for h in of_kind(wave.handle(msg.Tick(), now), ctl.WaveHealth)]


def test_a_wave_that_has_just_begun_has_a_reason():
    assert coordinator_in(C.PREPARING).reason is Reason.PLAN_STARTED
    assert recovering_coordinator().reason is Reason.RECOVERING


def test_an_illegal_event_raises_with_the_history_without_progress():
    wave = recovering_coordinator()
    wave.handle(ctl.GroupProgress(5), 0.0)
    wave.handle(from_rank(0, state_of(0, query=5)), 0.0)
    with pytest.raises(IllegalEvent) as caught:
        wave.handle(ctl.CancelWave(Reason.CANCELLED), 0.0)
    assert caught.value.story == wave.story == ("recovering+RankState",)


@pytest.mark.parametrize("step", [None, 0])
def test_a_group_that_takes_no_new_step_is_paused_after_a_while(step):
    wave = coordinator_in(C.COMMITTING)
    assert tick(wave, TIMING.idle_after_s - 0.01, step) == []
    assert tick(wave, TIMING.idle_after_s, step) == [(False, Reason.NO_STEPS)]


@pytest.mark.parametrize("first_step", [0, 100])
def test_a_wave_stalls_after_both_its_seconds_and_its_steps(first_step):
    for seconds, steps, stalls in ((10.0, 49, False), (9.9, 50, False), (10.0, 50, True)):
        wave = Coordinator(KEY, LEADER, PEERS, TIMING, prepare=prepare_of())
        wave.start(0.0, first_step)
        wave.handle(ctl.CancelWave(Reason.CANCELLED), 0.0)
        said = tick(wave, seconds, first_step + steps)
        assert said == ([(True, Reason.ABORT_DEADLINE)] if stalls else [])


def test_a_found_wave_needs_no_steps_to_stall():
    """Its ranks answer questions whether or not they take steps."""
    wave = recovering_coordinator()
    assert tick(wave, TIMING.stall_after_s - 0.1) == []
    assert tick(wave, TIMING.stall_after_s) == [(True, Reason.RECOVERY_DEADLINE)]


def test_a_rank_that_swapped_answers_a_commit_like_an_ack():
    """R12: its Ack was lost, and the wave is committed all the same."""
    wave = coordinator_in(C.COMMITTING)
    swapped = msg.AbortAnswer(KEY, Epoch(1), WaveOutcome.SWAPPED, True)
    assert only(wave.handle(from_rank(0, swapped), 0.0), ctl.PersistOutcome).committed
    assert (wave.state, wave.done) == (C.COMMITTED, False)


def test_the_last_ack_ends_a_stall():
    wave = coordinator_in(C.COMMITTED)
    assert only(wave.handle(LOST, 1.0), ctl.WaveHealth).stalled
    health = only(wave.handle(from_rank(1, ACK), 2.0), ctl.WaveHealth)
    assert (health.reason, wave.done) == (None, True)
    wave = coordinator_in(C.COMMITTING)
    wave.handle(LOST, 1.0)
    wave.handle(from_rank(0, ACK), 2.0)
    assert tick(wave, 3.0) == [(True, Reason.RANK_LOST)], "the lost rank has not acknowledged"


def test_a_rank_that_is_lost_while_it_prepares_is_also_what_the_abort_waits_for():
    wave = coordinator_in(C.PREPARING)
    wave.handle(LOST, 1.0)
    assert wave.state is C.ABORTING
    assert tick(wave, 1.1) == [(True, Reason.RANK_LOST)]
    wave.handle(BACK, 2.0)
    assert tick(wave, 2.1) == [(False, None)]


def test_only_while_it_prepares_a_restarted_rank_ends_the_wave():
    restarted = ctl.RankConnected(EpRank(1), 2, 60)
    for state, after in ((C.PREPARING, C.ABORTING), (C.COMMITTING, C.COMMITTING)):
        wave = coordinator_in(state)
        asked = of_kind(wave.handle(restarted, 1.0), ctl.SendToRank)
        assert wave.state is after
        assert [action.stream for action in asked if action.rank == 1] == [60]


def test_a_rank_that_has_answered_is_not_asked_again_when_it_reconnects():
    wave = coordinator_in(C.PREPARING)
    wave.handle(from_rank(1, msg.Vote(KEY, True)), 0.0)
    assert sent(wave.handle(BACK, 1.0)) == []


def test_a_rank_outside_the_wave_is_not_heard():
    wave = coordinator_in(C.PREPARING)
    assert wave.handle(from_rank(5, msg.Vote(KEY, True)), 0.0) == []


def test_a_question_that_one_rank_did_not_get_goes_out_with_the_next_tick():
    wave = coordinator_in(C.ABORTING)
    question = ctl.SendToRank(EpRank(0), 10, msg.Abort(LEADER, KEY))
    for _ in range(2):  # Skipped twice, for the batches of two writes.
        wave.peers.not_sent([question])
    assert wave.peers.is_unsent()
    asked = of_kind(wave.handle(msg.Tick(), 0.1), ctl.SendToRank)
    assert [action.rank for action in asked] == [0]
    assert not wave.peers.is_unsent()
    wave.peers.not_sent([question])
    wave.handle(from_rank(0, msg.AbortAnswer(KEY, Epoch(0), WaveOutcome.DROPPED, True)), 0.2)
    assert not wave.peers.is_unsent(), "it has answered"
