"""The controller's half of one wave, rule by rule."""

from typing import Any

import pytest

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.messages import ParticipantState as P
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
YES = msg.Vote(KEY, True)
GONE = msg.AbortAnswer(KEY, Epoch(0), WaveOutcome.DROPPED, True)
SWAPPED = msg.AbortAnswer(KEY, Epoch(1), WaveOutcome.SWAPPED, True)
ACK = msg.Ack(KEY, Epoch(1), "digest")


def test_commit_follows_the_last_yes():
    wave = coordinator_in(C.PREPARING)
    assert wave.handle(from_rank(0, YES), 0.0) == []
    actions = wave.handle(from_rank(1, YES), 0.0)
    assert [type(message) for message in sent(actions)] == [msg.Commit, msg.Commit]
    assert wave.state is C.COMMITTING


def test_one_no_aborts_on_all_ranks():
    wave = coordinator_in(C.PREPARING)
    actions = wave.handle(
        from_rank(1, msg.Vote(KEY, False, Reason.CHECKSUM_MISMATCH, "slot 3")), 0.0
    )
    assert [action.rank for action in of_kind(actions, ctl.SendToRank)] == [0, 1]
    assert (wave.state, wave.reason) == (C.ABORTING, Reason.CHECKSUM_MISMATCH)
    assert "slot 3" in wave.detail


@pytest.mark.parametrize(("incarnation", "stream"), [(1, 99), (2, 11)], ids=["stream", "life"])
def test_vote_of_another_stream_or_life_does_not_count(incarnation, stream):
    """R1: votes count only from the stream that got the Prepare."""
    wave = coordinator_in(C.PREPARING)
    wave.handle(from_rank(0, YES), 0.0)
    assert wave.handle(from_rank(1, YES, incarnation, stream), 0.0) == []
    assert wave.state is C.PREPARING


def test_reconnected_rank_gets_the_question_again_and_answers_on_the_new_stream():
    """R1."""
    wave = coordinator_in(C.PREPARING)
    wave.handle(from_rank(0, YES), 0.0)
    again = only(wave.handle(ctl.RankConnected(EpRank(1), 1, 50), 1.0), ctl.SendToRank)
    assert (again.stream, type(again.message)) == (50, msg.Prepare)
    assert wave.handle(from_rank(1, YES), 1.0) == [], (
        "the old stream is no longer the one that was asked"
    )
    wave.handle(from_rank(1, YES, stream=50), 1.0)
    assert wave.state is C.COMMITTING


def test_wave_is_recorded_when_one_rank_is_at_the_new_epoch_and_done_when_all_are():
    """One wave, 5: recorded as committed when it learns of one rank, retired when all acked."""
    wave = coordinator_in(C.COMMITTING)
    wave.handle(from_rank(1, ACK), 0.0)
    assert (wave.state, wave.done, wave.peers.pending) == (C.COMMITTED, False, (0,))
    assert wave.handle(from_rank(0, ACK), 0.0) == []
    assert wave.done


def test_abort_ends_only_when_all_ranks_are_drained():
    """R7: the next Prepare needs "drained" from all R."""
    wave = coordinator_in(C.ABORTING)
    wave.handle(from_rank(0, GONE), 0.0)
    wave.handle(from_rank(1, msg.AbortAnswer(KEY, Epoch(0), WaveOutcome.DROPPED, False)), 0.0)
    assert (wave.state, wave.done) == (C.ABORTING, False)
    assert wave.handle(from_rank(1, GONE), 0.0) == []
    assert (wave.state, wave.reason, wave.done) == (C.ABORTED, Reason.TRANSFER_TIMEOUT, True)


def test_abort_is_resent_until_answered_with_backoff():
    """R7: Abort is resent until answered."""
    wave = coordinator_in(C.ABORTING)
    wave.handle(from_rank(0, GONE), 0.0)
    times = [
        t
        for t in range(1, 20)
        if any(a.rank == 1 for a in of_kind(wave.handle(msg.Tick(), float(t)), ctl.SendToRank))
    ]
    assert times == [1, 3, 7, 11, 15, 19]


@pytest.mark.parametrize("evidence", [ACK, SWAPPED])
def test_abort_that_lost_to_the_gate_becomes_a_commit(evidence):
    """R7: if that poll passed, the answer is "at the new epoch"."""
    wave = coordinator_in(C.ABORTING)
    actions = wave.handle(from_rank(0, evidence), 0.0)
    assert wave.state is C.COMMITTED
    assert [type(m) for m in sent(actions)] == [msg.Commit, msg.Commit]
    assert wave.peers.pending == (1,)


def test_commit_of_a_wave_a_rank_dropped_aborts_it():
    wave = coordinator_in(C.COMMITTING)
    wave.handle(from_rank(0, GONE), 0.0)
    assert (wave.state, wave.reason) == (C.ABORTING, Reason.WAVE_DROPPED)


def test_a_rank_that_takes_its_yes_back_for_a_reload_aborts_the_wave_with_that_reason():
    """R4; a yes that was sent again changes nothing."""
    wave = coordinator_in(C.COMMITTING)
    assert wave.handle(from_rank(0, YES), 0.0) == []
    assert (wave.state, wave.peers.pending) == (C.COMMITTING, (0, 1))
    reason = Reason.WEIGHTS_VERSION_CHANGED
    actions = wave.handle(from_rank(0, msg.Vote(KEY, False, reason, "a reload")), 0.0)
    assert [type(message) for message in sent(actions)] == [msg.Abort, msg.Abort]
    assert (wave.state, wave.reason, wave.detail) == (C.ABORTING, reason, "rank 0: a reload")
    assert wave.is_dropped, "no rank swaps it"


@pytest.mark.parametrize(
    ("state", "answers", "dropped"),
    [
        (C.COMMITTING, 0, False),
        (C.COMMITTED, 0, False),
        (C.ABORTING, 0, False),
        (C.ABORTING, 1, True),
        (C.ABORTED, 0, True),
    ],
)
def test_a_wave_is_dropped_once_a_rank_has_said_so(state, answers, dropped):
    wave = coordinator_in(state)
    for rank in range(answers):
        wave.handle(from_rank(rank, GONE), 0.0)
    assert wave.is_dropped is dropped


@pytest.mark.parametrize(
    "late", [msg.Vote(KEY, False, Reason.WEIGHTS_VERSION_CHANGED, "a reload"), ACK, GONE]
)
def test_an_answer_to_a_leader_of_before_that_arrives_while_a_wave_is_recovered_is_no_fault(late):
    wave = coordinator_in(C.RECOVERING)
    assert wave.handle(from_rank(0, late), 0.0) == []
    assert (wave.state, wave.peers.pending) == (C.RECOVERING, (0, 1))


def test_dropped_beside_committed_alerts():
    wave = coordinator_in(C.COMMITTED)
    assert only(wave.handle(from_rank(1, GONE), 0.0), ctl.Alert).reason is Reason.EPOCH_DISAGREES
    assert wave.state is C.COMMITTED


def test_prepare_deadline_aborts():
    wave = coordinator_in(C.PREPARING)
    wave.handle(from_rank(0, YES), 1.0)
    assert wave.handle(msg.Tick(), 9.9) != [] and wave.state is C.PREPARING
    wave.handle(msg.Tick(), 10.0)
    assert (wave.state, wave.reason) == (C.ABORTING, Reason.PREPARE_DEADLINE)
    assert "[1]" in wave.detail


def progress(wave, step, now):
    wave.handle(ctl.GroupProgress(step), now)
    return wave.handle(msg.Tick(), now)


def test_gate_deadline_counts_steps_and_seconds():
    """R14: deadlines count steps and seconds."""
    wave = coordinator_in(C.COMMITTING)
    progress(wave, 49, 9.0)
    progress(wave, 49, 12.0)
    assert wave.state is C.COMMITTING, "seconds alone do not end it"
    progress(wave, 50, 12.5)
    assert (wave.state, wave.reason) == (C.ABORTING, Reason.GATE_DEADLINE)


@pytest.mark.parametrize("step", [None, 0])
def test_fleet_without_steps_is_paused_not_stalled(step):
    """R14: no steps on the fleet means `paused`, not stalled."""
    wave = coordinator_in(C.COMMITTING)
    assert tick(wave, TIMING.idle_after_s - 0.01, step) == []
    assert tick(wave, TIMING.idle_after_s, step) == [(False, Reason.NO_STEPS)]
    assert tick(wave, 501.0) == [], "said once"
    assert wave.state is C.COMMITTING
    assert tick(wave, 502.0, 1) == [(False, None)]


DEADLINES = [
    (C.PREPARING, Reason.PREPARE_DEADLINE),
    (C.COMMITTING, Reason.GATE_DEADLINE),
    (C.ABORTING, Reason.ABORT_DEADLINE),
]


def unasked_in(state):
    """Return a coordinator whose question was not sent because a write of its batch failed."""
    wave = Coordinator(key_of(), LEADER, PEERS, TIMING, prepare=prepare_of())
    asked = wave.start(0.0, 0)
    if state is C.COMMITTING:
        asked = [action for rank in (0, 1) for action in wave.handle(from_rank(rank, YES), 0.0)]
    elif state is C.ABORTING:
        asked = wave.handle(ctl.CancelWave(Reason.CANCELLED), 0.0)
    assert wave.state is state
    wave.peers.not_sent(of_kind(asked, ctl.SendToRank))
    return wave


@pytest.mark.parametrize(("state", "reason"), DEADLINES)
def test_question_that_waits_for_the_store_says_so_and_the_ranks_time_begins_when_it_goes_out(
    state, reason
):
    """R14: the group takes steps and no rank was asked: neither `paused` nor a deadline applies."""
    wave = unasked_in(state)
    actions = wave.handle(msg.Tick(), 1.0)
    health = only(actions, ctl.WaveHealth)
    assert (health.stalled, health.reason) == (True, Reason.STORE_UNAVAILABLE)
    for t in range(2, 60):
        wave.peers.not_sent(of_kind(actions, ctl.SendToRank))
        actions = progress(wave, 20 * t, float(t))
        assert of_kind(actions, ctl.WaveHealth) == [], "said once"
        assert len(sent(actions)) == 2, (
            "tried with every tick, so that it goes out once the store is back"
        )
    assert wave.state is state
    assert only(progress(wave, 1200, 60.0), ctl.WaveHealth).reason is None
    progress(wave, 1390, 68.0)
    assert wave.state is state and wave.health is None
    progress(wave, 1600, 70.0)
    assert (wave.state, (wave.health or wave).reason) == (C.ABORTING, reason)


@pytest.mark.parametrize(("state", "reason"), DEADLINES)
def test_ranks_that_were_asked_are_waited_for_also_while_the_store_is_away(state, reason):
    """Only repeats are kept back then: it is their answers that are missing."""
    wave = coordinator_in(state)
    for t in range(1, 10):
        wave.peers.not_sent(of_kind(progress(wave, 20 * t, float(t)), ctl.SendToRank))
        assert wave.state is state and wave.health is None
    progress(wave, 200, 10.0)
    assert (wave.state, (wave.health or wave).reason) == (C.ABORTING, reason)


@pytest.mark.parametrize("state", [C.PREPARING, C.COMMITTING, C.ABORTING])
def test_rank_that_reconnects_is_not_asked_before_what_goes_with_the_question_is_stored(state):
    wave = unasked_in(state)
    assert sent(wave.handle(ctl.RankConnected(EpRank(0), 1, 60), 0.5)) == []
    asked = of_kind(wave.handle(msg.Tick(), 1.0), ctl.SendToRank)
    assert [(action.rank, action.stream) for action in asked] == [(0, 60), (1, 11)]
    again = only(wave.handle(ctl.RankConnected(EpRank(0), 1, 61), 1.5), ctl.SendToRank)
    assert again.stream == 61, "it was asked, and may not have heard"


@pytest.mark.parametrize("state", [C.COMMITTING, C.ABORTING, C.RECOVERING, C.COMMITTED])
def test_unreachable_rank_stalls_and_never_ends_the_wave(state):
    """R14: reported as stalled with the reason; ends only by R12's rule or by a new generation."""
    wave = coordinator_in(state)
    health = only(wave.handle(ctl.RankLost(EpRank(1)), 1.0), ctl.WaveHealth)
    assert (health.stalled, health.reason) == (True, Reason.RANK_LOST)
    for t in range(2, 5000, 7):
        wave.handle(ctl.GroupProgress(t), float(t))
        wave.handle(msg.Tick(), float(t))
    assert wave.state is state and wave.health is not None
    again = wave.handle(ctl.RankConnected(EpRank(1), 1, 60), 5001.0)
    assert only(again, ctl.SendToRank).stream == 60


def test_a_stalled_wave_that_ends_aborted_is_no_longer_reported_as_stalled():
    wave = coordinator_in(C.ABORTING)
    wave.handle(from_rank(0, GONE), 0.0)
    assert only(wave.handle(ctl.RankLost(EpRank(1)), 1.0), ctl.WaveHealth).stalled
    wave.handle(ctl.RankConnected(EpRank(1), 1, 60), 2.0)
    actions = wave.handle(from_rank(1, GONE, stream=60), 2.0)
    assert wave.state is C.ABORTED
    assert only(actions, ctl.WaveHealth) == ctl.WaveHealth(KEY, False, None)


def recover(*states):
    """The two ranks' answers to a new leader."""
    wave = recovering_coordinator()
    actions = []
    for rank, changes in enumerate(states):
        actions = wave.handle(from_rank(rank, state_of(rank, query=5, **changes)), 0.0)
    return wave, actions


HELD: dict[P, dict[str, Any]] = {state: {"state": state, "wave": KEY} for state in P}
AT_NEW_EPOCH = {"epoch": 1, "last_wave": KEY, "last_outcome": WaveOutcome.SWAPPED}
REFUSED = {"last_wave": KEY, "last_outcome": WaveOutcome.REFUSED}
EARLIER = {"last_wave": key_of("before"), "last_outcome": WaveOutcome.SWAPPED}


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (HELD[P.ARMED], AT_NEW_EPOCH, C.COMMITTED),
        (HELD[P.SWAPPING], AT_NEW_EPOCH, C.COMMITTED),
        (AT_NEW_EPOCH, AT_NEW_EPOCH, C.COMMITTED),
        (HELD[P.ARMED], REFUSED, C.ABORTING),
        (HELD[P.ARMED], {}, C.ABORTING),
        (HELD[P.ARMED], HELD[P.ABORTED], C.ABORTING),
        (HELD[P.ARMED], HELD[P.STAGING], C.ABORTING),
        (HELD[P.PREPARED], HELD[P.PREPARED], C.COMMITTING),
        (HELD[P.PREPARED], HELD[P.ARMED], C.COMMITTING),
        (HELD[P.SWAPPING], HELD[P.ARMED], C.COMMITTING),
        (HELD[P.PREPARED] | EARLIER, HELD[P.PREPARED] | EARLIER, C.COMMITTING),
    ],
)
def test_new_leader_rules_by_what_all_ranks_say(first, second, state):
    """R12: one at the new epoch: committed; else one refused or dropped: abort; else commit."""
    for states in ((first, second), (second, first)):
        wave, actions = recover(*states)
        assert wave.state is state
        assert len(of_kind(actions, ctl.SendToRank)) == 2


def test_recovery_waits_for_all_ranks_and_ignores_answers_to_earlier_queries():
    """R12: it asks all ranks."""
    wave = recovering_coordinator()
    wave.handle(from_rank(0, state_of(0, query=5, **HELD[P.PREPARED])), 0.0)
    wave.handle(from_rank(1, state_of(1, query=4)), 0.0)
    assert wave.state is C.RECOVERING
    assert sent(wave.handle(msg.Tick(), 2.0)) == [msg.QueryState(LEADER, query=5)]


LOST, BACK = ctl.RankLost(EpRank(1)), ctl.RankConnected(EpRank(1), 1, 60)


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


@pytest.mark.parametrize("first_step", [0, 100])
def test_a_wave_stalls_after_both_its_seconds_and_its_steps(first_step):
    for seconds, steps, stalls in ((10.0, 49, False), (9.9, 50, False), (10.0, 50, True)):
        wave = Coordinator(KEY, LEADER, PEERS, TIMING, prepare=prepare_of())
        wave.start(0.0, first_step)
        wave.handle(ctl.CancelWave(Reason.CANCELLED), 0.0)
        said = tick(wave, seconds, first_step + steps)
        assert said == ([(True, Reason.ABORT_DEADLINE)] if stalls else [])


def test_a_rank_that_does_not_confirm_its_swap_is_named():
    """All ranks agreed on the step: only the save of the placement can keep the Ack back."""
    health = only(progress(coordinator_in(C.COMMITTED), 50, 10.0), ctl.WaveHealth)
    assert (health.stalled, health.reason) == (True, Reason.GATE_DEADLINE)
    assert health.detail == "the swap is not confirmed by ranks [1] in 10 s"


def test_a_found_wave_needs_no_steps_to_stall():
    """Its ranks answer questions whether or not they take steps."""
    wave = recovering_coordinator()
    assert tick(wave, TIMING.stall_after_s - 0.1) == []
    assert tick(wave, TIMING.stall_after_s) == [(True, Reason.RECOVERY_DEADLINE)]


def test_a_rank_that_swapped_answers_a_commit_like_an_ack():
    """R12: its Ack was lost, and the wave is committed all the same."""
    wave = coordinator_in(C.COMMITTING)
    wave.handle(from_rank(0, SWAPPED), 0.0)
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


def test_a_rank_at_another_map_ends_the_stall_of_a_committed_wave():
    wave = Coordinator(
        KEY, LEADER, PEERS, TIMING, prepare=prepare_of(), placement_digest=ACK.placement_digest
    )
    wave.start(0.0, 0)
    for rank in (0, 1):
        wave.handle(from_rank(rank, YES), 0.0)
    wave.handle(from_rank(0, ACK), 0.0)
    assert only(wave.handle(LOST, 1.0), ctl.WaveHealth).stalled
    actions = wave.handle(from_rank(1, msg.Ack(KEY, Epoch(1), "other")), 2.0)
    assert only(actions, ctl.Alert) and only(actions, ctl.WaveHealth).reason is None
    assert (wave.state, wave.done) == (C.COMMITTED, True)


def test_a_rank_at_another_map_still_has_to_answer_abort():
    wave = coordinator_in(C.ABORTING)
    wave.handle(from_rank(0, msg.Ack(KEY, Epoch(2), "digest")), 0.0)
    assert (wave.state, wave.peers.pending, wave.is_dropped) == (C.ABORTING, (0, 1), False)


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
        assert (wave.reason is Reason.RANK_LOST) is (after is C.ABORTING)
        assert [action.stream for action in asked if action.rank == 1] == [60]


def test_a_rank_that_has_answered_is_not_asked_again_when_it_reconnects():
    wave = coordinator_in(C.PREPARING)
    wave.handle(from_rank(1, YES), 0.0)
    assert sent(wave.handle(BACK, 1.0)) == []


def test_a_rank_outside_the_wave_is_not_heard():
    wave = coordinator_in(C.PREPARING)
    assert wave.handle(from_rank(5, YES), 0.0) == []


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
    wave.handle(from_rank(0, GONE), 0.2)
    assert not wave.peers.is_unsent(), "it has answered"
