"""Events of the leader's machine that come from telemetry, operators, clocks and the store."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import InvalidInput, Reason, Unavailable
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.hold import Hold, Retirement
from evenkeel_moe.model.ids import Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.leader.undelivered import has_delivered, undelivered_in_a_row
from evenkeel_moe.protocol.leader.write_retry import WriteRetry
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    GENERATION,
    LEADER,
    Operator,
    abort_answers,
    ack,
    answer_queries,
    both,
    carry_out,
    come,
    control_of,
    from_rank,
    group_leaves,
    hello_of,
    identity_of,
    key_of,
    of_kind,
    only,
    phase_and_reason,
    plan_of,
    planning_loop_of,
    prepares,
    query_of,
    record,
    restarts,
    sent,
    state_in,
    state_of,
    vote,
    wave_of,
)


def test_a_group_that_stops_as_planned_is_not_ready_and_not_lost():
    control = control_of()
    assert control.shown_state(0.0) == "ready"
    assert control.handle(ctl.RankStopped(EpRank(0), 10), 0.0) == []
    reason, detail = control.state_reason(0.0)
    assert (control.shown_state(0.0), reason) == ("waiting_for_ranks", Reason.RANKS_MISSING)
    assert detail == "ranks [0] stopped as planned"
    control.handle(ctl.RankStopped(EpRank(1), 11), 0.0)
    assert control.state_reason(0.0)[0] is Reason.GROUP_STOPPED
    control.handle(msg.Tick(), 0.1)
    assert control.shown_state(0.1) == "waiting_for_ranks"


def test_a_plan_is_measured_once_and_only_if_it_was_carried_out():
    control, gained = control_of(), DeliveredGain(9.0, unknown_because="no rank reports seconds")
    plan = plan_of()
    control.records.add(plan, PlanPhase.ABORTED, Reason.RANK_LOST, 0.0)
    event = ctl.PlanMeasured(plan.plan_id, gained)
    assert control.handle(event, 1.0) == []
    control.records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, 0.0)
    (write,) = control.handle(event, 1.0)
    assert isinstance(write, ctl.PersistPlan)
    assert write.record.delivered is gained
    assert control.handle(event, 2.0) == []


def test_policy_is_used_and_stored():
    control, policy = control_of(), DeploymentPolicy(mode=Mode.OBSERVE)
    (write,) = Operator(control).set_policy(policy, {"mode": "observe"}, 0.0)
    assert write == ctl.PersistDocument("policy", {"mode": "observe"})
    assert control.policy is planning_loop_of(control).policy is policy
    with pytest.raises(Unavailable):
        Operator(control_of(S.FOLLOWER)).set_policy(policy, {}, 0.0)


def test_a_new_leader_uses_the_stored_policy_and_records_what_the_store_lost():
    control, policy = control_of(S.FOLLOWER), DeploymentPolicy(mode=Mode.OBSERVE)
    stored = ctl.StoredRecords(policy=policy, loss={"reason": "recovered"})
    (write,) = control.handle(ctl.LeaseAcquired(LEADER, stored), 0.0)
    assert write == ctl.PersistDecision({"reason": "recovered"})
    assert control.policy is planning_loop_of(control).policy is policy


@pytest.mark.parametrize(
    ("difference", "state"),
    [
        ({}, S.READY),
        ({"epoch": 1}, S.RECOVERING),
        ({"placement_digest": AFTER_ONE.digest}, S.RECOVERING),
        ({"wave": key_of("q"), "state": msg.ParticipantState.PREPARED}, S.RECOVERING),
        ({"weights_version": 2}, S.RECOVERING),
    ],
)
def test_any_difference_from_the_records_makes_the_leader_query_all_ranks(difference, state):
    control = control_of()
    control.handle(msg.Tick(), 1.0)
    answer = state_of(0, query=query_of(control))
    control.handle(from_rank(0, dataclasses.replace(answer, **difference)), 1.0)
    assert control.state is state


def test_an_answer_from_before_the_end_of_the_last_wave_is_no_difference():
    """It tells the map from before the wave."""
    control = control_of(S.READY)
    Operator(control).submit(plan_of(1), 0.0, approve=True)
    control.handle(msg.Tick(), 1.0)
    asked_before = query_of(control)
    carry_out(control, 1)
    assert (control.state, control.epoch) == (S.READY, 1)
    control.handle(from_rank(0, state_of(0, query=asked_before)), 1.0)
    assert state_in(control) is S.READY
    control.handle(msg.Tick(), 2.5)
    assert query_of(control) == asked_before + 1
    control.handle(from_rank(0, state_of(0, query=query_of(control))), 2.5)
    assert state_in(control) is S.RECOVERING


def test_a_rank_that_dropped_a_committed_wave_raises_an_alert_after_its_end_too():
    control = control_of()
    Operator(control).submit(plan_of(1), 0.0, approve=True)
    carry_out(control, 1)
    dropped = msg.AbortAnswer(key_of(), Epoch(0), msg.WaveOutcome.DROPPED, True)
    alert = only(control.handle(from_rank(1, dropped), 0.0), ctl.Alert)
    assert alert.reason is Reason.EPOCH_DISAGREES


def test_no_plan_begins_between_a_reload_and_the_answers_of_all_ranks():
    """R4: its wave would be for the old weights."""
    control = control_of(S.MIGRATING)
    reloaded: dict[str, Any] = {"weights_version": 2}
    both(control, lambda rank: state_of(rank, **reloaded))
    assert state_in(control) is S.MIGRATING
    abort_answers(control)
    assert record(control).reason is Reason.WEIGHTS_VERSION_CHANGED
    _, actions = Operator(control).submit(plan_of(1, "next"), 0.0, approve=True)
    assert not prepares(actions)
    both(control, lambda rank: state_of(rank, **reloaded))
    assert state_in(control) is S.RECOVERING


def test_a_freeze_stops_neither_a_rollback_nor_a_plan_that_has_begun():
    control = control_of(S.MIGRATING)
    Operator(control).freeze(1000.0, 0.0)
    vote(control)
    actions = ack(control, AFTER_ONE, 1)
    assert {m.wave for m in prepares(actions)} == {key_of(index=1)}
    control = control_of()
    Operator(control).freeze(1000.0, 0.0)
    rollback = plan_of(1, kind=PlanKind.ROLLBACK)
    _, actions = Operator(control).submit(rollback, 0.0, approve=True)
    assert len(prepares(actions)) == 2
    assert only(control.handle(msg.Tick(), 30.0), ctl.RunCycle).closed_by is Reason.FROZEN


def test_an_answer_of_a_process_of_another_generation_starts_nothing():
    """Its group has not gathered yet."""
    control = control_of()
    group_leaves(control)
    come(control, 1, now=0.1)
    answer = dataclasses.replace(state_of(1, query=9, epoch=4), identity=identity_of(1, "g2", 5))
    assert control.handle(from_rank(1, answer, 5, 31), 0.1) == []
    assert control.state is S.READY


def aborts(actions):
    return [a.rank for a in of_kind(actions, ctl.SendToRank) if isinstance(a.message, msg.Abort)]


def test_a_lost_rank_that_says_hello_is_asked_once():
    control = control_of(S.MIGRATING)
    control.handle(ctl.RankHeard(EpRank(0), 1, 10), 3.0)
    assert aborts(control.handle(msg.Tick(), 3.0)) == [0, 1]
    assert aborts(control.handle(from_rank(1, hello_of(1), stream=21), 3.1)) == [1]
    assert aborts(control.handle(msg.Tick(), 3.2)) == []


@pytest.mark.parametrize(
    ("generation", "epoch", "placement", "kept"),
    [
        (GENERATION, 0, BASE, True),
        (GENERATION, 1, BASE, False),
        (GENERATION, 0, AFTER_ONE, False),
        (Generation("g0"), 0, BASE, True),
    ],
)
def test_a_failed_write_of_an_epoch_is_repeated_only_while_the_group_is_there(
    generation, epoch, placement, kept
):
    control, write = control_of(), ctl.PersistEpoch(generation, Epoch(epoch), placement)
    control.handle(ctl.PersistFailed((write,)), 0.0)
    present = dataclasses.replace(write, generation=GENERATION)
    assert of_kind(control.handle(msg.Tick(), 0.1), ctl.PersistEpoch) == [present] * kept


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("reached", [1, 2])
def test_a_failed_write_of_an_epoch_outlives_a_restart_of_the_group(reached, begins):
    """The machine takes the epoch as recorded, so nothing else would write it."""
    control, placement = control_of(S.MIGRATING), (AFTER_ONE, AFTER_TWO)[reached - 1]
    vote(control)
    write = only(ack(control, AFTER_ONE, 1), ctl.PersistEpoch)
    # Nothing is known of the restarted group, then that it is there too, or one wave further.
    control.handle(ctl.PersistFailed((dataclasses.replace(write, begins_history=begins),)), 0.1)
    unknown = only(restarts(control, *[(reached, placement)] * 2), ctl.PersistEpoch)
    assert (control.group, unknown.epoch) == (None, 1)
    control.handle(ctl.PersistFailed((unknown,)), 1.2)
    actions = both_of_g2(control, reached, placement)
    again = only(actions + control.handle(msg.Tick(), 1.4), ctl.PersistEpoch)
    assert (again.epoch, again.placement, again.begins_history) == (reached, placement, begins)
    control.handle(ctl.PersistFailed((again,)), 1.5)
    repeated = only(control.handle(msg.Tick(), 1.6), ctl.PersistEpoch)
    assert repeated == dataclasses.replace(again, generation=Generation("g2"))


def both_of_g2(control, epoch, placement):
    """The ranks of a restarted group tell where they stand."""
    actions = []
    for rank in (0, 1):
        identity = dataclasses.replace(
            identity_of(rank), generation=Generation("g2"), incarnation=5
        )
        state = state_of(rank, query_of(control), epoch, placement, identity=identity)
        actions += control.handle(from_rank(rank, state, 5, 30 + rank), 1.3)
    return actions


def test_a_failed_document_is_repeated_in_its_newest_version():
    control = control_of()
    policy, old = ctl.PersistDocument("policy", {"mode": "auto"}), control.document()
    control.handle(ctl.PersistFailed((policy, old)), 0.0)
    Operator(control).freeze(10.0, 0.0)
    control.handle(ctl.PersistFailed((policy, old)), 0.0)
    assert control.document() != old
    repeated = of_kind(control.handle(msg.Tick(), 0.1), ctl.PersistDocument)
    assert repeated == [policy, control.document()]


def test_no_cycle_plans_while_writes_are_missing():
    control = control_of()
    control.handle(ctl.PersistFailed((control.document(),)), 29.9)
    actions = control.handle(msg.Tick(), 30.0)
    assert only(actions, ctl.RunCycle).closed_by is Reason.STORE_UNAVAILABLE


@pytest.mark.parametrize("state", [S.RECOVERING, S.MIGRATING])
def test_a_cycle_that_the_group_or_another_plan_has_overtaken_says_so(state):
    control = control_of(policy=DeploymentPolicy(mode=Mode.AUTO, cycle_s=1.0))
    cycle = only(control.handle(msg.Tick(), 1.0), ctl.RunCycle)
    if state is S.RECOVERING:
        restarts(control)
    else:
        Operator(control).submit(plan_of(), 1.0, approve=True)
    assert control.state is state
    plan = plan_of(plan_id="late", kind=PlanKind.AUTOMATIC)
    decided = ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan)
    row = only(control.handle(decided, 1.1), ctl.PersistDecision).row
    wanted = {S.RECOVERING: Reason.RECOVERING, S.MIGRATING: Reason.PLAN_IN_PROGRESS}
    assert row["reason"] == wanted[state]
    assert "late" not in control.records.by_id


MOVED = BASE.with_rows((1,), wave_of(layer=1).rows)
"""The map of the ranks after the move."""


def refuse(control, reason):
    """Both ranks refuse the wave, and hold nothing of it."""
    both(control, lambda rank: msg.Vote(key_of(), False, reason))
    gone = msg.AbortAnswer(key_of(), Epoch(0), msg.WaveOutcome.REFUSED, True)
    both(control, lambda rank: gone)


def test_a_wave_refused_as_stale_makes_the_leader_query_the_ranks():
    """R15: without it, plans that follow each other closely would all end as stale_base."""
    control = control_of(S.MIGRATING)
    refuse(control, Reason.STALE_BASE)
    assert phase_and_reason(control) == (PlanPhase.ABORTED, Reason.STALE_BASE)
    assert state_in(control) is S.RECOVERING, "no plan begins meanwhile"
    answer_queries(control, epoch=1, placement=MOVED)
    assert (control.state, control.epoch, control.placement) == (S.READY, Epoch(1), MOVED)
    target = MOVED.with_rows((0,), wave_of().rows)
    plan = plan_of(1, "next", base_epoch=1, base=MOVED, target=target)
    _, actions = Operator(control).submit(plan, 0.0, approve=True)
    assert {prepare.base_epoch for prepare in prepares(actions)} == {1}


def test_a_wave_that_ends_for_another_reason_does_not():
    control = control_of(S.MIGRATING)
    refuse(control, Reason.OBSERVE_ONLY)
    assert record(control).reason is Reason.OBSERVE_ONLY
    assert (control.state, control.epoch) == (S.READY, Epoch(0))


COMMIT = ctl.SendToRank(EpRank(0), 10, msg.Commit(LEADER, key_of()))
QUERY = ctl.SendToRank(EpRank(0), 10, msg.QueryState(LEADER))
POLICY = ctl.PersistDocument("policy", {})


def decision(number):
    return ctl.PersistDecision({"cycle": number})


def same(action):
    return action


def test_the_newest_decisions_and_all_other_writes_are_kept():
    retry = WriteRetry()
    retry.failed([POLICY, *(decision(number) for number in range(150))], same)
    assert retry.order([], flush=True) == [POLICY, *(decision(number) for number in range(50, 150))]


def test_only_sends_that_need_the_store_were_skipped_with_the_writes():
    assert COMMIT.needs_store and not QUERY.needs_store
    retry = WriteRetry()
    assert retry.order([COMMIT, POLICY, QUERY]) == [POLICY, COMMIT, QUERY]
    assert retry.failed([POLICY], same) == (COMMIT,)
    assert retry.failed([POLICY], same) == ()


def test_a_batch_without_writes_keeps_its_order_and_the_sends_of_the_batch_before():
    retry = WriteRetry()
    retry.order([POLICY, COMMIT])
    assert retry.order([QUERY], flush=True) == [QUERY]
    assert retry.failed([POLICY], same) == (COMMIT,)


LOWER = 0.1
UNKNOWN = None


def record_of(gain, at=1.0, *, name="p", upper=0.01, lower=LOWER, kind=PlanKind.AUTOMATIC):
    plan = plan_of(plan_id=name, kind=kind, numbers={"gain": 0.12, "gain_lower": lower})
    record = PlanRecords().add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, 0.0).record
    if gain is UNKNOWN:
        delivered = DeliveredGain(at, unknown_because="no rank reports seconds")
    else:
        delivered = DeliveredGain(at, gain, 0.01, gain - 0.01, gain + upper, None, 64)
    return dataclasses.replace(record, delivered=delivered)


@pytest.mark.parametrize(
    ("gain", "upper", "answer"),
    [
        (0.05, 0.01, True),
        (0.049, 0.01, False),
        (-0.2, 0.01, False),
        (0.04, 0.06, None),  # The bound of the promise is the end of the interval.
        (0.049, 0.06, None),  # The promise lies inside the interval: measured too roughly.
        (0.12, 0.01, True),
    ],
)
def test_less_than_half_of_the_lower_bound_is_too_little(gain, upper, answer):
    assert has_delivered(record_of(gain, upper=upper)) is answer


def test_what_is_not_promised_measured_or_automatic_says_nothing():
    assert has_delivered(record_of(UNKNOWN)) is None
    assert has_delivered(dataclasses.replace(record_of(0.0), delivered=None)) is None
    assert has_delivered(record_of(0.0, lower=0.0)) is None
    assert has_delivered(record_of(0.0, kind=PlanKind.MANUAL)) is None
    missed = record_of(0.0)
    unmeasured = dataclasses.replace(missed, delivered=None)
    assert undelivered_in_a_row([unmeasured, missed], 0.0) == [missed]
    unpromised = record_of(0.0)
    unpromised.plan.numbers.clear()
    assert has_delivered(unpromised) is None


def test_plans_count_in_the_order_of_their_measurements_back_to_one_that_delivered():
    missed = [record_of(0.0, at) for at in (2.0, 3.0, 5.0)]
    unknown = record_of(UNKNOWN, 4.0)
    assert undelivered_in_a_row([*missed, unknown], 0.0) == missed[::-1]
    assert undelivered_in_a_row([*missed, record_of(0.1, 4.5)], 0.0) == [missed[2]]
    assert undelivered_in_a_row(missed, 2.0) == missed[:0:-1], "since the last resume"


# --- in the leader's machine ----------------------------------------------------------------------


def leading(mode=Mode.AUTO):
    control = control_of()
    Operator(control).set_policy(DeploymentPolicy(mode=mode, cycle_s=30.0), {}, 0.0)
    return control


def measure(control, name, gain, now):
    """Enter a committed plan that promised 10 % at least, and measure it."""
    plan = plan_of(plan_id=name, kind=PlanKind.AUTOMATIC, numbers={"gain_lower": LOWER})
    control.records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, now)
    delivered = record_of(gain, now).delivered
    return control.handle(ctl.PlanMeasured(PlanId(name), delivered), now)


def stopped():
    """A leader after three plans in a row that delivered nothing."""
    control = leading()
    for at, name in enumerate("abc", 1):
        measure(control, name, 0.0, float(at))
    assert control.held
    return control


def test_the_third_plan_in_a_row_stops_auto_with_a_reason_of_its_own():
    control = leading()
    for at, name in ((1.0, "a"), (2.0, "b")):
        assert [type(action) for action in measure(control, name, 0.0, at)] == [ctl.PersistPlan]
    _, document, alert = measure(control, "c", 0.0, 3.0)
    stored = {"held": True, "held_because": "gains_not_delivered", "frozen_until": 0.0}
    assert document == ctl.PersistDocument("control", stored)
    assert isinstance(alert, ctl.Alert)
    assert alert.reason is Reason.GAINS_NOT_DELIVERED
    assert alert.detail.endswith("plans a, b, c")
    cycle = only(control.handle(msg.Tick(), 40.0), ctl.RunCycle)
    assert cycle.closed_by is Reason.GAINS_NOT_DELIVERED
    assert [type(action) for action in measure(control, "d", 0.0, 41.0)] == [ctl.PersistPlan]


def test_a_plan_that_delivers_begins_the_count_again():
    control = leading()
    for at, (name, gain) in enumerate([("a", 0.0), ("b", 0.0), ("c", 0.11), ("d", 0.0)], 1):
        measure(control, name, gain, float(at))
    assert not control.held


@pytest.mark.parametrize("mode", [Mode.PROPOSE, Mode.OBSERVE])
def test_only_auto_is_stopped(mode):
    control = leading(mode)
    for at, name in enumerate("abcd", 1):
        measure(control, name, 0.0, float(at))
    assert not control.held


def test_resume_starts_auto_and_three_further_plans_must_fail():
    control = stopped()
    (document,) = Operator(control).resume(10.0)
    assert isinstance(document, ctl.PersistDocument)
    assert document.body == {"held": False, "judged_from": 10.0, "frozen_until": 0.0}
    assert Operator(control).resume(11.0) == []
    for at, name in enumerate("de", 12):
        measure(control, name, 0.0, float(at))
    assert not control.held
    measure(control, "f", 0.0, 14.0)
    assert control.hold == Hold(Reason.GAINS_NOT_DELIVERED, 10.0)


def test_the_stop_outlives_a_change_of_the_leader():
    control = stopped()
    stored = ctl.StoredRecords(hold=Hold.of_document(control.document().body))
    control.handle(ctl.LeaseLost(), 5.0)
    assert not control.held
    control.handle(ctl.LeaseAcquired(LEADER, stored), 6.0)
    assert planning_loop_of(control).hold.because is Reason.GAINS_NOT_DELIVERED


def test_a_rollback_keeps_the_reason_of_the_stop():
    control = stopped()
    Operator(control).submit(plan_of(plan_id="back", kind=PlanKind.ROLLBACK), 5.0)
    assert control.hold.because is Reason.GAINS_NOT_DELIVERED


@pytest.mark.parametrize(
    ("body", "hold"),
    [
        ({}, Hold()),
        ({"held": False, "held_because": "gains_not_delivered"}, Hold()),
        ({"held": True}, Hold(Reason.HELD_AFTER_ROLLBACK)),
        ({"held": True, "held_because": ["?"]}, Hold(Reason.HELD_AFTER_ROLLBACK)),
        ({"held": True, "held_because": "committed"}, Hold(Reason.HELD_AFTER_ROLLBACK)),
        ({"held": True, "held_because": "held_after_data_loss"}, Hold(Reason.HELD_AFTER_DATA_LOSS)),
        ({"judged_from": "soon"}, Hold()),
        ({"judged_from": float("nan")}, Hold()),
        ({"judged_from": 5}, Hold(None, 5.0)),
        (
            {"held": True, "retiring": {"ranks": [3, 1], "num_ranks": 4}},
            Hold(Reason.HELD_AFTER_ROLLBACK, 0.0, Retirement((EpRank(1), EpRank(3)), 4)),
        ),
    ],
)
def test_a_stored_hold_that_cannot_be_read_still_holds(body, hold):
    assert Hold.of_document(body) == hold
    assert Hold.of_document(hold.document()) == hold


@pytest.mark.parametrize(
    "retiring",
    [
        "rank 1",
        {"ranks": [1]},
        {"ranks": [], "num_ranks": 2},
        {"ranks": [0, 1], "num_ranks": 2},
        {"ranks": [2], "num_ranks": 2},
        {"ranks": [True], "num_ranks": 2},
    ],
)
def test_a_stored_retirement_that_cannot_be_read_is_refused(retiring):
    with pytest.raises(InvalidInput, match="the stored retirement of ranks is"):
        Hold.of_document({"held": False, "retiring": retiring})


def test_telemetry_keeps_a_rank_fresh():
    """Its answers to questions may be late while a step takes long."""
    control = control_of()
    for t in range(1, 9):
        for rank in (EpRank(0), EpRank(1)):
            control.handle(ctl.RankHeard(rank, 1, 10 + rank), float(t))
        control.handle(msg.Tick(), float(t))
    assert control.membership.quorum(8.0).ok
    control.handle(ctl.RankHeard(EpRank(0), 1, 99), 12.0)
    assert not control.membership.fresh(EpRank(0), 12.0), "not its newest stream"


def test_no_wave_begins_while_a_rank_refuses_waves():
    """R9."""
    control = control_of()
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 0.0)
    waiting, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    assert waiting.phase is PlanPhase.APPROVED and sent(actions) == []
    control.handle(ctl.RankTroubled(EpRank(1), 11, ""), 0.1)
    actions = control.handle(msg.Tick(), 0.2)
    assert len(prepares(actions)) == 2


def test_a_rank_of_a_new_generation_that_stops_at_once_is_lost_to_its_wave():
    control = control_of()
    control.handle(msg.Tick(), 10.0)
    come(control, 0, 1, now=10.1)
    held: dict[str, Any] = {
        "state": msg.ParticipantState.ARMED,
        "wave": key_of(generation="g2"),
    }
    for rank in (0, 1):
        answer = state_of(rank, query=query_of(control))
        answer = dataclasses.replace(answer, identity=identity_of(rank, "g2", 5), **held)
        control.handle(from_rank(rank, answer, 5, 30 + rank), 10.1)
    control.handle(ctl.RankStopped(EpRank(1), 31), 10.1)
    health = only(control.handle(msg.Tick(), 10.2), ctl.WaveHealth)
    assert (health.stalled, health.reason) == (True, Reason.RANK_LOST)
