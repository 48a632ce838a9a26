"""Answers to keyed requests are kept by the leader, for a day, and only the newest."""

import pytest
from prometheus_client import CollectorRegistry

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.operations import answers
from evenkeel_moe.controller.operations.answers import AnswerLog
from evenkeel_moe.controller.store_health import StoreHealth
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import StoredResponse
from tests.contracts.memory_store import MemoryStore

DEMO = DeploymentId("demo")


class Hand(SystemClock):
    """A clock that is set by hand."""

    now = 1_700_000_000.0

    def unix(self):
        return self.now


class Away(MemoryStore):
    async def fetch_document(self, deployment, name):
        raise Unavailable("away")


@pytest.fixture
def clock():
    return Hand()


def log_on(store, clock) -> AnswerLog:
    return AnswerLog(
        store, StoreHealth(SystemClock(), ControllerMetrics(CollectorRegistry())), clock
    )


def answer(
    name: str, digest: str = "d", location: str | None = "/v1/deployments/demo/plans/p"
) -> StoredResponse:
    return StoredResponse(name, digest, 202, location)


async def test_an_answer_is_found_by_another_controller_for_a_day(clock):
    store = MemoryStore(SystemClock())
    await log_on(store, clock).keep(DEMO, answer("a"), 1)
    await log_on(store, clock).keep(DEMO, answer("b", location=None), 1)
    other = log_on(store, clock)
    assert await other.find(DEMO, "a") == answer("a")
    assert await other.find(DEMO, "b") == answer("b", location=None)
    assert await other.find(DeploymentId("other"), "a") is None
    clock.now += 24 * 3600 - 1
    assert await other.find(DEMO, "a") == answer("a")
    clock.now += 2
    assert await other.find(DEMO, "a") is None
    await other.keep(DEMO, answer("a", "e"), 1)
    assert await other.find(DEMO, "a") == answer("a", "e")


@pytest.mark.parametrize("at", [10**400, float("nan")])
async def test_an_answer_with_an_impossible_time_costs_only_itself(clock, at):
    store = MemoryStore(SystemClock())
    row = {"at": at, "name": "a", "digest": "d", "status": 202, "location": None}
    await store.store_document(DEMO, "answers", {"rows": [row]}, 1)
    log = log_on(store, clock)
    assert await log.find(DEMO, "a") is None
    await log.keep(DEMO, answer("b"), 1)
    assert await log.find(DEMO, "b") == answer("b")


async def test_the_oldest_give_way(clock, monkeypatch):
    monkeypatch.setattr(answers, "_KEPT", 3)
    log = log_on(MemoryStore(SystemClock()), clock)
    for name in "abcd":
        await log.keep(DEMO, answer(name), 1)
    assert [name for name in "abcd" if await log.find(DEMO, name)] == ["b", "c", "d"]


async def test_a_store_that_is_away_is_unknown_and_not_nothing(clock):
    log = log_on(Away(SystemClock()), clock)
    await log.keep(DEMO, answer("a"), 1)
    with pytest.raises(Unavailable):
        await log.find(DEMO, "a")


async def test_an_old_leader_keeps_nothing(clock):
    store = MemoryStore(SystemClock())
    await log_on(store, clock).keep(DEMO, answer("new"), 2)
    old = log_on(store, clock)
    await old.keep(DEMO, answer("old"), 1)
    assert await old.find(DEMO, "old") is None
    assert await old.find(DEMO, "new") == answer("new")
