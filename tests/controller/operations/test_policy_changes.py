"""Changes of the policy document: several at the same time, and values no controller can use."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.deployment.action_executor import StoreHealth
from evenkeel_moe.controller.deployment.deployment import Outside
from evenkeel_moe.controller.operations.operator_service import Fleet
from evenkeel_moe.controller.policy_document import change_policy
from evenkeel_moe.controller.process.serve import _deployment_options
from evenkeel_moe.errors import Conflict, InvalidInput, Reason
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.settings import Settings
from tests.contracts.memory_store import MemoryStore
from tests.waiting import until

DEMO = DeploymentId("demo")


@pytest.fixture
async def fleet():
    """Leads DEMO."""
    clock, metrics, tasks = SystemClock(), ControllerMetrics(CollectorRegistry()), []
    store = MemoryStore(clock)

    def spawn(work, name):
        tasks.append(asyncio.create_task(work, name=name))
        return tasks[-1]

    outside = Outside(store, store, clock, metrics, StoreHealth(clock, metrics), None, spawn)  # type: ignore[arg-type]
    fleet = Fleet(_deployment_options(Settings(), "here:1"), outside, max_deployments=8)
    member = fleet.add(DEMO)
    await member.keeper.decided(10)
    await until(lambda: member.control.leader is not None)
    yield fleet
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_of_changes_that_rest_on_one_document_the_first_is_taken_and_told(fleet):
    base = await fleet.policy(DEMO)
    with capture_logs() as log:
        answers = await asyncio.gather(
            *(fleet.set_policy(DEMO, {"cycle_s": 10.0 + n}, "me", base) for n in range(6)),
            return_exceptions=True,
        )
    assert answers[0]["cycle_s"] == (await fleet.policy(DEMO))["cycle_s"] == 10.0
    assert all(
        isinstance(late, Conflict) and late.reason is Reason.STALE_BASE for late in answers[1:]
    )
    assert [row["changes"] for row in log if row["event"] == "policy_changed"] == [
        {"cycle_s": 10.0}
    ]
    # The document that was answered is what the next change may rest on; without one it rests on any.
    assert (await fleet.set_policy(DEMO, {"cycle_s": 3.0}, "me", answers[0]))["cycle_s"] == 3.0
    assert (await fleet.set_policy(DEMO, {"cycle_s": 4.0}, "me"))["cycle_s"] == 4.0


async def test_a_change_that_is_refused_is_not_told_as_one(fleet):
    with capture_logs() as log, pytest.raises(InvalidInput, match="unknown policy fields"):
        await fleet.set_policy(DEMO, {"cycles": 1}, "me")
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
            "^thresholds.min_held_out_steps 1000 can never be met: .* up to 128 can$",
        ),
        (
            {"min_window_steps": 300, "min_held_out_steps": 129},
            "300 exceeds .*; thresholds.min_held_out_steps 129",
        ),
    ],
)
async def test_a_gate_that_no_window_can_pass_is_refused(fleet, thresholds, words):
    before = await fleet.policy(DEMO)
    with pytest.raises(InvalidInput, match=words):
        await fleet.set_policy(DEMO, {"thresholds": thresholds}, "me")
    assert await fleet.policy(DEMO) == before
    wanted = {"min_window_steps": 256, "min_held_out_steps": 128}
    changed = await fleet.set_policy(DEMO, {"thresholds": wanted}, "me")
    assert changed["thresholds"] | wanted == changed["thresholds"]


async def test_a_stored_gate_that_no_window_can_pass_stops_no_other_change(fleet):
    """It was stored by a replica of longer windows."""
    policy = DeploymentPolicy(mode=Mode.AUTO, thresholds={"min_held_out_steps": 200})
    fleet.members[DEMO].operator.set_policy(policy, {}, 0.0)
    assert (await fleet.set_policy(DEMO, {"mode": "observe"}, "me"))["mode"] == "observe"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cycle_s": 10**400}, "cycle_s is 1000.*, must be a finite number"),
        ({"cycle_s": -(10**400)}, "must be a finite number"),
        ({"proposal_ttl_s": 10**400}, "must be a finite number"),
        ({"thresholds": {"cooldown_s": 10**400}}, "thresholds.cooldown_s is 1000"),
        ({"cycle_s": float("nan")}, "cycle_s is nan"),
        ({"cycle_s": True}, "cycle_s is True"),
        ({"cycle_s": "\ud800"}, "must be a finite number"),
        (
            {"limits": {"max_bytes": 2**62 + 1}},
            r"limits.max_bytes is 4611686018427387905, .* from 0 to 2\^62",
        ),
        ({"limits": {"max_moves": 10**400}}, "limits.max_moves is 1000"),
        ({"limits": {"max_layers": True}}, "limits.max_layers is True"),
    ],
)
def test_a_number_that_cannot_be_used_is_refused_with_its_field(changes, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        change_policy(DeploymentPolicy(), changes)
    assert len(str(caught.value)) < 200


def test_the_largest_limit_is_taken():
    assert (
        change_policy(DeploymentPolicy(), {"limits": {"max_bytes": 2**62}}).limits.max_bytes
        == 2**62
    )
