"""Ranks that say they swapped a wave, and are at another map or epoch than it leads to (R12)."""

from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    answer_queries,
    both,
    control_of,
    from_rank,
    key_of,
    of_kind,
    only,
    record,
    sent,
    state_of,
    vote,
    wave_state,
)

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
    outcome = only(actions, ctl.PersistOutcome)
    assert (outcome.committed, outcome.reason) == (False, Reason.EPOCH_DISAGREES)
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
    stored = record(control_of(S.MIGRATING))
    control = control_of(S.RECOVERING, ctl.StoredRecords(plans=(stored,), epochs={Epoch(0): BASE}))
    at_other: dict[str, Any] = {"epoch": epoch, "last_wave": key_of(), "last_outcome": SWAPPED}
    held: dict[str, Any] = {"state": msg.ParticipantState.ARMED, "wave": key_of()}
    both(control, lambda rank: state_of(rank, query=1, **(held if rank else at_other)))
    both(control, lambda rank: state_of(rank, query=2, **at_other))
    assert wave_state(control) is (C.COMMITTED if committed else C.ABORTING)
    both(control, lambda rank: msg.AbortAnswer(key_of(), Epoch(epoch), SWAPPED, True))
    assert record(control).waves_committed == committed
