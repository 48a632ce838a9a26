"""Changes of the policy: several at the same time, and thresholds that no window can meet."""

import asyncio

import pytest
from structlog.testing import capture_logs

from evenkeel_moe.errors import Conflict, InvalidInput, Reason
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from tests.controller.replicas import DEMO, replicas
from tests.waiting import until


@pytest.fixture
async def replica():
    """A replica that leads DEMO."""
    async with replicas("a") as (one, _):
        deployment = one.registry.add(DEMO)
        await deployment.keeper.decided(10)
        await until(lambda: deployment.control.leader is not None)
        yield one


@pytest.fixture
def operations(replica):
    return replica.operations


async def test_of_changes_based_on_one_document_the_first_is_taken_and_logged(operations):
    base = await operations.policy(DEMO)
    with capture_logs() as log:
        answers = await asyncio.gather(
            *(operations.set_policy(DEMO, {"cycle_s": 10.0 + n}, "me", base) for n in range(6)),
            return_exceptions=True,
        )
    first = answers[0]
    assert not isinstance(first, BaseException)
    assert first["cycle_s"] == (await operations.policy(DEMO))["cycle_s"] == 10.0
    assert all(
        isinstance(late, Conflict) and late.reason is Reason.STALE_BASE for late in answers[1:]
    )
    assert [row["changes"] for row in log if row["event"] == "policy_changed"] == [
        {"cycle_s": 10.0}
    ]
    # The next change may name the answered document as its base, or no base at all.
    assert (await operations.set_policy(DEMO, {"cycle_s": 3.0}, "me", answers[0]))["cycle_s"] == 3.0
    assert (await operations.set_policy(DEMO, {"cycle_s": 4.0}, "me"))["cycle_s"] == 4.0


async def test_a_refused_change_is_not_logged_as_one(operations):
    with capture_logs() as log, pytest.raises(InvalidInput, match="^cycles: "):
        await operations.set_policy(DEMO, {"cycles": 1}, "me")
    assert not [row for row in log if row["event"] == "policy_changed"]


@pytest.mark.parametrize(
    ("thresholds", "words"),
    [
        (
            {"min_window_steps": 300},
            "^thresholds.min_window_steps 300 exceeds window.plan_steps 256: no cycle",
        ),
        (
            {"min_held_out_steps": 1000},
            "^thresholds.min_held_out_steps 1000 must be a whole number of at most 128, half",
        ),
        (
            {"min_window_steps": 300, "min_held_out_steps": 129},
            "300 exceeds .*; thresholds.min_held_out_steps 129",
        ),
    ],
)
async def test_a_gate_that_no_window_can_pass_is_refused(operations, thresholds, words):
    before = await operations.policy(DEMO)
    with pytest.raises(InvalidInput, match=words):
        await operations.set_policy(DEMO, {"thresholds": thresholds}, "me")
    assert await operations.policy(DEMO) == before
    wanted = {"min_window_steps": 256, "min_held_out_steps": 128}
    changed = await operations.set_policy(DEMO, {"thresholds": wanted}, "me")
    assert changed["thresholds"] | wanted == changed["thresholds"]


async def test_a_stored_gate_that_no_window_can_pass_stops_no_other_change(replica, operations):
    """A replica with longer windows stored it."""
    policy = DeploymentPolicy(mode=Mode.AUTO, thresholds={"min_held_out_steps": 200})
    replica.member.control.handle(ctl.PolicySet(policy, {}), 0.0)
    assert (await operations.set_policy(DEMO, {"mode": "observe"}, "me"))["mode"] == "observe"
