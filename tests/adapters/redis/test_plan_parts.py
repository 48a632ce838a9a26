"""A plan is stored in parts: its maps and waves once, its record, and the new rows of its story."""

from dataclasses import replace
from typing import Any

import pytest

from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanPhase
from tests.contracts.test_stores import DEMO, LONG_PLAN, carried_out, form, make_record

PREFIX = f"evenkeel:{{{DEMO}}}:"
P1 = PlanId("p1")


class Counting:
    """A client that counts the bytes of its scripts' arguments."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def eval(self, script: str, *values: Any) -> Any:
        self.sent += sum(len(v) if isinstance(v, bytes) else len(str(v)) for v in values)
        return await self._client.eval(script, *values)


async def stored(store: RedisDeploymentStore) -> Any:
    (found,) = await store.fetch_plans(DEMO, [P1])
    return form(found)


def cut(record, rows: int):
    return replace(record, story=record.story[:rows], waves_committed=rows // 2)


@LONG_PLAN
async def test_a_wave_writes_as_little_at_the_end_of_a_long_plan_as_at_its_begin(client):
    counting: Any = Counting(client)
    store, whole = RedisDeploymentStore(counting), carried_out(make_record(), 600)
    sent = []
    for rows in (1, 2, 3, 4, 1198, 1199, 1200, 1201):
        before = counting.sent
        await store.store_plan(cut(whole, rows), 1)
        sent.append(counting.sent - before)
    assert max(sent[-3:]) < 1.1 * max(sent[1:4]) < 2000
    assert await stored(store) == form(whole)


@pytest.mark.parametrize("lost", ["plans", "plan_maps", "plan_story", "story row", "all"])
async def test_a_part_that_the_store_lost_is_written_again_with_the_next_change(
    client, store, lost
):
    record = carried_out(make_record(), 4)
    await store.store_plan(cut(record, 8), 1)
    if lost == "all":
        await client.flushall()
    elif lost == "story row":
        await client.hdel(PREFIX + "plan_story", "7 p1")
    else:
        await client.delete(PREFIX + lost)
    assert await store.fetch_plans(DEMO, [P1]) == []
    await store.store_plan(record, 1)
    assert await stored(store) == form(record)


async def test_a_plan_with_a_missing_row_is_named_and_not_used(client, store, noted):
    await store.store_plan(carried_out(make_record(), 2), 1)
    await client.hdel(PREFIX + "plan_story", "1 p1")
    assert await store.fetch_plans(DEMO, [P1]) == []
    assert noted == [("plan", PREFIX + "plans p1", "its maps or a row of its story are missing")]


async def test_another_plan_of_the_same_id_replaces_all_parts(client, store):
    long, short = carried_out(make_record(), 3), make_record(created_at=5.0)
    await store.store_plan(long, 1)
    await store.store_plan(short, 1)
    assert await stored(store) == form(short)
    assert set(await client.hkeys(PREFIX + "plan_story")) == {b"rows p1", b"0 p1"}


async def test_a_leader_that_took_over_goes_on_with_the_story_it_read(client, store):
    whole = carried_out(make_record(), 3)
    await store.store_plan(cut(whole, 5), 1)
    (found,) = await RedisDeploymentStore(client).fetch_plans(DEMO, [P1])
    other = RedisDeploymentStore(client)
    await other.store_plan(replace(found, story=(*found.story[:4], {"at": 9.0, "event": "x"})), 2)
    (found,) = await store.fetch_plans(DEMO, [P1])
    ended = replace(found, phase=PlanPhase.ABORTED, story=(*found.story, {"event": "ended"}))
    await store.store_plan(ended, 3)
    assert await stored(store) == form(ended)


async def test_a_number_of_rows_that_cannot_be_true_takes_no_time(client, store, noted):
    await store.store_plan(make_record(), 1)
    await client.hset(PREFIX + "plan_story", "rows p1", 999_999_999_999)
    assert await store.fetch_plans(DEMO, [P1]) == []
    assert [one.why for one in noted] == ["its maps or a row of its story are missing"]
    await store.store_plan(make_record(phase=PlanPhase.EXPIRED), 1)
    assert (await stored(store))["phase"] is PlanPhase.EXPIRED
