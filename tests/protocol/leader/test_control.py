"""One replica's work for one deployment: leading, recovering, planning, migrating."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.messages import WaveOutcome
from evenkeel_moe.protocol.terms import MAX_TERM, MAX_TERM_RISE, is_credible_term
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    CONTROL_TIMING,
    DEPLOYMENT,
    LEADER,
    Operator,
    ack,
    after_wave,
    answer_queries,
    both,
    come,
    control_of,
    find_armed,
    from_rank,
    group_leaves,
    hello_of,
    identity_of,
    key_of,
    of_kind,
    only,
    phase_and_reason,
    plan_of,
    prepares,
    progress,
    queries,
    query_of,
    record,
    restarts,
    state_of,
    stored_plan,
    vote,
    wave_state,
)

# --- leading and recovering -----------------------------------------------------------------------


def test_leader_asks_all_ranks_before_it_plans():
    """R15: no plan before all R ranks of the generation answered."""
    control = control_of(S.RECOVERING)
    control.handle(from_rank(0, state_of(0, query=1)), 0.0)
    assert (control.state, control.epoch) == (S.RECOVERING, None)
    with pytest.raises(Unavailable) as caught:
        Operator(control).submit(plan_of(), 0.0)
    assert caught.value.reason is Reason.RECOVERING
    actions = control.handle(from_rank(1, state_of(1, query=1)), 0.0)
    assert control.state is S.READY and control.placement == BASE
    assert only(actions, ctl.PersistEpoch).placement == BASE


def test_records_follow_the_ranks_not_the_store():
    """R12, R15: stored epochs above the ranks' epoch belong to an earlier generation."""
    stored = ctl.StoredRecords(epochs={Epoch(0): BASE, Epoch(1): AFTER_ONE, Epoch(7): AFTER_TWO})
    control = control_of(S.RECOVERING, stored)
    actions = answer_queries(control, epoch=1, placement=AFTER_ONE)
    assert only(actions, ctl.PersistEpoch).epoch == 1
    assert control.history == {0: BASE, 1: AFTER_ONE}


def test_rank_that_knows_a_higher_term_makes_the_leader_step_down_and_rise_above_it():
    """R2: a leader takes max(store, ranks) + 1."""
    refused = msg.TermRefused(identity_of(0), msg.Leader("b", 9))
    control = control_of()
    assert only(control.handle(from_rank(0, refused), 0.0), ctl.RaiseTerm).at_least == 9
    assert control.state is S.FOLLOWER
    control = control_of(S.WAITING_FOR_RANKS)
    actions = control.handle(from_rank(0, hello_of(0, highest_term=4)), 0.0)
    assert only(actions, ctl.RaiseTerm).at_least == 4


@pytest.mark.parametrize("term", [MAX_TERM, MAX_TERM - 1, LEADER.term + MAX_TERM_RISE + 1])
def test_rank_that_names_an_incredible_term_is_refused_and_changes_nothing(term):
    """R2: above such a term no rank would accept any leader."""
    control = control_of()
    hello = hello_of(0, incarnation=9, highest_term=term)
    actions = control.handle(from_rank(0, hello, 9, stream=40), 0.0)
    closed = only(actions, ctl.CloseStream)
    assert (closed.stream, closed.reason) == (40, Reason.LIMIT_EXCEEDED)
    refused = msg.TermRefused(identity_of(1), msg.Leader("b", term))
    closed = only(control.handle(from_rank(1, refused), 0.0), ctl.CloseStream)
    assert (closed.stream, closed.reason) == (11, Reason.LIMIT_EXCEEDED)
    assert (control.state, control.leader) == (S.READY, LEADER)
    assert control.membership.members[EpRank(0)].stream == 10, "the honest rank keeps its seat"


def test_term_bound_to_another_leader_is_refused_and_an_old_refusal_is_not_heard():
    """R2: a rank binds a term to the first leader id that used it."""
    control = control_of()
    old = msg.TermRefused(identity_of(0), msg.Leader("b", 0))
    assert control.handle(from_rank(0, old), 0.0) == [] and control.state is S.READY
    same = msg.TermRefused(identity_of(0), msg.Leader("b", LEADER.term))
    assert only(control.handle(from_rank(0, same), 0.0), ctl.RaiseTerm)


@pytest.mark.parametrize(
    "late",
    [
        msg.Vote(key_of(), True),
        msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest),
        msg.AbortAnswer(key_of(), Epoch(0), WaveOutcome.DROPPED, True),
    ],
)
def test_a_late_answer_to_the_leader_before_is_no_fault_of_the_rank(late):
    """Its stream has stayed open, and the new leader waits for the other ranks."""
    control = control_of(S.WAITING_FOR_RANKS)
    control.handle(from_rank(0, hello_of(0)), 0.0)
    assert control.handle(from_rank(0, late), 0.1) == []


def test_lost_lease_drops_the_machine_in_any_state():
    """R13: in any state: stop sending and drop the machine."""
    for state in (S.WAITING_FOR_RANKS, S.RECOVERING, S.READY, S.MIGRATING):
        control = control_of(state)
        assert control.handle(ctl.LeaseLost(), 0.0) == []
        assert (control.state, control.coordinator, control.records.active) == (
            S.FOLLOWER,
            None,
            None,
        )
        assert control.handle(msg.Tick(), 99.0) == []
        assert (
            only(control.handle(from_rank(0, hello_of(0)), 99.0), ctl.CloseStream).reason
            is Reason.NOT_LEADER
        )


def test_new_generation_ends_the_plans_of_the_old_one_and_nothing_is_known_of_its_map():
    """R1: old plans end as GENERATION_CHANGED. R15: the ranks are asked where they stand."""
    control = control_of(S.MIGRATING)
    group_leaves(control)
    come(control, 0)
    assert (control.state, control.epoch) == (S.MIGRATING, 0)
    come(control, 1)
    assert (control.state, control.coordinator) == (S.RECOVERING, None)
    assert (control.epoch, control.placement) == (None, None)
    assert phase_and_reason(control) == (PlanPhase.ABORTED, Reason.GENERATION_CHANGED)


def test_plan_whose_last_wave_is_committed_ends_as_such_when_the_group_restarts():
    control = control_of(S.MIGRATING)
    for index, after in enumerate((AFTER_ONE, AFTER_TWO)):
        vote(control, index)
        control.handle(
            from_rank(0, msg.Ack(key_of(index=index), Epoch(index + 1), after.digest)), 0.0
        )
        if index == 0:
            control.handle(from_rank(1, msg.Ack(key_of(index=index), Epoch(1), after.digest)), 0.0)
    assert control.state is S.MIGRATING, "one rank has not acked"
    restarts(control)
    assert progress(control) == (PlanPhase.COMMITTED, 2)


@pytest.mark.parametrize(
    ("waves", "reached", "phase", "counted"),
    [
        (2, [(1, AFTER_ONE), (1, AFTER_ONE)], PlanPhase.ABORTED, 1),
        (1, [(1, AFTER_ONE), (1, AFTER_ONE)], PlanPhase.COMMITTED, 1),
        (2, [(0, BASE), (0, BASE)], PlanPhase.ABORTED, 0),
        (2, [(0, BASE), (1, AFTER_ONE)], PlanPhase.ABORTED, 0),
        (2, [(1, AFTER_ONE), (0, BASE)], PlanPhase.ABORTED, 0),
        (2, [(1, AFTER_TWO), (1, AFTER_TWO)], PlanPhase.ABORTED, 0),
        (2, [(9, AFTER_ONE), (9, AFTER_ONE)], PlanPhase.ABORTED, 0),
    ],
)
def test_wave_that_nobody_acked_counts_if_the_whole_group_comes_back_where_it_leads(
    waves, reached, phase, counted
):
    """R12: the ranks are the truth, also those of the next generation."""
    control = control_of()
    Operator(control).submit(plan_of(waves), 0.0, approve=True)
    vote(control)
    ended = of_kind(restarts(control, *reached), ctl.WaveEnded)
    assert ended == [ctl.WaveEnded(key_of(), True, Reason.COMMITTED)] * counted
    assert progress(control) == (phase, counted)


@pytest.mark.parametrize(("voted", "dropped"), [((0,), ()), ((0, 1), (0,)), ((0, 1), (0, 1))])
def test_wave_without_the_agreement_of_all_or_that_a_rank_dropped_is_not_counted(voted, dropped):
    """Another group of the same name may have come where it leads by a plan of its own."""
    control = control_of(S.MIGRATING)
    for rank in voted:
        control.handle(from_rank(rank, msg.Vote(key_of(), True)), 0.5)
    for rank in dropped:
        answer = msg.AbortAnswer(key_of(), Epoch(0), WaveOutcome.DROPPED, True)
        control.handle(from_rank(rank, answer), 0.6)
    restarts(control, (1, AFTER_ONE), (1, AFTER_ONE))
    assert progress(control) == (PlanPhase.ABORTED, 0)


def test_proposal_that_leads_where_another_plan_led_is_not_counted():
    control = control_of()
    Operator(control).submit(plan_of(2, "same"), 0.0)
    Operator(control).submit(plan_of(2), 0.0, approve=True)
    vote(control)
    restarts(control, (1, AFTER_ONE), (1, AFTER_ONE))
    assert [record(control, name).waves_committed for name in ("p", "same")] == [1, 0]


@pytest.mark.parametrize(
    ("state", "asked"), [(S.READY, [1, 2.5, 4]), (S.MIGRATING, [1, 2, 3, 4, 5])]
)
def test_ranks_are_asked_more_rarely_at_rest(state, asked):
    """The rig's heartbeat is a second, its lease three."""
    control = control_of(state)
    when = []
    for now in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0):
        if queries(control.handle(msg.Tick(), now)):
            when.append(now)
        for rank in range(3):
            control.handle(from_rank(rank, state_of(rank, query=0)), now)
    assert control.state is state
    assert when == asked


def test_a_plan_that_begins_is_asked_about_at_once_when_the_last_question_is_a_heartbeat_old():
    control = control_of(S.READY)
    control.handle(msg.Tick(), 1.0)
    assert not control.handle(msg.Tick(), 2.25)
    control.state = S.MIGRATING
    assert len(queries(control.handle(msg.Tick(), 2.25))) == 2


@pytest.mark.parametrize(
    ("heartbeat_s", "lease_s", "at_rest_s"),
    [(2.5, 10, 5), (2.5, 60, 5), (1, 3, 1.5), (0.2, 0.6, 0.3)],
)
def test_two_questions_at_rest_fit_into_a_lease(heartbeat_s, lease_s, at_rest_s):
    timing = ControlTiming(heartbeat_s=heartbeat_s, rank_lease_s=lease_s)
    assert timing.question_s(at_rest=True) == pytest.approx(at_rest_s)
    assert timing.question_s(at_rest=False) == heartbeat_s


def test_found_wave_is_ended_before_anything_else():
    """R12."""
    control = control_of(S.RECOVERING)
    find_armed(control)
    assert wave_state(control) is C.COMMITTING
    ack(control, AFTER_ONE, 1)
    assert control.coordinator is not None
    assert (control.coordinator.done, control.state) == (True, S.RECOVERING)
    actions = answer_queries(control, epoch=1, placement=AFTER_ONE)
    assert control.state is S.READY and only(actions, ctl.PersistEpoch).epoch == 1


def test_a_late_answer_to_an_earlier_round_does_not_count():
    """R12: it tells of a time before the round, and the group may have moved on since."""
    control = control_of(S.RECOVERING)
    old = from_rank(0, state_of(0, query=query_of(control)))
    control.handle(old, 0.0)
    at_one: dict[str, Any] = {"epoch": 1, "placement": AFTER_ONE}
    control.handle(from_rank(1, state_of(1, query=query_of(control), **at_one)), 0.0)
    control.handle(msg.Tick(), CONTROL_TIMING.ask_again_s)
    control.handle(from_rank(1, state_of(1, query=query_of(control), **at_one)), 2.0)
    control.handle(old, 2.0)
    assert control.as_leader.recovery.round is not None
    assert (control.state, control.as_leader.recovery.round.missing) == (S.RECOVERING, (0,))
    control.handle(from_rank(0, state_of(0, query=query_of(control), **at_one)), 2.0)
    assert (control.state, control.epoch) == (S.READY, 1)


def test_new_leader_keeps_a_freeze():
    control = control_of(S.READY, ctl.StoredRecords(frozen_until=100.0))
    assert control.frozen_until == 100.0
    assert only(control.handle(msg.Tick(), 30.0), ctl.RunCycle).closed_by is Reason.FROZEN
    control = control_of(S.READY, ctl.StoredRecords(frozen_until=100.0))
    assert only(control.handle(msg.Tick(), 100.0), ctl.RunCycle).closed_by is not Reason.FROZEN


def test_new_leader_goes_on_with_a_plan_that_the_ranks_are_in_the_middle_of():
    control = control_of(S.RECOVERING, stored_plan())
    actions = answer_queries(control, **after_wave(0))
    assert control.state is S.MIGRATING and record(control).waves_committed == 1
    assert {m.wave for m in prepares(actions)} == {key_of(index=1)}


def found_and_acked(stored):
    """A new leader found wave 0 armed on the ranks, ended it, and has not heard them again."""
    control = control_of(S.RECOVERING, stored)
    find_armed(control)
    return control, ack(control, AFTER_ONE, 1)


def test_wave_found_and_committed_is_counted_though_the_group_restarts_before_it_is_asked_again():
    control, actions = found_and_acked(stored_plan())
    assert only(actions, ctl.PersistPlan).record.waves_committed == 1
    assert only(actions, ctl.WaveEnded).newly_counted
    restarts(control, (1, BASE), (1, BASE))
    assert progress(control) == (PlanPhase.ABORTED, 1)
    assert record(control).reason is Reason.GENERATION_CHANGED


def test_found_wave_of_another_life_of_the_plan_id_is_not_counted():
    stored = stored_plan()
    moved = dataclasses.replace(stored.plans[0].plan, base_epoch=Epoch(7))
    control, actions = found_and_acked(stored_plan(plan=moved))
    assert record(control).waves_committed == 0
    assert not only(actions, ctl.WaveEnded).newly_counted


@pytest.mark.parametrize(
    ("state", "heard", "reason"),
    [
        (S.WAITING_FOR_RANKS, (0,), Reason.RANKS_MISSING),
        (S.RECOVERING, (0,), Reason.RANKS_MISSING),
        (S.RECOVERING, (0, 1), Reason.RECOVERY_DEADLINE),
    ],
)
def test_plan_that_a_new_leader_cannot_go_on_with_says_why(state, heard, reason):
    """R14: a rank that never comes back, that goes away, that hears no question."""
    control = control_of(state, stored_plan())
    for t in range(1, 15):
        for rank in heard:
            control.handle(from_rank(rank, hello_of(rank)), float(t))
            control.handle(ctl.RankHeard(rank, 1, 10 + rank), float(t))
        said = of_kind(control.handle(msg.Tick(), float(t)), ctl.WaveHealth)
        assert [health.reason for health in said] == ([reason] if t == 11 else [])
    assert (control.state, *phase_and_reason(control)) == (state, PlanPhase.STALLED, reason)
    if state is S.WAITING_FOR_RANKS:
        control.handle(from_rank(1, hello_of(1)), 15.0)
    answer_queries(control, 15.0)
    assert (control.state, record(control).phase) == (S.MIGRATING, PlanPhase.MIGRATING)


def test_found_wave_that_stalls_is_what_its_plan_says():
    """R14, and it runs again when the rank is back."""
    held: dict[str, Any] = {"state": msg.ParticipantState.PREPARED, "wave": key_of()}
    control = control_of(S.RECOVERING, stored_plan())
    both(control, lambda rank: state_of(rank, query=1, **held))
    for t in range(1, 6):
        control.handle(from_rank(0, state_of(0, query=2, **held)), float(t))
        control.handle(msg.Tick(), float(t))
    assert wave_state(control) is C.RECOVERING
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.RANK_LOST)
    for t in range(6, 16):
        control.handle(from_rank(0, state_of(0, query=2, **held)), float(t))
        assert not of_kind(control.handle(msg.Tick(), float(t)), ctl.WaveHealth), "said once"
    control.handle(from_rank(1, state_of(1, query=2, **held)), 16.0)
    assert wave_state(control) is C.COMMITTING
    assert record(control).phase is PlanPhase.MIGRATING


def test_plan_that_waited_for_ranks_goes_on_with_its_found_wave():
    held: dict[str, Any] = {"state": msg.ParticipantState.PREPARED, "wave": key_of()}
    stalled = stored_plan(phase=PlanPhase.STALLED, reason=Reason.RANKS_MISSING)
    control = control_of(S.RECOVERING, stalled)
    both(control, lambda rank: state_of(rank, query=1, **held))
    assert record(control).phase is PlanPhase.MIGRATING


def test_new_leader_ends_a_plan_that_the_ranks_completed():
    control = control_of(S.RECOVERING, stored_plan())
    answer_queries(control, **after_wave(1))
    assert (control.state, *progress(control)) == (S.READY, PlanPhase.COMMITTED, 2)


def test_new_leader_honours_a_cancel_its_predecessor_took():
    control = control_of(S.MIGRATING)
    vote(control)
    Operator(control).cancel(PlanId("p"), "me", 0.0)
    stored = ctl.StoredRecords(plans=(record(control),))
    control = control_of(S.RECOVERING, stored)
    answer_queries(control, **after_wave(0))
    assert record(control).phase is PlanPhase.CANCELLED


def test_every_state_has_a_reason():
    migrating = control_of(S.MIGRATING)
    for control, reason, detail in (
        (control_of(S.FOLLOWER), Reason.NOT_LEADER, "another replica leads, or none yet"),
        (control_of(S.RECOVERING), Reason.RECOVERING, "asking all ranks where they stand"),
        (control_of(S.WAITING_FOR_RANKS), Reason.RANKS_MISSING, "0 ranks said hello so far"),
        (control_of(S.READY), Reason.RECOVERED, "all 2 ranks"),
        (migrating, Reason.PLAN_STARTED, "plan p is migrating"),
    ):
        assert control.state_reason(0.0) == (reason, detail)
    assert migrating.records.active is record(migrating)


def test_without_a_policy_it_uses_the_default():
    assert DeploymentControl(DEPLOYMENT).policy == DeploymentPolicy()


def test_a_follower_knows_of_no_plan_hold_or_freeze():
    follower = control_of(S.FOLLOWER)
    assert (follower.records.active, follower.held, follower.frozen_until) == (None, False, 0.0)


@pytest.mark.parametrize(
    ("term", "known", "credible"),
    [
        (5 + MAX_TERM_RISE, 5, True),
        (6 + MAX_TERM_RISE, 5, False),
        (MAX_TERM - 1, MAX_TERM - 2, True),
        (MAX_TERM, MAX_TERM - 1, False),
    ],
)
def test_a_term_may_rise_by_so_much_and_only_so_far(term, known, credible):
    assert is_credible_term(term, known) is credible
