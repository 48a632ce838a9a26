"""The stored form: damaged and foreign bytes are unreadable, and counts take few bytes."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.adapters.redis.encoding import (
    Unreadable,
    pack_placement,
    pack_plan_maps,
    pack_plan_record,
    pack_source,
    pack_story_row,
    pack_window,
    unpack_placement,
    unpack_plan_record,
    unpack_source,
    unpack_window,
)
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.model.delivered import DeliveredGain, ServingSpeed
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase
from tests.contracts.test_stores import (
    BASE,
    DEMO,
    LONG_PLAN,
    assert_same,
    carried_out,
    form,
    make_record,
    make_window,
)


def parts_of(record):
    """Return a plan record as the store has it."""
    maps, story = pack_plan_maps(record.plan), b"".join(map(pack_story_row, record.story))
    return pack_plan_record(record), maps, story


SMALL, MAPS, STORY = parts_of(make_record())
FORMS = [
    (pack_window(make_window(range(3))), lambda data: unpack_window(data, (2, 3, 2), 3)),
    (
        pack_source(make_window(range(3), source=True).source),
        lambda data: unpack_source(data, (2, 2, 3)),
    ),
    (pack_placement(BASE), unpack_placement),
    (SMALL, lambda data: unpack_plan_record(data, MAPS, STORY)),
    (MAPS, lambda data: unpack_plan_record(SMALL, data, STORY)),
    (STORY, lambda data: unpack_plan_record(SMALL, MAPS, data)),
]


def as_json(data):
    return json.loads(zstandard.ZstdDecompressor().decompress(data))


def packed(form):
    return zstandard.ZstdCompressor().compress(json.dumps(form).encode())


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
)
def test_damaged_values_are_unreadable_and_nothing_worse(form, cuts):
    data, unpack = form
    damaged = bytearray(data)
    for position, value in cuts:
        damaged[position % len(damaged)] = value
    with contextlib.suppress(Unreadable):  # any other error fails the test
        unpack(bytes(damaged))


@given(st.sampled_from(FORMS), st.binary(max_size=60))
def test_foreign_values_are_unreadable_and_nothing_worse(form, data):
    for value in (data, form[0][: len(data)]):
        with pytest.raises(Unreadable):
            form[1](value)


def unpack(record):
    return unpack_plan_record(*parts_of(record))


GAINED = DeliveredGain(9.0, 0.1, 0.01, 0.08, 0.12, 0.15, 64)


def test_a_measured_gain_is_stored():
    before, after = ServingSpeed(0.02, 450.0), ServingSpeed(0.015, 600.0)
    unknown = DeliveredGain(9.0, unknown_because="why")
    told = [replace(gained, before=before, after=after) for gained in (GAINED, unknown)]
    for gained in (*told, GAINED, unknown, None):
        record = make_record(delivered=gained)
        assert unpack(record).delivered == gained


def test_a_plan_of_another_version_is_unreadable():
    other = packed(as_json(SMALL) | {"version": 2})
    with pytest.raises(Unreadable, match="version: Input should be 8"):
        unpack_plan_record(other, MAPS, STORY)


@pytest.mark.parametrize(
    "damage",
    [
        {"gain": "much"},
        {"gain": 2.0},
        {"gain": None},
        {"gain": float("nan")},
        {"error": -1.0},
        {"lower": 0.2},
        {"upper": []},
        {"modelled": float("inf")},
        {"steps": -3},
        {"steps": {}},
        {"at": None},
    ],
)
def test_an_impossible_measured_gain_is_unreadable(damage):
    small, maps, story = parts_of(make_record(delivered=GAINED))
    form = as_json(small)
    for delivered in (form["delivered"] | damage, "gained", 3, [1], {"gain": 0.1}):
        with pytest.raises(Unreadable):
            unpack_plan_record(packed(form | {"delivered": delivered}), maps, story)


@pytest.mark.parametrize(
    "most, width",
    [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), ((1 << 24) - 1, 3), ((1 << 32) - 1, 4)],
)
def test_counts_take_as_many_bytes_as_the_largest_needs(most, width):
    window = make_window(range(2), high=most + 1)
    window.counts[0, 0, 0] = most
    data = pack_window(window)
    assert data[1] == width
    assert_same(unpack_window(data, (2, 3, 2), 2), window)
    assert pack_window(*(window.slice(slice(i, i + 1)) for i in range(2))) == data


def test_a_record_that_claims_more_bytes_than_any_has_is_not_unpacked():
    data = zstandard.ZstdCompressor().compress(b" " * ((1 << 28) + 1))
    with pytest.raises(Unreadable, match="unpacks to 268435457 bytes, expected 268435456"):
        unpack_placement(data)


def test_a_plan_of_a_very_large_model_is_read():
    phy2log = np.random.default_rng(0).integers(0, 1024, (256, 4096)).astype(np.int32)
    phy2log[:, :1024] = np.arange(1024)
    large = Placement(phy2log, 512, 1024)
    assert unpack_placement(pack_placement(large)) == large


# --- plan parts -----------------------------------------------------------------------------------


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
        story = await client.hget(PREFIX + "plan_story", "p1")
        await client.hset(PREFIX + "plan_story", "p1", story[:-1])
    else:
        await client.delete(PREFIX + lost)
    assert await store.fetch_plans(DEMO, [P1]) == []
    await store.store_plan(record, 1)
    assert await stored(store) == form(record)


async def test_a_plan_with_a_missing_part_is_named_and_not_used(client, store, noted):
    await store.store_plan(carried_out(make_record(), 2), 1)
    await client.hdel(PREFIX + "plan_story", "p1")
    assert await store.fetch_plans(DEMO, [P1]) == []
    assert noted == [("plan", PREFIX + "plans p1", "its maps or its story are missing")]


async def test_another_plan_of_the_same_id_replaces_all_parts(client, store):
    long, short = carried_out(make_record(), 3), make_record(created_at=5.0)
    await store.store_plan(long, 1)
    await store.store_plan(short, 1)
    assert await stored(store) == form(short)
    assert await client.hgetall(PREFIX + "plan_story") == {b"p1": pack_story_row(*short.story)}


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
