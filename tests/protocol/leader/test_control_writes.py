"""The writes of the leader that failed, and the cycles that no plan may come from."""

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    BASE,
    GENERATION,
    Operator,
    control_of,
    from_rank,
    group_leaves,
    hello_of,
    of_kind,
    only,
    plan_of,
)


@pytest.mark.parametrize(
    ("generation", "epoch", "kept"),
    [(GENERATION, 0, True), (GENERATION, 1, False), (Generation("g0"), 0, False)],
)
def test_a_failed_write_of_an_epoch_is_repeated_only_while_the_epoch_is_current(
    generation, epoch, kept
):
    control, write = control_of(), ctl.PersistEpoch(generation, Epoch(epoch), BASE)
    control.handle(ctl.PersistFailed((write,)), 0.0)
    assert of_kind(control.handle(msg.Tick(), 0.1), ctl.PersistEpoch) == ([write] if kept else [])


def test_a_failed_document_is_repeated_in_its_newest_version():
    control = control_of()
    policy, old = ctl.PersistDocument("policy", {"mode": "auto"}), control.document()
    control.handle(ctl.PersistFailed((policy, old)), 0.0)
    Operator(control).freeze(10.0, 0.0)
    control.handle(ctl.PersistFailed((policy, old)), 0.0)
    assert control.document() != old
    repeated = of_kind(control.handle(msg.Tick(), 0.1), ctl.PersistDocument)
    assert repeated == [policy, control.document()]


def test_no_cycle_begins_while_writes_are_missing():
    control = control_of()
    control.handle(ctl.PersistFailed((control.document(),)), 29.9)
    actions = control.handle(msg.Tick(), 30.0)
    assert only(actions, ctl.PersistDecision).row["reason"] == "store_unavailable"
    assert not of_kind(actions, ctl.RunCycle)


@pytest.mark.parametrize("state", [S.RECOVERING, S.MIGRATING])
def test_a_cycle_that_the_group_or_another_plan_has_overtaken_says_so(state):
    control = control_of(policy=DeploymentPolicy(mode=Mode.AUTO, cycle_s=1.0))
    cycle = only(control.handle(msg.Tick(), 1.0), ctl.RunCycle)
    if state is S.RECOVERING:
        group_leaves(control)
        for rank in (0, 1):
            control.handle(from_rank(rank, hello_of(rank, "g2", 5), 5, 30 + rank), 1.0)
    else:
        Operator(control).submit(plan_of(), 1.0, approve=True)
    assert control.state is state
    plan = plan_of(plan_id="late", kind=PlanKind.AUTOMATIC)
    decided = ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan)
    row = only(control.handle(decided, 1.1), ctl.PersistDecision).row
    wanted = {S.RECOVERING: Reason.RECOVERING, S.MIGRATING: Reason.PLAN_IN_PROGRESS}
    assert row["reason"] == wanted[state]
    assert "late" not in control.records.by_id
