"""Changes of the policy document that come at the same time."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from evenkeel.adapters.clock import SystemClock
from evenkeel.adapters.metrics import ControllerMetrics
from evenkeel.controller.deployment import Outside
from evenkeel.controller.fleet import Fleet
from evenkeel.controller.hands import StoreHealth
from evenkeel.controller.serve import _deployment_options
from evenkeel.errors import Conflict, InvalidInput, Reason
from evenkeel.model.ids import DeploymentId
from evenkeel.settings import Settings
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
    base = fleet.policy(DEMO)
    with capture_logs() as log:
        answers = await asyncio.gather(
            *(fleet.set_policy(DEMO, {"cycle_s": 10.0 + n}, "me", base) for n in range(6)),
            return_exceptions=True,
        )
    assert answers[0]["cycle_s"] == fleet.policy(DEMO)["cycle_s"] == 10.0
    assert all(isinstance(late, Conflict) and late.reason is Reason.STALE_BASE for late in answers[1:])
    assert [row["changes"] for row in log if row["event"] == "policy_changed"] == [{"cycle_s": 10.0}]
    # The document that was answered is what the next change may rest on; without one it rests on any.
    assert (await fleet.set_policy(DEMO, {"cycle_s": 3.0}, "me", answers[0]))["cycle_s"] == 3.0
    assert (await fleet.set_policy(DEMO, {"cycle_s": 4.0}, "me"))["cycle_s"] == 4.0


async def test_a_change_that_is_refused_is_not_told_as_one(fleet):
    with capture_logs() as log, pytest.raises(InvalidInput, match="unknown policy fields"):
        await fleet.set_policy(DEMO, {"cycles": 1}, "me")
    assert not [row for row in log if row["event"] == "policy_changed"]
