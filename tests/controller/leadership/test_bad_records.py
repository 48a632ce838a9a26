"""A bad record in the store costs that record: it is skipped, counted and named, never fatal."""

import json
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import zstandard

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.redis.encoding import (
    pack_placement,
    pack_plan_maps,
    pack_plan_record,
    pack_story_row,
    pack_window,
)
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.controller.ingest.group_loads import shape_document
from evenkeel_moe.controller.operations.audit import AuditLog
from evenkeel_moe.controller.process.background import take_up_deployments
from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.v1 import common_pb2 as pb
from evenkeel_moe.wire.values import encode_placement
from tests.adapters.redis.conftest import client, noted, store, unreadable, windows
from tests.contracts.conftest import valkey
from tests.contracts.test_stores import fetch, make_window
from tests.controller.replicas import DEMO, Replica, make_health
from tests.protocol.machines import BASE, SHAPE, plan_of

__all__ = ["client", "noted", "store", "unreadable", "valkey", "windows"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PREFIX = f"evenkeel:{{{DEMO}}}:"
DEEP = b"[" * 100_000 + b"]" * 100_000
NESTED = b'{"frozen_until": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"
EXPANDING = b'{"rows": [' + b"[]," * 1_000 + b"[]]}"
POLICY = {"mode": "propose"}
CONTROL = {"held": False, "frozen_until": 0.0}
AUDIT: dict[str, Any] = {
    "id": "x",
    "deployment": DEMO,
    "by": "ann",
    "role": "admin",
    "method": "PATCH",
}
AUDIT |= {"path": "/p", "status": 200}
ROW = {"at": 1.0, "reason": "no_change", "plan_id": None, "numbers": {}, "detail": ""}


def form_of(data: bytes) -> dict:
    return json.loads(zstandard.ZstdDecompressor().decompress(data))


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def packed(body) -> bytes:
    return compressed(json.dumps(body).encode())


ROWS = ({"at": 1.0, "event": "created"},)
RECORD = PlanRecord(plan_of(1, "p"), PlanPhase.PROPOSED, Reason.PLAN_PROPOSED, 0, 1.0, story=ROWS)
SMALL, MAPS = form_of(pack_plan_record(RECORD)), pack_plan_maps(RECORD.plan)
STORY = pack_story_row(ROWS[0])
SIZES = shape_document(Generation("g1"), SHAPE)["shape"]
DOCUMENTS = {
    "control": [
        b'{"held": false, "frozen_until": null}',
        b'{"held": false, "frozen_until": [1]}',
        b'{"held": 0, "frozen_until": NaN}',
        NESTED,
        b"[1]",
        b'{"frozen_until": 1' + b"0" * 400 + b"}",
    ],
    "policy": [
        DEEP,
        b'{"limits": [1], "thresholds": 3}',
        b'{"policy_options": {"keel": {"x": []}}}',
        b'{"limits": {"max_moves": {}}}',
        b'{"policy": "\\ud800"}',
        b'{"schedule": {"windows": [1, 2]}}',
        b'{"mode": []}',
    ],
    "leader": [NESTED, b"7", b"\xff", b'{"replica_id": "a", "address": 1e999'],
    "shape": [
        b'{"generation": "g1", "shape": {"num_layers": "2"}}',
        b'{"generation": [], "shape": 3}',
        json.dumps({"generation": "g1", "shape": SIZES | {"num_layers": 1 << 40}}).encode(),
        json.dumps({"generation": "g1", "shape": SIZES | {"top_k": True}}).encode(),
    ],
    "audit": [
        EXPANDING,
        b'{"rows": [1, null, "x"]}',
        b'{"rows": [{"at": 1.0}, {"id": 3}]}',
        b'{"rows": [{"id": "x", "at": "noon"}]}',
        json.dumps({"rows": [AUDIT | {"at": 10**400}]}).encode(),
        json.dumps({"rows": [AUDIT | {"status": math.nan}]}).encode(),
        b'{"rows": 5}',
    ],
}
"""Bad values of each document. A round takes the next one of each."""
PLAN_FLAWS: list[dict[str, Any]] = [
    {"plan_id": 4},
    {"plan_id": "q"},
    {"deployment": "other"},
    {"expires_at": "noon"},
    {"created_at": math.inf},
    {"numbers": {"gain": "much"}},
    {"policy": ["keel"]},
]


def map_with(**changes: Any) -> bytes:
    """Return a stored placement with other fields."""
    form = encode_placement(BASE)
    for name, value in changes.items():
        setattr(form, name, value)
    return compressed(form.SerializeToString())


def maps_with(change: Callable[[pb.PlanMaps], object]) -> bytes:
    """Return the stored maps of the plan with a change."""
    form = pb.PlanMaps.FromString(zstandard.ZstdDecompressor().decompress(MAPS))
    change(form)
    return compressed(form.SerializeToString())


MAP_FLAWS = [
    maps_with(change)
    for change in (
        lambda form: setattr(form.target, "num_ranks", 3),
        lambda form: setattr(form.target, "num_logical_experts", 9),
        lambda form: setattr(form.base, "num_layers", 1 << 30),
        lambda form: form.ClearField("base"),
        lambda form: form.waves[0].layers.__setitem__(0, 70),
        lambda form: form.waves[0].layers.append(0),
        lambda form: form.waves[0].ClearField("layers"),
        lambda form: setattr(form.waves[0], "num_slots", 1 << 30),
        lambda form: setattr(form.waves[0], "index", 3),
        lambda form: setattr(form.waves[0], "rows", b"\x7f" * len(form.waves[0].rows)),
        lambda form: setattr(form.waves[0].batches[0].transfers[0], "dst_slot", 1 << 30),
        lambda form: form.waves[0].batches.extend([pb.Batch()] * 100),
    )
]
RECORD_FLAWS: list[dict[str, Any]] = [
    {"error": [1]},
    {"version": 2},
    {"waves_committed": -1},
    {"waves_committed": 9},
    {"waves_committed": math.inf},
    {"phase": {}},
    {"delivered": {"at": "x"}},
]
BODIES = [
    b"\0noise",
    b"",
    zstandard.ZstdCompressor().compress(DEEP),
    zstandard.ZstdCompressor().compress(EXPANDING),
    packed([1]),
]
EPOCHS = {
    b"newest": pack_placement(BASE),
    b"-4": pack_placement(BASE),
    b"\xff": pack_placement(BASE),
    b"9" * 40: pack_placement(BASE),
    b"3": DEEP,
    b"4": b"{}",
    b"5": map_with(num_ranks=3),
    b"6": map_with(num_logical_experts=0),
    b"7": map_with(num_ranks=0),
    b"8": map_with(num_layers=1 << 31, num_slots=1 << 31),
}
DECISIONS = [
    b"[1]",
    b"\xff\xff",
    DEEP,
    b'{"numbers": {"time_balance": "x"}}',
    b'{"numbers": [1]}',
    EXPANDING,
    b'{"numbers": {}}',
    *(
        json.dumps({"reason": "no_change"} | flaw).encode()
        for flaw in (
            {},
            {"at": 10**400},
            {"at": math.nan},
            {"at": "1.0"},
            {"at": None},
            {"at": 1.0, "reason": None},
            {"at": 1.0, "reason": 7},
            {"at": 1.0, "numbers": {"window_steps": "7"}},
        )
    ),
]
TERMS = [b"soon", b"1e999", b"99999999999999999", b"-3"]


def bad_plans() -> dict[str, tuple[bytes, bytes, bytes]]:
    """Return record, maps and story row of bad plans by name."""
    found: list[tuple[bytes, bytes, bytes]] = []

    def add(flaw: Any, maps: bytes = MAPS, story: bytes = STORY) -> None:
        plan = SMALL["plan"] | {"plan_id": f"flaw{len(found)}"} | flaw.get("plan", {})
        found.append((packed(SMALL | flaw | {"plan": plan}), maps, story))

    for flaw in PLAN_FLAWS:
        add({"plan": flaw})
    for flaw in RECORD_FLAWS:
        add(flaw)
    for spoiled in MAP_FLAWS:
        add({}, spoiled)
    for body in BODIES:
        found.append((body, MAPS, STORY))
        add({}, body)
        add({}, story=body)
    return {f"flaw{number}": parts for number, parts in enumerate(found)}


async def fill(client, store, windows) -> None:
    """Store a sound record of every kind, as a leader does."""
    await client.flushall()
    lease = await store.acquire_lease(DEMO, "a", 60.0, 4)
    for name, body in (
        ("leader", {"replica_id": "a", "address": "a:1"}),
        ("policy", POLICY),
        ("control", CONTROL),
        ("shape", shape_document(Generation("g1"), SHAPE)),
    ):
        await store.store_document(DEMO, name, body, lease.term)
    for epoch in (1, 0):
        await store.store_epoch(DEMO, Epoch(epoch), BASE, lease.term)
    await store.store_plan(RECORD, lease.term)
    await store.append_decision(DEMO, ROW)
    await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True, shape=SHAPE))
    await store.release_lease(DEMO, lease)


async def damage(client, turn: int) -> None:
    """Store bad records of every kind beside the sound ones."""
    for name, values in DOCUMENTS.items():
        await client.hset(PREFIX + "documents", name, values[turn % len(values)])
    for name, (small, maps, row) in bad_plans().items():
        await client.hset(PREFIX + "plans", name, small)
        await client.hset(PREFIX + "plan_maps", name, maps)
        await client.hset(PREFIX + "plan_story", name, row)
        await client.zadd(PREFIX + "plan_order", {name: 5.0})
        await client.hset(PREFIX + "plans_open", name, 1)
    await client.zadd(PREFIX + "plan_order", {b"\xff\xff": 5.0})
    await client.hset(PREFIX + "plans_open", b"\xff\xfe", 1)
    await client.hset(PREFIX + "epochs", mapping=EPOCHS)
    for epoch, placement in EPOCHS.items():
        await client.lpush(PREFIX + "replaced_epochs", epoch + b" " + placement, epoch)
    for row in DECISIONS:
        await client.xadd(PREFIX + "decisions", {"d": row})
    await client.xadd(PREFIX + "decisions", {"x": b"no row"})
    await client.zadd("evenkeel:seen", {b"\xff": 5e9, b"a b/../c": 5e9})
    await client.set(PREFIX + "term", TERMS[turn % len(TERMS)])


class Seen(NamedTuple):
    """What a replica made of the records."""

    noted: set[str]
    """Keys and names of the records it could not read."""
    plans: set[PlanId]
    held: bool
    decisions: list[str]


async def lead_and_look(client) -> Seen:
    """Lead the deployment with two ranks, and read all that a replica shows of it."""
    health = make_health()
    store = RedisDeploymentStore(client, unreadable=health.unreadable)
    windows = RedisWindowStore(client, unreadable=health.unreadable)
    replica = Replica(store, "a", windows=windows)
    replica.registry.shared.health.unreadable = health.unreadable  # type: ignore[method-assign]
    try:
        await take_up_deployments(replica.registry)
        await replica.lead()
        operations, clock = replica.operations, SystemClock()
        assert (await operations.deployment(DEMO)).status().state == "ready"
        await operations.plans(DEMO, 50)
        await operations.decisions(DEMO, 50)
        await operations.policy(DEMO)
        await operations.epochs(DEMO)
        await operations.led_elsewhere()
        for name in (PlanId("p"), PlanId("none")):
            try:
                await operations.plan(DEMO, name)
            except EvenkeelError as error:
                assert error.reason is Reason.NOT_FOUND
        await AuditLog(store, health, clock).rows(DEMO, 50)
        await operations.audit(DEMO, 50)
        await replica.member.loads.store_windows(lambda: replica.member.leadership.term)
        assert replica.member.leadership.term < 1 << 52
        known = {record.plan.plan_id for record in (await operations.plans(DEMO, 50))[0]}
        reasons = [str(row.get("reason")) for row in await operations.decisions(DEMO, 50)]
        seen = Seen(health._unreadable, known, replica.member.control.held, reasons)
    finally:
        await replica.tasks.end()
    assert not replica.registry.failures._newest, "a part of the deployment failed"
    return seen


async def test_bad_records_are_skipped_counted_and_never_fatal(client, store, windows):
    for turn in range(max(map(len, DOCUMENTS.values()))):
        await fill(client, store, windows)
        await damage(client, turn)
        seen = await lead_and_look(client)
        said = " ".join(seen.noted)
        bad_epochs = (f"epochs {name!r}" for name in EPOCHS.keys() - {b"5"})
        for name in (*bad_plans(), *bad_epochs, *DOCUMENTS):
            assert re.search(rf"[ :]{re.escape(name)}", said), (name, turn)
        assert sum("replaced_epochs" in where for where in seen.noted) == len(EPOCHS)
        assert sum("decisions" in where for where in seen.noted) == len(DECISIONS) + 1
        assert sum("seen" in where for where in seen.noted) == 2
        assert seen.plans == {"p"}, "the sound one is still there"


async def test_sound_records_are_all_read(client, store, windows):
    await fill(client, store, windows)
    seen = await lead_and_look(client)
    assert not seen.noted and not seen.held


async def test_chunks_and_sums_that_cannot_be_read_are_named(client):
    health = make_health()
    windows = RedisWindowStore(client, unreadable=health.unreadable)
    await windows.append(DEMO, Phase.DECODE, make_window(range(3)))
    falling = pack_window(make_window([9, 7, 8]))
    for number, body in enumerate((b"noise", falling, falling[:40]), 1):
        await client.xadd(
            PREFIX + "window:decode", {"n": 1, "d": body}, id=f"9999999999999-{number}"
        )
    await client.set(PREFIX + "window_source:decode", b"noise")
    found = await fetch(windows, DEMO)
    assert found is not None and found.steps.tolist() == [0, 1, 2]
    assert len(health._unreadable) == 4


async def test_deployment_whose_freeze_cannot_be_read_is_held(client, store, windows):
    await fill(client, store, windows)
    await client.hset(PREFIX + "documents", "control", DOCUMENTS["control"][0])
    seen = await lead_and_look(client)
    assert seen.held
    assert "held_after_data_loss" in seen.decisions


VALUES = (None, True, -1, 0, 3, 1 << 70, 1.5, float("nan"), 1e308, "", "x", "\ud800", [], [[]], {})


def mangled(rng: random.Random, value):
    """Return a JSON value with one part of it replaced by another value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        return value | {name: mangled(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mangled(rng, value[place]), *value[place + 1 :]]
    return rng.choice(VALUES)


@pytest.mark.parametrize("part", range(2))
async def test_mangled_records_are_never_fatal(client, store, windows, part):
    """Each part of each record becomes a value of another type, some at a time."""
    rng = random.Random(part)
    rows = {"rows": [{"at": 1e18, "id": "i", "name": "n", "digest": "d", "status": 200}]}
    for _ in range(12):
        await fill(client, store, windows)
        policy = await store.fetch_document(DEMO, "policy")
        shape = shape_document(Generation("g1"), SHAPE)
        for name, body in (
            ("policy", policy),
            ("control", CONTROL | {"judged_from": 3.0, "held_because": "x"}),
            ("leader", {"replica_id": "a", "address": "a:1"}),
            ("shape", shape),
            ("audit", rows),
        ):
            text = json.dumps(mangled(rng, body)).encode()
            await client.hset(PREFIX + "documents", name, text)
        await client.hset(PREFIX + "plans", "p", packed(mangled(rng, SMALL)))
        await client.hset(PREFIX + "plan_story", "p", packed(mangled(rng, ROWS[0])))
        await client.xadd(PREFIX + "decisions", {"d": json.dumps(mangled(rng, ROW)).encode()})
        await lead_and_look(client)
