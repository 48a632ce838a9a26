"""The rounds of questions of a new leader: their times, alerts and records (R12, R15)."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from evenkeel_moe.errors import Conflict, Reason
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.query_round import Disagreement, GroupState, QueryRound
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    CONTROL_TIMING,
    Operator,
    abort_answers,
    after_wave,
    answer_queries,
    both,
    come,
    control_of,
    find_armed,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    only,
    phase_and_reason,
    plan_of,
    prepares,
    queries,
    query_of,
    record,
    refused,
    sent,
    state_in,
    state_of,
    stored_plan,
    vote,
    wave_state,
)

SWAPPED, REFUSED, DROPPED = (
    msg.WaveOutcome.SWAPPED,
    msg.WaveOutcome.REFUSED,
    msg.WaveOutcome.DROPPED,
)


def tick(control, now, ranks=(0, 1)):
    """Hear ranks and tick; return the ranks asked for their state, and the reasons of alerts."""
    for rank in ranks:
        control.handle(ctl.RankHeard(EpRank(rank), 1, 10 + rank), now)
    actions = control.handle(msg.Tick(), now)
    questions = of_kind(actions, ctl.SendToRank)
    current = control.as_leader.recovery.round
    query = None if current is None else current.query
    asked = [a.rank for a in questions if getattr(a.message, "query", 0) == query]
    return asked, [alert.reason for alert in of_kind(actions, ctl.Alert)]


def test_a_question_is_repeated_to_those_who_have_not_answered():
    control = control_of(S.RECOVERING)
    assert tick(control, 0.9) == ([], [])
    assert tick(control, 1.0) == ([0, 1], [])
    assert tick(control, 1.9) == ([], [])
    control.handle(from_rank(0, state_of(0, query=query_of(control))), 1.9)
    control.handle(from_rank(0, state_of(0, query=1)), 1.9)
    assert tick(control, 2.0) == ([1], [])


def test_a_recovery_that_lasts_too_long_raises_one_alert():
    control = control_of(S.RECOVERING)
    deadline = CONTROL_TIMING.recovery_deadline_s
    assert tick(control, deadline - 0.1)[1] == []
    actions = control.handle(msg.Tick(), deadline)
    alert = only(actions, ctl.Alert)
    assert (alert.reason, alert.detail) == (Reason.RECOVERY_DEADLINE, "no answer from ranks [0, 1]")
    assert tick(control, deadline + 1.0)[1] == []
    answer_queries(control, deadline + 2.0)
    assert state_in(control) is S.READY
    assert tick(control, 3 * deadline)[1] == []
    control.handle(from_rank(0, state_of(0, query=query_of(control), epoch=4)), 100.0)
    assert state_in(control) is S.RECOVERING
    assert tick(control, 100.0 + deadline - 0.1)[1] == [], "the next one has its own time"
    assert tick(control, 100.0 + deadline)[1] == [Reason.RECOVERY_DEADLINE]


def test_no_alert_says_that_ranks_do_not_answer_if_all_have_answered():
    """They disagree, or a wave that was found on them takes long to end."""
    deadline = CONTROL_TIMING.recovery_deadline_s
    control = control_of(S.RECOVERING)
    alerts = []
    for now in (0.0, deadline, deadline + 1.0, deadline + 2.0):
        for rank, map_ in enumerate((BASE, AFTER_ONE)):
            state = state_of(rank, query=query_of(control), placement=map_)
            alerts += of_kind(control.handle(from_rank(rank, state), now), ctl.Alert)
        alerts += tick(control, now + 0.9)[1]
        alerts += tick(control, now + 1.0)[1]
    assert [getattr(alert, "reason", alert) for alert in alerts] == [Reason.EPOCH_DISAGREES]
    control = control_of(S.RECOVERING)
    find_armed(control)
    assert wave_state(control) is CoordinatorState.COMMITTING
    assert tick(control, deadline)[1] == []


def test_a_rank_that_does_not_answer_is_named_also_after_a_disagreement():
    control = control_of(S.RECOVERING)
    for rank, map_ in enumerate((BASE, AFTER_ONE)):
        control.handle(from_rank(rank, state_of(rank, query=1, placement=map_)), 0.0)
    tick(control, CONTROL_TIMING.ask_again_s)
    control.handle(from_rank(0, state_of(0, query=query_of(control))), 1.0)
    deadline = CONTROL_TIMING.recovery_deadline_s
    alerts = of_kind(control.handle(msg.Tick(), deadline), ctl.Alert)
    assert [(alert.reason, alert.detail) for alert in alerts] == [
        (Reason.RECOVERY_DEADLINE, "no answer from ranks [1]")
    ]


def test_ranks_that_disagree_are_asked_again_after_a_while_and_this_is_said_once():
    control = control_of(S.RECOVERING)
    control.handle(from_rank(0, state_of(0, query=1)), 0.0)
    differs: dict[str, Any] = {"epoch": 1, "placement": AFTER_ONE}
    (alert,) = of_kind(
        control.handle(from_rank(1, state_of(1, query=1, **differs)), 0.0), ctl.Alert
    )
    assert alert.reason is Reason.EPOCH_DISAGREES
    control.handle(from_rank(1, state_of(1, query=1)), 0.1)
    assert state_in(control) is S.RECOVERING, "the round is over"
    first = query_of(control)
    assert tick(control, 0.9) == ([], [])
    assert tick(control, CONTROL_TIMING.ask_again_s) == ([0, 1], [])
    assert query_of(control) > first
    assert control.state_reason(1.0)[0] is Reason.EPOCH_DISAGREES, "until all agree"
    control.handle(from_rank(0, state_of(0, query=query_of(control))), 1.0)
    actions = control.handle(from_rank(1, state_of(1, query=query_of(control), **differs)), 1.0)
    assert not of_kind(actions, ctl.Alert)
    assert tick(control, 2.0) == ([0, 1], [])
    answer_queries(control, 2.0)
    assert state_in(control) is S.READY
    control.handle(from_rank(0, state_of(0, query=query_of(control) + 1, epoch=4)), 2.0)
    assert state_in(control) is S.RECOVERING
    assert control.state_reason(2.0)[0] is Reason.RECOVERING, "an earlier disagreement is over"


def test_a_rank_that_reconnects_is_asked_unless_it_has_answered():
    control = control_of(S.RECOVERING)
    control.handle(from_rank(0, state_of(0, query=1)), 0.0)
    assert sent(control.handle(from_rank(0, hello_of(0), stream=20), 0.1)) == []
    (question,) = of_kind(control.handle(from_rank(1, hello_of(1), stream=21), 0.1), ctl.SendToRank)
    assert (question.stream, question.message.query) == (21, query_of(control))
    assert not question.message.want_placement, "rank 0 tells it"
    control.handle(from_rank(1, state_of(1, query=query_of(control)), stream=21), 0.2)
    assert state_in(control) is S.READY
    assert sent(control.handle(from_rank(1, hello_of(1), stream=22), 0.3)) == []


@pytest.mark.parametrize(
    ("epochs", "begins"),
    [
        ({0: BASE}, None),
        ({}, False),
        ({0: AFTER_ONE}, True),
        ({0: BASE, 1: AFTER_ONE}, False),
        ({3: BASE, 4: AFTER_ONE}, True),
    ],
)
def test_the_epoch_of_the_ranks_is_recorded_unless_it_is_the_newest_recorded_one(epochs, begins):
    stored = ctl.StoredRecords(epochs={Epoch(epoch): map_ for epoch, map_ in epochs.items()})
    control = control_of(S.RECOVERING, stored)
    actions = answer_queries(control)
    written = [action.begins_history for action in of_kind(actions, ctl.PersistEpoch)]
    assert written == ([] if begins is None else [begins])
    assert control.history == {0: BASE}


@pytest.mark.parametrize(
    ("recorded", "begins", "history"),
    [
        ({1: AFTER_ONE, 2: BASE, 3: AFTER_ONE}, False, [1, 2]),
        ({1: AFTER_ONE, 2: AFTER_ONE, 3: AFTER_ONE}, True, [2]),
        ({1: AFTER_ONE}, False, [1, 2]),
        ({0: AFTER_ONE}, True, [2]),
    ],
)
def test_a_group_continues_the_recorded_history_only_from_its_end_or_a_placement_of_it(
    recorded, begins, history
):
    epochs = {Epoch(epoch): map_ for epoch, map_ in recorded.items()}
    control = control_of(S.RECOVERING, ctl.StoredRecords(epochs=epochs))
    actions = answer_queries(control, epoch=2)
    assert only(actions, ctl.PersistEpoch).begins_history is begins
    assert sorted(control.history) == history


def test_after_a_reload_on_all_ranks_plans_begin_again():
    """R4."""
    control = control_of()
    reloaded: dict[str, Any] = {"weights_version": 2, "checksums": (6,) * 8}
    control.handle(from_rank(0, state_of(0, **reloaded)), 0.0)
    control.handle(from_rank(1, state_of(1, **reloaded)), 0.0)
    answer_queries(control, **reloaded)
    assert state_in(control) is S.READY
    _, actions = Operator(control).submit(plan_of(weights_version=2), 0.0, approve=True)
    assert [prepare.checksums for prepare in prepares(actions)] == [(6,), (6,)]


def test_a_proposal_of_old_weights_ends_with_the_recovery_after_the_reload():
    """R4; the next cycle makes another one."""
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(kind=PlanKind.AUTOMATIC), 0.0)
    reloaded: dict[str, Any] = {"weights_version": 2, "checksums": (6,) * 8}
    control.handle(from_rank(0, state_of(0, **reloaded)), 0.0)
    control.handle(from_rank(1, state_of(1, **reloaded)), 0.0)
    answer_queries(control, **reloaded)
    assert phase_and_reason(control) == (PlanPhase.REFUSED, Reason.WEIGHTS_VERSION_CHANGED)
    assert control.records.proposal() is None
    reason, _ = refused(Conflict, lambda: operator.approve(PlanId("p"), "me", 0.0))
    assert reason is Reason.WEIGHTS_VERSION_CHANGED


def stored_plans(*changes):
    plans = []
    for number, change in enumerate(changes):
        found = record(control_of(S.MIGRATING))
        named = dataclasses.replace(
            found.plan, plan_id=PlanId("pqr"[number]), created_at=float(number)
        )
        plans.append(dataclasses.replace(found, **{"plan": named, **change}))
    return ctl.StoredRecords(plans=tuple(plans), epochs={Epoch(0): BASE})


def test_only_the_newest_accepted_plan_goes_on_and_proposals_stay():
    proposed = {"phase": PlanPhase.PROPOSED}
    control = control_of(S.RECOVERING, stored_plans({}, {}, proposed))
    answer_queries(control, **after_wave(0, "q"))
    assert phase_and_reason(control, "p") == (PlanPhase.ABORTED, Reason.STALE_BASE)
    assert record(control, "q").waves_committed == 1
    assert record(control, "r").phase is PlanPhase.PROPOSED
    # Though both fit.
    control = control_of(S.RECOVERING, stored_plans({}, {}))
    answer_queries(control)
    assert phase_and_reason(control, "p") == (PlanPhase.ABORTED, Reason.STALE_BASE)
    assert (control.state, record(control, "q").phase) == (S.MIGRATING, PlanPhase.MIGRATING)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"weights_version": 2}, Reason.WEIGHTS_VERSION_CHANGED),
        ({**after_wave(1), "epoch": 3, "last_wave": key_of(index=2)}, Reason.STALE_BASE),
        ({**after_wave(0), "placement": BASE}, Reason.STALE_BASE),
    ],
)
def test_a_plan_that_does_not_fit_the_group_any_more_ends(answers, reason):
    control = control_of(S.RECOVERING, stored_plans({}))
    # Of new weights, all ranks are asked for their checksums.
    actions = [answer_queries(control, **answers) for _ in range(2)][-1]
    assert phase_and_reason(control) == (PlanPhase.ABORTED, reason)
    assert record(control).waves_committed == 0
    assert not prepares(actions)


@pytest.mark.parametrize(
    ("ended", "counts"),
    [
        ((("p", 0, SWAPPED), ("p", 0, SWAPPED)), True),
        ((("p", 0, SWAPPED), ("r", 0, REFUSED)), True),
        ((("q", 0, SWAPPED), ("q", 0, SWAPPED)), False),
        ((("q", 0, SWAPPED), ("r", 0, REFUSED)), False),
        ((("p", 0, DROPPED), ("p", 0, DROPPED)), False),
        ((("r", 0, DROPPED), ("p", 0, REFUSED)), False),
        ((None, None), False),
        ((("r", 0, DROPPED), None), False),
        ((("r", 0, DROPPED), ("r", 0, REFUSED)), True),
    ],
)
def test_a_wave_counts_only_if_it_led_to_the_epoch_as_far_as_the_ranks_know(ended, counts):
    """R12: the same epoch and map may come from another plan, or from the engine itself."""
    control = control_of(S.RECOVERING, stored_plans({}))
    for rank, last in enumerate(ended):
        wave, outcome = (None, None) if last is None else (key_of(*last[:2]), last[2])
        state = state_of(
            rank, query_of(control), 1, AFTER_ONE, last_wave=wave, last_outcome=outcome
        )
        control.handle(from_rank(rank, state), 0.0)
    assert record(control).waves_committed == counts
    assert (record(control).reason is Reason.STALE_BASE) is not counts


def test_a_plan_based_on_a_later_epoch_than_the_groups_ends():
    plan = dataclasses.replace(record(control_of(S.MIGRATING)).plan, base_epoch=Epoch(1))
    for placement in (BASE, AFTER_ONE):
        control = control_of(S.RECOVERING, stored_plans({"plan": plan}))
        answer_queries(control, placement=placement)
        assert (record(control).reason, record(control).waves_committed) == (Reason.STALE_BASE, 0)


def test_a_plan_that_is_where_the_store_says_goes_on_without_a_row_of_its_recovery():
    control = control_of(S.RECOVERING, stored_plans({}))
    answer_queries(control)
    assert record(control).phase is PlanPhase.MIGRATING
    assert "recovered" not in [row["event"] for row in record(control).story]
    control = control_of(S.RECOVERING, stored_plans({}))
    answer_queries(control, **after_wave(0))
    row = next(row for row in record(control).story if row["event"] == "recovered")
    assert (row["waves_committed"], row["detail"]) == (1, "epoch 1")


def test_after_a_found_wave_has_ended_all_ranks_are_asked_again():
    control = control_of(S.RECOVERING)
    held: dict[str, Any] = {"state": msg.ParticipantState.STAGING, "wave": key_of()}
    both(control, lambda rank: state_of(rank, query=1, **held))
    asked_for_wave = query_of(control)
    assert control.as_leader.recovery.round is None
    both(control, lambda rank: state_of(rank, query=1, **held))
    assert wave_state(control) is CoordinatorState.RECOVERING, "late answers to the first question"
    both(control, lambda rank: state_of(rank, query=asked_for_wave, **held))
    actions = abort_answers(control)
    questions = queries(actions)
    assert [(q.query, q.want_placement) for q in questions] == [
        (asked_for_wave + 1, True),
        (asked_for_wave + 1, False),
    ]
    answer_queries(control)
    assert state_in(control) is S.READY


def test_a_late_answer_to_the_last_round_starts_no_other():
    control = control_of(S.RECOVERING)
    last = query_of(control)
    answer_queries(control)
    control.handle(from_rank(0, state_of(0, query=last, epoch=4)), 0.0)
    assert control.state is S.READY


def test_a_plan_that_waits_while_the_ranks_disagree_says_so():
    """R14."""
    control = control_of(S.RECOVERING, stored_plans({}))
    for t in range(1, 13):
        control.handle(from_rank(0, state_of(0, query=query_of(control))), float(t))
        control.handle(from_rank(1, state_of(1, query=query_of(control), epoch=4)), float(t))
        control.handle(msg.Tick(), float(t))
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.EPOCH_DISAGREES)


def test_what_a_recovery_learns_of_a_plan_is_stored_at_once():
    control = control_of(S.RECOVERING, stored_plans({}))
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 0.0)
    actions = answer_queries(control, **after_wave(0))
    assert only(actions, ctl.PersistPlan).record.waves_committed == 1


@pytest.mark.parametrize(("before", "found"), [(0, [0, 1]), (1, [1]), (2, [])])
def test_the_waves_that_a_recovery_counts_are_told(before, found):
    control = control_of(S.RECOVERING, stored_plans({"waves_committed": before}))
    ended = of_kind(answer_queries(control, **after_wave(1)), ctl.WaveEnded)
    assert ended == [ctl.WaveEnded(key_of(index=i), True, Reason.COMMITTED) for i in found]


@pytest.mark.parametrize(
    ("counted", "agreed", "events"),
    [(0, True, ["wave_committed", "ended"]), (0, False, ["ended"]), (1, False, ["ended"])],
)
def test_a_wave_that_the_restarted_group_shows_is_counted_once_whatever_the_base(
    counted, agreed, events
):
    """R12."""
    plan = dataclasses.replace(record(control_of(S.MIGRATING)).plan, base_epoch=Epoch(3))
    stored = stored_plans({"plan": plan, "waves_committed": counted, "wave_agreed": agreed})
    before = len(stored.plans[0].story)
    control = control_of(S.WAITING_FOR_RANKS, stored)
    come(control, 0, 1, epoch=4, placement_digest=AFTER_ONE.digest)
    assert [row["event"] for row in record(control).story[before:]] == events
    assert record(control).waves_committed == (1 if agreed else counted)


OTHER_MAP = pytest.mark.fault(
    "a fleet whose ranks acknowledged a plan with their old map",
    "the plan was committed, and no map had changed",
)
SWAPPED = msg.WaveOutcome.SWAPPED


def says(placement, epoch: int) -> msg.Ack:
    return msg.Ack(key_of(), Epoch(epoch), placement.digest)


def swapped_on(rank: int, epoch: int = 1) -> ctl.FromRank:
    return from_rank(rank, msg.AbortAnswer(key_of(), Epoch(epoch), SWAPPED, True))


@OTHER_MAP
@pytest.mark.parametrize(
    ("placement", "epoch"), [(BASE, 1), (BASE, 0), (AFTER_TWO, 1), (AFTER_ONE, 2), (AFTER_ONE, 0)]
)
def test_a_wave_that_led_to_another_map_is_not_committed_and_all_ranks_are_asked(placement, epoch):
    control = control_of(S.MIGRATING)
    vote(control)
    actions = both(control, lambda _: says(placement, epoch))
    actions += [*control.handle(swapped_on(0), 0.0), *control.handle(swapped_on(1), 0.0)]
    alerts = of_kind(actions, ctl.Alert)
    assert {alert.reason for alert in alerts} == {Reason.EPOCH_DISAGREES} and len(alerts) == 2
    assert placement.digest in alerts[0].detail and AFTER_ONE.digest in alerts[0].detail
    assert of_kind(actions, ctl.PersistEpoch) == []
    ended = only(actions, ctl.WaveEnded)
    assert (ended.committed, ended.reason) == (False, Reason.EPOCH_DISAGREES)
    ended = record(control)
    assert (ended.phase, ended.reason) == (PlanPhase.ABORTED, Reason.EPOCH_DISAGREES)
    assert ended.waves_committed == 0 and alerts[0].detail == ended.error
    assert control.state is S.RECOVERING
    assert [type(message) for message in sent(actions)][-2:] == [msg.QueryState] * 2
    # The ranks say what is true.
    answer_queries(control, epoch=epoch, placement=placement)
    assert (control.state, control.epoch, control.placement) == (S.READY, epoch, placement)


@OTHER_MAP
def test_one_rank_at_the_right_map_commits_the_wave_and_the_other_one_is_found():
    for first in (0, 1):
        control = control_of(S.MIGRATING)
        vote(control)
        answers = {0: says(AFTER_ONE, 1), 1: says(BASE, 1)}
        actions = control.handle(from_rank(first, answers[first]), 0.0)
        actions += control.handle(from_rank(1 - first, answers[1 - first]), 0.0)
        assert only(actions, ctl.Alert).reason is Reason.EPOCH_DISAGREES
        assert (control.epoch, record(control).waves_committed) == (1, 1)


@OTHER_MAP
@pytest.mark.parametrize(("epoch", "committed"), [(1, False), (2, True)])
def test_a_wave_that_a_new_leader_finds_swapped_to_another_map_is_not_committed(epoch, committed):
    """At a later epoch the map is the engine's own, and the wave had been committed before."""
    control = control_of(S.RECOVERING, stored_plan())
    at_other: dict[str, Any] = {"epoch": epoch, "last_wave": key_of(), "last_outcome": SWAPPED}
    held: dict[str, Any] = {"state": msg.ParticipantState.ARMED, "wave": key_of()}
    both(control, lambda rank: state_of(rank, query=1, **(held if rank else at_other)))
    both(control, lambda rank: state_of(rank, query=2, **at_other))
    assert wave_state(control) is (C.COMMITTED if committed else C.ABORTING)
    both(control, lambda rank: msg.AbortAnswer(key_of(), Epoch(epoch), SWAPPED, True))
    assert record(control).waves_committed == committed


# --- One rank tells the whole placement and all checksums, the others their digests (R4, R15) -----


RANKS = frozenset(map(EpRank, range(3)))


def short(rank, **changes):
    """Return the answer of a rank that was asked neither for its placement nor its checksums."""
    return replace(state_of(rank, query=1), **changes)


def asked_of(actions):
    return {a.rank: a.message for a in of_kind(actions, ctl.SendToRank)}


def recovering():
    """Return a machine in recovery and the questions of its round."""
    control = control_of(S.RECOVERING)
    assert control.as_leader.recovery.round is not None
    return control, asked_of(control.as_leader.recovery.begin(0.0))


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
    again = asked_of(control.handle(from_rank(1, told), 0.0))
    assert [(q.want_placement, q.want_checksums) for _, q in sorted(again.items())] == [
        (True, True),
        (False, True),
    ]
    for rank, checksums in ((0, (5,) * 8), (1, (6,) * 8)):
        answer = short(rank, query=recovery.query, weights_version=2, checksums=checksums)
        actions = control.handle(from_rank(rank, answer), 0.0)
    assert only(actions, ctl.Alert).reason is Reason.CHECKSUM_MISMATCH
    assert control.state is S.RECOVERING
    again = asked_of(control.handle(msg.Tick(), 2.0))
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
