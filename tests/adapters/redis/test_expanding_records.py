"""Small records that would take much memory or time are refused before they are unpacked."""

import base64
import json
import struct

import numpy as np
import pytest
import zstandard

from evenkeel_moe.adapters.redis import store as store_module
from evenkeel_moe.adapters.redis import stored_values
from evenkeel_moe.adapters.redis import windows as windows_module
from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.encoding import (
    pack_placement,
    pack_plan_maps,
    pack_plan_record,
    pack_source,
    pack_story_row,
    pack_window,
    unpack_placement,
    unpack_plan_record,
    unpack_source,
)
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.unpacking import Room, Unreadable
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.controller.ingest.group_memory import limit_steps
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from tests.contracts.test_stores import (
    BASE,
    DEMO,
    assert_same,
    fetch,
    make_record,
    make_window,
)

PREFIX = f"evenkeel:{{{DEMO}}}:"
STREAM, SUMS = PREFIX + "window:decode", PREFIX + "window_source:decode"
LISTS = b'{"a":[' + b"[]," * 200_000 + b"[]]}"


def packed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(body)


RECORD = make_record()
STORY = [pack_story_row(row) for row in RECORD.story]


def form_of(data: bytes) -> dict:
    return json.loads(zstandard.ZstdDecompressor().decompress(data))


def unpack_plan(maps: bytes, story=STORY):
    small = form_of(pack_plan_record(RECORD)) | {"num_rows": len(story)}
    return unpack_plan_record(packed(json.dumps(small).encode()), maps, story)


def array(values, dtype="<i8") -> str:
    return base64.b64encode(packed(np.asarray(values, dtype).tobytes())).decode()


@pytest.fixture
async def client(valkey):
    client = connect(valkey.url, timeout_s=5.0)
    yield client
    await disconnect(client)


# --- plans and placements --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, why", [(LISTS, "JSON values"), (b" " * ((1 << 26) + 1), "unpacks to 67108865 bytes")]
)
def test_a_small_plan_of_many_values_or_bytes_is_refused_before_it_is_parsed(body, why):
    data = packed(body)
    assert len(data) < 10_000
    with pytest.raises(Unreadable, match=why):
        unpack_plan(data)


def test_rows_of_a_story_of_many_values_or_bytes_are_refused_before_they_are_parsed():
    for body, why in ((LISTS, "JSON values"), (b" " * ((1 << 21) + 1), "unpacks to 2097153 bytes")):
        with pytest.raises(Unreadable, match=why):
            unpack_plan(pack_plan_maps(RECORD.plan), [packed(body)])
    with pytest.raises(Unreadable, match="bytes unpacked"):
        unpack_plan(
            pack_plan_maps(RECORD.plan), [packed(b'{"x": "' + b"x" * 2_000_000 + b'"}')] * 140
        )


def test_the_maps_of_a_plan_share_one_room():
    form = form_of(pack_plan_maps(RECORD.plan))
    large = Placement(np.zeros((1024, 4096), np.int32), 4096, 1)
    form["base"] = form["target"] = json.loads(pack_placement(large))
    form["waves"] |= {"number": 16, "sizes": array([[1024, 0]] * 16)}
    form["waves"] |= {"layers": array(np.zeros(16384)), "rows": array(np.zeros(1 << 26), "<i4")}
    data = packed(json.dumps(form).encode())
    assert len(data) < 40_000
    with pytest.raises(Unreadable, match="would take 268435456 bytes unpacked"):
        unpack_plan(data)


@pytest.mark.parametrize(
    "damage, needed",
    [
        ({"number": 1 << 21}, 256 << 21),
        ({"sizes": array([[1, 1 << 21]])}, 256 << 21),
        ({"batches": array([1 << 21, 0])}, 256 << 21),
        ({"sizes": array([[1 << 62, 2]])}, 8 << 62),
    ],
)
def test_waves_batches_and_transfers_count_with_the_memory_of_their_objects(damage, needed):
    form = form_of(pack_plan_maps(RECORD.plan))
    form["waves"] |= damage
    with pytest.raises(Unreadable, match=f"would take {needed} bytes"):
        unpack_plan(packed(json.dumps(form).encode()))


@pytest.mark.parametrize("name", ["sizes", "layers", "batches", "transfers"])
def test_a_number_of_a_wave_below_0_is_unreadable(name):
    form = form_of(pack_plan_maps(RECORD.plan))
    shape = {"sizes": 2, "layers": 1, "batches": 2, "transfers": 5}
    form["waves"][name] = array([-1] * shape[name])
    with pytest.raises(Unreadable, match="-1 is less than 0"):
        unpack_plan(packed(json.dumps(form).encode()))


def test_a_plan_of_a_very_large_model_fits():
    phy2log = np.random.default_rng(0).integers(0, 1024, (256, 4096)).astype(np.int32)
    phy2log[:, :1024] = np.arange(1024)
    large = Placement(phy2log, 512, 1024)
    room = Room()
    for _ in range(8):
        assert unpack_placement(pack_placement(large), room) == large


def test_a_room_that_is_full_takes_nothing_more():
    data, room = pack_placement(BASE), Room(50)
    assert unpack_placement(data, room) == BASE
    with pytest.raises(Unreadable, match="would take 32 bytes unpacked, 18 of the 50"):
        unpack_placement(data, room)


async def test_plans_beyond_what_one_read_takes_are_named(client, monkeypatch):
    noted: list[str] = []
    store = RedisDeploymentStore(client, unreadable=lambda _kind, where, _why: noted.append(where))
    lease = await store.acquire_lease(DEMO, "a", 60.0, 0)
    for name in ("p1", "p2"):
        await store.store_plan(make_record(name), lease.term)
    parts = [PREFIX + "plans", PREFIX + "plan_maps"]
    most = sum([await client.hstrlen(key, "p1") for key in parts])
    most += await client.hstrlen(PREFIX + "plan_story", "0 p1") + 10
    monkeypatch.setattr(store_module, "READ_BYTES", most)
    for first, second in (("p1", "p2"), ("p2", "p1")):
        found = await store.fetch_plans(DEMO, [PlanId("gone"), PlanId(first), PlanId(second)])
        assert [record.plan.plan_id for record in found] == [first]
    assert noted == [f"{PREFIX}plans p2", f"{PREFIX}plans p1"]


# --- documents and decisions -----------------------------------------------------------------


@pytest.mark.parametrize("body", [LISTS, b'{"a": "' + b"x" * (1 << 21) + b'"}'])
async def test_a_document_or_row_that_is_too_large_is_set_aside(client, body):
    noted: dict[str, str] = {}
    store = RedisDeploymentStore(
        client, unreadable=lambda _kind, where, why: noted.update({where: why})
    )
    await client.hset(PREFIX + "documents", "leader", body)
    await client.xadd(PREFIX + "decisions", {"d": body}, id="1-1")
    assert await store.fetch_document(DEMO, "leader") is None
    assert await store.fetch_decisions(DEMO, 5) == []
    assert noted.keys() == {f"{PREFIX}documents leader", f"{PREFIX}decisions 1-1"}
    assert all("at most" in why or "bytes" in why for why in noted.values())


async def test_epochs_beyond_what_one_read_takes_are_the_oldest(client, monkeypatch):
    noted: list[str] = []
    store = RedisDeploymentStore(client, unreadable=lambda _kind, where, _why: noted.append(where))
    body = pack_placement(BASE)
    for epoch in (2, 10, 9):
        await client.hset(PREFIX + "epochs", str(epoch), body)
        await client.rpush(PREFIX + "replaced_epochs", b"%d %s" % (epoch, body))
    monkeypatch.setattr(store_module, "READ_BYTES", 2 * len(body) + 10)
    assert list(await store.fetch_epochs(DEMO)) == [9, 10]
    assert [epoch for epoch, _ in await store.fetch_replaced_epochs(DEMO)] == [2, 10]
    assert noted == [f"{PREFIX}epochs b'2'", f"{PREFIX}replaced_epochs b'row 2'"]


async def test_epochs_with_names_that_are_no_numbers_are_the_oldest(client):
    noted: list[str] = []
    store = RedisDeploymentStore(client, unreadable=lambda _kind, where, _why: noted.append(where))
    largest = 10**18 - 1
    for name in (b"0", str(largest).encode(), b"9" * 5000, b"x"):
        await client.hset(PREFIX + "epochs", name, pack_placement(BASE))
    assert list(await store.fetch_epochs(DEMO)) == [0, largest]
    assert sorted(noted) == [f"{PREFIX}epochs b'{'9' * 78}", f"{PREFIX}epochs b'x'"]


def test_the_largest_audit_is_read():
    """Callers choose paths and keys, and must not make the audit unreadable with them."""
    text = '","[{' * 60
    row = {"at": 1.0, "id": "x" * 16, "by": "é" * 64, "path": text[:256], "change": text[:256]}
    row |= {"idempotency_key": text[:128], "trace_id": "x" * 32, "method": "PATCH", "status": 200}
    rows = {"rows": [row | {"deployment": "d" * 64, "role": "admin"}] * 320}
    assert stored_values.parse_json(json.dumps(rows).encode()) == rows
    escaped = {"rows": [row | {"path": "\U0001f600" * 256}] * 320}
    assert stored_values.parse_json(json.dumps(escaped).encode()) == escaped


@pytest.mark.parametrize("data", [b'"' + b'\\"' * 600_000, b'"' * 600_000, b'["' + b"\\" * 600_000])
def test_values_are_counted_in_one_pass(data):
    """Without an end of its text, a slower count would take hours."""
    with pytest.raises(ValueError):
        stored_values.parse_json(b"," * 40_000 + data)


def test_json_of_another_encoding_is_refused():
    with pytest.raises(ValueError, match="utf-8"):
        stored_values.parse_json("[1]".encode("utf-16"))


# --- windows -----------------------------------------------------------------------------------


def chunk_head(steps: int, layers: int = 2, experts: int = 3, ranks: int = 2) -> bytes:
    return struct.pack("<BBIIII", 2, 4, steps, layers, experts, ranks)


async def test_chunks_of_another_shape_are_not_unpacked_and_the_others_are_read(client):
    noted: dict[str, str] = {}
    windows = RedisWindowStore(
        client, unreadable=lambda _kind, where, why: noted.update({where: why})
    )
    await windows.append(DEMO, Phase.DECODE, make_window(range(3)))
    heads = [
        chunk_head(64, layers=1024, experts=256),
        chunk_head(3, layers=1),
        chunk_head(3, experts=4),
        chunk_head(3, ranks=1),
        chunk_head(65),
    ]
    for number, head in enumerate(heads, 1):
        await client.xadd(STREAM, {"d": head + b"no frame"}, id=f"9999999999999-{number}")
    found = await fetch(windows)
    assert found is not None and found.steps.tolist() == [0, 1, 2]
    assert len(noted) == len(heads) and all("expected at most 64" in why for why in noted.values())


async def test_only_as_many_chunks_are_read_as_the_window_needs(client):
    noted: list[str] = []
    windows = RedisWindowStore(client, unreadable=lambda _kind, where, _why: noted.append(where))
    await client.xadd(STREAM, {"d": b"oldest"}, id="1-1")
    window = make_window(range(100))
    await windows.append(DEMO, Phase.DECODE, window)
    assert_same(await fetch(windows, most=20), window.last(20))
    assert not noted
    assert_same(await fetch(windows), window)
    assert noted == [f"{STREAM} 1-1"]


async def test_a_stream_of_chunks_that_all_overlap_is_read_to_a_limit(client):
    windows = RedisWindowStore(client, capacity=64)
    window = make_window(range(64))
    data = pack_window(window.slice(slice(0, 8)))
    await client.xadd(STREAM, {"d": pack_window(window.slice(slice(8, 16)))}, id="1-1")
    for number in range(2, 40):
        await client.xadd(STREAM, {"d": data}, id=f"1-{number}")
    found = await fetch(windows)
    assert found is not None and found.steps.tolist() == list(range(8)), "1-1 is too far back"


async def test_chunks_too_large_to_be_read_together_are_read_one_by_one(client, monkeypatch):
    monkeypatch.setattr(windows_module, "READ_BYTES", 0)
    windows, window = RedisWindowStore(client), make_window(range(512), high=1 << 32)
    await windows.append(DEMO, Phase.DECODE, window)
    assert_same(await fetch(windows), window)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (4, 2, 3), (2, 1, 3), (2, 2, 4)])
async def test_sums_of_another_shape_are_set_aside(client, sizes):
    noted: list[str] = []
    windows = RedisWindowStore(client, unreadable=lambda _kind, where, _why: noted.append(where))
    await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
    await client.set(SUMS, pack_source(np.ones(sizes, np.uint32)))
    found = await fetch(windows)
    assert found is not None and found.source is None
    assert noted == [SUMS]


def test_the_largest_sums_that_are_kept_are_read():
    shape = ModelShape(32, 4096, 64, 64, 1, 1)
    larger = ModelShape(32, 4096, 65, 64, 1, 1)
    limits = [limit_steps(one, 512, 512) for one in (shape, larger)]
    assert [one.keeps_sources for one in limits] == [True, False]
    zeros = np.zeros((64, 32, 4096), np.uint32)
    assert unpack_source(pack_source(zeros), (64, 32, 4096)).shape == zeros.shape
    with pytest.raises(Unreadable):
        unpack_source(pack_source(np.zeros((65, 32, 4096), np.uint32)), (65, 32, 4096))
