"""Audit rows are kept in order, limited, and shared between replicas through the store."""

import asyncio
import json
from dataclasses import replace

import pytest
import structlog

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.logs import configure_logs
from evenkeel_moe.controller.operations.audit import AuditLog
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import AuditEntry
from tests.contracts.memory_store import SilentStore
from tests.controller.replicas import make_health

DEMO = DeploymentId("demo")


class Ticking(SystemClock):
    """A clock that advances by a second at each reading."""

    now = 1_700_000_000.0

    def unix(self):
        self.now += 1
        return self.now


CLOCK = Ticking()
OLD = {
    "at": 1.0, "id": "a", "deployment": "demo", "by": "ann", "role": "admin", "method": "PATCH",
    "path": "/p", "status": 200,
}  # fmt: skip
"""A row of an older version."""


@pytest.fixture
def store():
    return SilentStore(SystemClock())


def log_on(store) -> AuditLog:
    return AuditLog(store, make_health(), CLOCK)


def entry(path: str, deployment: DeploymentId | None = DEMO) -> AuditEntry:
    return AuditEntry(deployment, "alice", "operate", "POST", path, 202, None)


async def paths(log: AuditLog, limit: int = 1000) -> list[str]:
    return [row["path"] for row in await log.rows(DEMO, limit)]


async def test_rows_of_older_versions_have_no_change(store):
    await store.store_document(DEMO, "audit", {"rows": [OLD]}, 1)
    log = log_on(store)
    await log.record(replace(entry("/q"), change='{"mode":"auto"}'), 1)
    assert [one["change"] for one in await log.rows(DEMO, 9)] == ['{"mode":"auto"}', None]


@pytest.mark.parametrize("at", [10**400, 1 << 63, float("nan"), float("inf"), True])
async def test_a_row_with_an_impossible_time_costs_only_itself(store, at):
    bad = OLD | {"at": at, "id": "b"}
    await store.store_document(DEMO, "audit", {"rows": [bad, OLD]}, 1)
    log = log_on(store)
    await log.record(entry("/q"), 1)
    assert await paths(log) == ["/q", "/p"]
    assert log._health._unreadable == {"demo audit"}


async def test_rows_outlive_the_controller(store):
    before = log_on(store)
    await before.record(entry("/1"), 1)
    await before.record(entry("/2"), 1)
    after = log_on(store)
    await after.record(entry("/3"), 2)
    assert await paths(after) == ["/3", "/2", "/1"]
    assert await paths(after, 2) == ["/3", "/2"]
    row = (await after.rows(DEMO, 1))[0]
    assert (row["by"], row["role"], row["method"], row["status"]) == (
        "alice",
        "operate",
        "POST",
        202,
    )
    assert after.in_memory(None, 9) == [row]


async def test_a_replica_adds_to_the_rows_of_another_and_never_replaces_them(store):
    one, other = log_on(store), log_on(store)
    await one.record(entry("/1"), 1)
    await other.record(entry("/2"), 2)
    # It is fenced now: its row stays in memory and in the log, and the stored rows do not change.
    await one.record(entry("/3"), 1)
    assert await paths(other) == ["/2", "/1"]
    assert await paths(one) == ["/3", "/2", "/1"]


async def test_what_could_not_be_stored_is_stored_with_the_next_row(store):
    log = log_on(store)
    await log.record(entry("/1"), None)
    store.silent.add("fetch_document")
    await log.record(entry("/2"), 1)
    store.silent.clear()
    log._health.recovered()
    assert await paths(log_on(store)) == []
    await log.record(entry("/3"), 1)
    assert await paths(log_on(store)) == ["/3", "/2", "/1"]


async def test_rows_that_wait_for_each_other_ask_a_silent_store_once(store):
    """Each would wait for its own timeout, and its request for all of them."""
    log = log_on(store)
    store.silent.add("fetch_document")
    async with log._writing:
        rows = [asyncio.ensure_future(log.record(entry(f"/{number}"), 1)) for number in range(3)]
        await asyncio.sleep(0)
    await asyncio.gather(*rows)
    assert store.refused == 1


async def test_rows_are_bounded_in_the_store_and_in_memory(store):
    log = log_on(store)
    for number in range(300):
        await log.record(entry(f"/{number}"), 1)
    assert await paths(log_on(store)) == [f"/{number}" for number in range(299, 43, -1)]
    for number in range(1200):
        await log.record(entry(f"/{number}", None), None)
    assert len(log.in_memory(None, 5000)) == 1024
    assert log.in_memory(DEMO, 5000) == []


async def test_flood_of_refused_requests_pushes_out_no_change(store):
    log = log_on(store)
    await log.record(entry("/done"), 1)
    for number in range(1100):
        await log.record(replace(entry(f"/{number}"), status=422), 1)
    assert "/done" in await paths(log)
    assert "/done" in await paths(log_on(store)), "stored too"
    kept = [row["path"] for row in log.in_memory(DEMO, 5000)]
    assert kept[0] == "/1099" and kept[-1] == "/done" and len(kept) == 257


async def test_audit_line_does_not_follow_the_log_level(store, capsys):
    before = structlog.get_config()
    try:
        configure_logs("error")
        await log_on(store).record(entry("/done"), None)
    finally:
        structlog.configure(**before)
    (line,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert (line["event"], line["path"], line["by"]) == ("audit", "/done", "alice")
