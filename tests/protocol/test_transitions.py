"""Every (state, event) pair of every machine, walked: what the table says is what happens."""

import contextlib

import pytest

from deploy.machines_page import CONTROL_MOVES, COORDINATOR_MOVES, PARTICIPANT_MOVES
from evenkeel_moe.errors import Conflict, IllegalEvent, NotFound, Reason, Unavailable
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.hold import Retirement
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.messages import ParticipantState as P
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.transitions import (
    CONTROL,
    COORDINATOR,
    IGNORED,
    ILLEGAL,
    NOT_READY,
    PARTICIPANT,
    PARTICIPANT_OTHER_WAVE,
    VIOLATION,
    ControlState,
    CoordinatorState,
)
from tests.protocol.machines import (
    BASE,
    LEADER,
    control_of,
    coordinator_in,
    from_controller,
    from_rank,
    hello_of,
    key_of,
    participant_in,
    plan_of,
    prepare_of,
    state_of,
    wave_of,
)

KEY = key_of()
DIGEST = BASE.with_rows((0,), wave_of().rows).digest

REMOTE_TO_RANK = {
    msg.Prepare: prepare_of(),
    msg.Commit: msg.Commit(LEADER, KEY),
    msg.Abort: msg.Abort(LEADER, KEY),
    msg.QueryState: msg.QueryState(LEADER),
}
LOCAL_TO_RANK = {
    msg.StagingFinished: msg.StagingFinished(KEY),
    msg.StagingFailed: msg.StagingFailed(KEY, Reason.TRANSFER_FAILED),
    msg.TransportDrained: msg.TransportDrained(KEY),
    msg.PollPassed: msg.PollPassed(Epoch(1)),
    msg.PollNotPassed: msg.PollNotPassed(),
    msg.PollDropped: msg.PollDropped(),
    msg.SwapFinished: msg.SwapFinished(KEY, DIGEST),
    msg.SwapFailed: msg.SwapFailed(KEY, "half way"),
    msg.ReloadRequested: msg.ReloadRequested(),
    msg.WeightsReloaded: msg.WeightsReloaded(2),
    msg.EngineRebalanced: msg.EngineRebalanced(BASE.with_rows((0,), wave_of().rows)),
}


UNDER_A_POLL = {
    (P.ARMED, kind)
    for kind in (msg.Abort, msg.ReloadRequested, msg.WeightsReloaded, msg.PollNotPassed)
}
"""Pairs whose effect waits for the poll in flight (R4, R7); other tests name them."""


@pytest.mark.parametrize(("state", "kind"), sorted(PARTICIPANT, key=str))
def test_participant(state, kind):
    rank = participant_in(state, polled=True)
    if state is not P.SWAPPING:
        rank.snapshot(99.0)
    event = from_controller(REMOTE_TO_RANK[kind]) if kind in REMOTE_TO_RANK else LOCAL_TO_RANK[kind]
    cell = PARTICIPANT[state, kind]
    if cell is ILLEGAL:
        with pytest.raises(IllegalEvent):
            rank.handle(event, 99.0)
        assert rank.state is state
        return
    actions = rank.handle(event, 99.0)
    if (state, kind) in UNDER_A_POLL:
        assert rank.state is state
    else:
        assert rank.state in PARTICIPANT_MOVES[state].get(kind, (state,))
    assert (rank.held is None) == (rank.state is P.IDLE)
    if cell is IGNORED:
        assert actions == []


def test_participant_tables_are_complete():
    """All states times all events a participant is ever given."""
    events = REMOTE_TO_RANK.keys() | LOCAL_TO_RANK.keys()
    assert PARTICIPANT.keys() == {(state, event) for state in P for event in events}
    about_a_wave = {
        event
        for event in events
        if hasattr(event, "wave") or "wave" in getattr(event, "__slots__", ())
    }
    assert PARTICIPANT_OTHER_WAVE.keys() == about_a_wave - {msg.SwapFinished, msg.SwapFailed}


C = CoordinatorState
TO_COORDINATOR = {
    msg.Vote: from_rank(0, msg.Vote(KEY, False, Reason.TRANSFER_FAILED)),
    msg.Ack: from_rank(1, msg.Ack(KEY, Epoch(1), DIGEST)),
    msg.AbortAnswer: from_rank(0, msg.AbortAnswer(KEY, Epoch(0), msg.WaveOutcome.DROPPED, True)),
    msg.RankState: from_rank(0, state_of(0, query=9)),
    ctl.RankConnected: ctl.RankConnected(EpRank(0), 1, 20),
    ctl.RankLost: ctl.RankLost(EpRank(0)),
    ctl.GroupProgress: ctl.GroupProgress(5),
    ctl.CancelWave: ctl.CancelWave(Reason.CANCELLED),
    msg.Tick: msg.Tick(),
}
NEEDS_ALL_RANKS = {
    (C.PREPARING, ctl.RankConnected),
    (C.PREPARING, msg.Tick),
    (C.COMMITTING, msg.Tick),
} | {
    (C.ABORTING, msg.AbortAnswer),
    (C.RECOVERING, msg.RankState),
}
"""Moves that one event alone does not bring about; tested by name."""


@pytest.mark.parametrize(("state", "kind"), sorted(COORDINATOR, key=str))
def test_coordinator(state, kind):
    wave, event, cell = coordinator_in(state), TO_COORDINATOR[kind], COORDINATOR[state, kind]
    if cell is ILLEGAL:
        with pytest.raises(IllegalEvent):
            wave.handle(event, 1.0)
        assert wave.state is state
        return
    actions = wave.handle(event, 1.0)
    if (state, kind) in NEEDS_ALL_RANKS:
        assert wave.state is state
    else:
        assert wave.state in COORDINATOR_MOVES[state].get(kind, (state,))
    if cell is IGNORED:
        assert actions == []
    if cell is VIOLATION:
        (alert,) = actions
        assert isinstance(alert, ctl.Alert) and alert.reason is Reason.MALFORMED


@pytest.mark.parametrize("state", C)
def test_acks_of_another_epoch_move_a_coordinator_as_the_page_says(state):
    wave = coordinator_in(state)
    for rank in (0, 1):
        before = wave.state
        wave.handle(from_rank(rank, msg.Ack(KEY, Epoch(2), DIGEST)), 1.0)
        assert wave.state in (before, *COORDINATOR_MOVES[before].get(msg.Ack, ()))


S = ControlState
TO_CONTROL = {
    ctl.LeaseAcquired: ctl.LeaseAcquired(LEADER),
    ctl.LeaseLost: ctl.LeaseLost(),
    msg.Hello: from_rank(0, hello_of(0), stream=30),
    msg.Vote: from_rank(0, msg.Vote(KEY, True)),
    msg.Ack: from_rank(0, msg.Ack(KEY, Epoch(1), DIGEST)),
    msg.AbortAnswer: from_rank(0, msg.AbortAnswer(KEY, Epoch(0), msg.WaveOutcome.DROPPED, True)),
    msg.RankState: from_rank(0, state_of(0)),
    msg.TermRefused: from_rank(0, msg.TermRefused(hello_of(0).identity, msg.Leader("b", 4))),
    msg.StagingProgress: from_rank(0, msg.StagingProgress(KEY, 1, 2)),
    msg.MovedAnswers: from_rank(0, msg.MovedAnswers(KEY, 1, 1, 0, 0)),
    ctl.RankHeard: ctl.RankHeard(EpRank(0), 1, 10),
    ctl.RankTroubled: ctl.RankTroubled(EpRank(0), 10, "no more waves"),
    ctl.RankStopped: ctl.RankStopped(EpRank(0), 10),
    ctl.StreamClosed: ctl.StreamClosed(EpRank(0), 10),
    ctl.CycleDecided: ctl.CycleDecided(1, Reason.NO_CHANGE),
    ctl.PlanMeasured: ctl.PlanMeasured(PlanId("none"), DeliveredGain(1.0, unknown_because="why")),
    ctl.PersistFailed: ctl.PersistFailed((ctl.PersistDecision({"reason": "x"}),)),
    ctl.PlanSubmitted: ctl.PlanSubmitted(plan_of(plan_id="q")),
    ctl.RequestRepeated: ctl.RequestRepeated(PlanId("q"), "digest"),
    ctl.PlanApproved: ctl.PlanApproved(PlanId("p"), "me"),
    ctl.PlanCancelled: ctl.PlanCancelled(PlanId("p"), "me"),
    ctl.RanksRetired: ctl.RanksRetired(Retirement((EpRank(1),), 2), BASE, None),
    ctl.PolicySet: ctl.PolicySet(DeploymentPolicy(), {}),
    ctl.PlansFrozen: ctl.PlansFrozen(60.0),
    ctl.AutomaticPlansResumed: ctl.AutomaticPlansResumed(),
    ctl.ClockStepped: ctl.ClockStepped(5.0),
    msg.Tick: msg.Tick(),
}


@pytest.mark.parametrize(("state", "kind"), sorted(CONTROL, key=str))
def test_control(state, kind):
    control, event, cell = control_of(state), TO_CONTROL[kind], CONTROL[state, kind]
    if state is S.WAITING_FOR_RANKS and kind not in (msg.Hello, ctl.LeaseLost):
        control.handle(from_rank(0, hello_of(0)), 0.0)
    if cell is ILLEGAL:
        with pytest.raises(IllegalEvent):
            control.handle(event, 0.5)
        assert control.state is state
        return
    if cell is NOT_READY:
        with pytest.raises(Unavailable):
            control.handle(event, 0.5)
        assert control.state is state
        return
    actions = []
    with contextlib.suppress(NotFound, Conflict):  # There is no such plan, or it has been approved.
        actions = control.handle(event, 0.5)
    assert control.state in (state, *CONTROL_MOVES[state].get(kind, ()))
    if cell is IGNORED:
        assert actions == []


@pytest.mark.parametrize(
    ("table", "states", "machine"),
    [(PARTICIPANT, P, Participant), (COORDINATOR, C, Coordinator), (CONTROL, S, DeploymentControl)],
)
def test_tables_have_every_pair_and_only_methods_that_exist(table, states, machine):
    events = {kind for _, kind in table}
    assert table.keys() == {(state, kind) for state in states for kind in events}
    verdicts = {IGNORED, ILLEGAL, VIOLATION, NOT_READY}
    assert [
        cell for cell in table.values() if cell not in verdicts and not hasattr(machine, cell)
    ] == []


@pytest.mark.parametrize(
    ("table", "moves"),
    [(PARTICIPANT, PARTICIPANT_MOVES), (COORDINATOR, COORDINATOR_MOVES), (CONTROL, CONTROL_MOVES)],
)
def test_only_pairs_that_do_something_move(table, moves):
    verdicts = {IGNORED, ILLEGAL, VIOLATION, NOT_READY}
    assert moves.keys() == {state for state, _ in table}
    for state, events in moves.items():
        for event, targets in events.items():
            assert table[state, event] not in verdicts and state not in targets
