"""The contract of the stores, checked for every implementation."""

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.errors import Conflict, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, Generation, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord, Transfer, Wave
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.ports.stores import Lease
from tests.contracts.conftest import CAPACITY, EPOCHS_KEPT, PLANS_KEPT
from tests.waiting import until

DEMO, OTHER = DeploymentId("demo"), DeploymentId("other")
BASE = Placement(np.array([[0, 1, 2, -1], [2, 1, 0, 1]], np.int32), 2, 3)
TARGET = Placement(np.array([[0, 1, 2, 0], [2, 1, 0, 1]], np.int32), 2, 3)


def make_record(plan_id="p1", created_at=100.0, **changes) -> PlanRecord:
    wave = Wave(0, (0,), TARGET.phy2log[:1].copy(), ((Transfer(0, 0, 0, 3, 1 << 33),), ()))
    plan = Plan(
        plan_id=PlanId(plan_id),
        deployment=DEMO,
        kind=PlanKind.AUTOMATIC,
        policy="eplb",
        reason=Reason.LOAD_CHANGED,
        generation=Generation("g"),
        weights_version=3,
        base_epoch=Epoch(7),
        base=BASE,
        target=TARGET,
        waves=(wave,),
        created_at=created_at,
        expires_at=200.0,
        numbers={"gain": 0.25},
    )
    record = PlanRecord(
        plan,
        PlanPhase.PROPOSED,
        Reason.PLAN_PROPOSED,
        0,
        created_at,
        story=({"at": 1.5, "event": "created"},),
    )
    return dataclasses.replace(record, **changes)


def form(value):
    """Return a value with plain lists and dicts, which compare by value."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return tuple(form(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Placement):
        return {f.name: form(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


WINDOW_SHAPE = ModelShape(2, 3, 2, 2, 1, 1)
"""The shape of `make_window`, unless it is told another."""


def make_window(steps, *, seed=0, source=False, high=500, shape=WINDOW_SHAPE):
    rng = np.random.default_rng(seed)
    length = len(steps)
    layers, experts, ranks = shape.num_layers, shape.num_logical_experts, shape.num_ranks
    compute_s = rng.random((length, ranks))
    compute_s[::3] = math.nan
    return LoadWindow(
        rng.integers(0, high, (length, layers, experts)).astype(np.uint32),
        np.array(steps, np.int64),
        rng.integers(0, 9, length),
        rng.integers(0, 99, (length, ranks)),
        compute_s,
        rng.integers(0, 9, (ranks, layers, experts)).astype(np.uint32) if source else None,
    )


def make_decision(cycle: int) -> dict:
    return {"at": 1.0, "reason": "no_change", "cycle": cycle}


async def fetch(windows, deployment=DEMO, phase=Phase.DECODE, shape=WINDOW_SHAPE, most=512):
    return await windows.fetch(deployment, phase, shape, most)


def assert_same(one, other):
    for field in dataclasses.fields(LoadWindow):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        assert (mine is None) == (its is None), field.name
        if mine is not None:
            assert mine.dtype == its.dtype, field.name
            np.testing.assert_array_equal(mine, its, err_msg=field.name)


# --- leases ------------------------------------------------------------------------------------


async def test_one_holder_wins_and_the_reply_is_the_lease_in_force(store):
    answers = await asyncio.gather(*(store.acquire_lease(DEMO, f"c{n}", 60.0, 0) for n in range(5)))
    assert len(set(answers)) == 1
    assert answers[0].term == 1


async def test_every_new_lease_has_a_higher_term(store):
    first = await store.acquire_lease(DEMO, "a", 60.0, 0)
    again = await store.acquire_lease(DEMO, "a", 60.0, 0)
    assert (first, again) == (Lease("a", 1), Lease("a", 2))
    await store.release_lease(DEMO, again)
    assert await store.acquire_lease(DEMO, "b", 60.0, 0) == Lease("b", 3)


async def test_the_term_rises_above_what_ranks_know(store):
    assert (await store.acquire_lease(DEMO, "a", 60.0, 41)).term == 42
    assert (await store.acquire_lease(DEMO, "a", 60.0, 7)).term == 43


async def test_only_the_holder_renews_and_releases(store):
    lease = await store.acquire_lease(DEMO, "a", 60.0, 0)
    assert await store.renew_lease(DEMO, lease, 60.0)
    assert not await store.renew_lease(DEMO, Lease("a", 9), 60.0)
    assert not await store.renew_lease(DEMO, Lease("b", 1), 60.0)
    await store.release_lease(DEMO, Lease("b", 1))
    assert await store.acquire_lease(DEMO, "b", 60.0, 0) == lease


async def test_a_lease_can_be_read_while_it_is_held(store):
    assert await store.fetch_lease(DEMO) is None
    lease = await store.acquire_lease(DEMO, "a", 60.0, 0)
    await store.acquire_lease(DEMO, "b", 60.0, 0)
    assert await store.fetch_lease(DEMO) == lease
    assert await store.fetch_lease(OTHER) is None
    await store.release_lease(DEMO, lease)
    assert await store.fetch_lease(DEMO) is None
    brief = await store.acquire_lease(DEMO, "b", 0.02, 0)
    assert brief == Lease("b", 2)

    async def expired() -> bool:
        return await store.fetch_lease(DEMO) is None

    await until(expired, every_s=0.01)


async def test_an_expired_lease_is_free_and_cannot_be_renewed(store):
    lease = await store.acquire_lease(DEMO, "a", 0.02, 0)

    async def taken() -> bool:
        return await store.acquire_lease(DEMO, "b", 60.0, 0) != lease

    await until(taken, every_s=0.01)
    assert await store.fetch_lease(DEMO) == Lease("b", 2)
    assert not await store.renew_lease(DEMO, lease, 60.0)


async def test_deployments_have_leases_of_their_own(store):
    await store.acquire_lease(DEMO, "a", 60.0, 5)
    assert await store.acquire_lease(OTHER, "b", 60.0, 0) == Lease("b", 1)
    assert await store.deployments() == [DEMO, OTHER]
    await store.unlist(OTHER)
    assert await store.deployments() == [DEMO]
    await store.acquire_lease(OTHER, "b", 60.0, 0)
    assert await store.deployments() == [DEMO, OTHER]


async def test_a_lease_that_is_not_lasting_lists_nothing_until_it_is_renewed_as_lasting(store):
    new = await store.acquire_lease(DEMO, "a", 60.0, 0, False)
    assert (new.term, new.lasting) == (1, False)
    await store.store_document(DEMO, "leader", {"address": "a:1"}, 1, False)
    assert await store.renew_lease(DEMO, new, 60.0)
    again = await store.acquire_lease(DEMO, "a", 60.0, 0, False)
    assert (again.term, again.lasting) == (2, False)
    assert await store.deployments() == []
    assert not await store.has_records(DEMO)
    assert await store.renew_lease(DEMO, dataclasses.replace(again, lasting=True), 60.0)
    assert await store.deployments() == [DEMO]


async def test_a_lease_is_lasting_where_records_are(store):
    for name, store_record in (
        ("epoch", lambda name: store.store_epoch(name, Epoch(0), BASE, 1)),
        ("document", lambda name: store.store_document(name, "policy", {}, 1)),
    ):
        deployment = DeploymentId(name)
        lease = await store.acquire_lease(deployment, "a", 60.0, 0, False)
        await store_record(deployment)
        assert not (await store.acquire_lease(OTHER, "a", 60.0, 0, False)).lasting
        assert (await store.acquire_lease(deployment, "b", 60.0, 0, False)).lasting
        await store.release_lease(deployment, lease)
        assert (await store.acquire_lease(deployment, "b", 60.0, 0, False)).lasting
        assert deployment in await store.deployments()
        assert await store.has_records(deployment) is (name == "epoch")


async def test_a_lease_is_dropped_with_what_was_written_under_it_by_its_holder_alone(store):
    lease = await store.acquire_lease(DEMO, "a", 60.0, 4, False)
    await store.store_document(DEMO, "leader", {"address": "a:1"}, lease.term, False)
    await store.drop_lease(DEMO, Lease("b", lease.term))
    assert await store.fetch_lease(DEMO) == lease
    await store.drop_lease(DEMO, lease)
    assert await store.fetch_lease(DEMO) is None
    assert await store.fetch_document(DEMO, "leader") is None
    assert (await store.acquire_lease(DEMO, "b", 60.0, 0, False)).term == 1


async def test_the_store_tells_its_time(store):
    before = SystemClock().unix()
    assert before - 1.0 <= await store.unix() <= SystemClock().unix() + 1.0


# --- fenced records ----------------------------------------------------------------------------


async def every_plan(store, deployment=DEMO):
    order = await store.plan_order(deployment)
    return await store.fetch_plans(deployment, [plan_id for plan_id, _ in order])


async def test_a_plan_is_read_as_it_was_stored(store):
    record = make_record(approved_by="eve", request_digest="d", error="x", waves_committed=1)
    await store.store_plan(record, 1)
    (found,) = await store.fetch_plans(DEMO, [record.plan.plan_id])
    assert form(found) == form(record)
    assert await store.plan_order(OTHER) == []
    assert await store.fetch_plans(OTHER, [record.plan.plan_id]) == []


async def test_plans_come_newest_first_and_are_replaced_whole(store):
    for number in range(4):
        await store.store_plan(make_record(f"p{number}", 100.0 + number), 1)
    await store.store_plan(make_record("p1", 101.0, phase=PlanPhase.COMMITTED), 1)
    await store.store_plan(make_record("same-time", 101.0), 1)
    order = await store.plan_order(DEMO)
    assert order == [
        ("p3", 103.0),
        ("p2", 102.0),
        ("same-time", 101.0),
        ("p1", 101.0),
        ("p0", 100.0),
    ]
    found = await store.fetch_plans(DEMO, [PlanId("p0"), PlanId("gone"), PlanId("p1")])
    assert [record.plan.plan_id for record in found] == ["p0", "p1"]
    assert found[1].phase is PlanPhase.COMMITTED
    assert await store.fetch_plans(DEMO, []) == []


async def test_open_plans_are_those_that_have_not_ended(store):
    assert await store.open_plans(DEMO) == []
    for name in ("b", "a", "ends"):
        await store.store_plan(make_record(name), 1)
    await store.store_plan(make_record("b", phase=PlanPhase.MIGRATING), 1)
    await store.store_plan(make_record("ends", phase=PlanPhase.EXPIRED), 1)
    await store.store_plan(make_record("ended", phase=PlanPhase.REFUSED), 1)
    assert await store.open_plans(DEMO) == ["a", "b"]
    assert await store.open_plans(OTHER) == []


def carried_out(record: PlanRecord, waves: int) -> PlanRecord:
    """Return a plan of so many waves with the story that a leader of 32 ranks writes for it."""
    took = [{"rank": r, "voted_s": 0.5, "swapped_s": None, "stall_s": 1e-3} for r in range(32)]
    story = list(record.story)
    for index in range(waves):
        story.append({"at": 2.0, "event": "wave_started", "detail": f"{index}", "ranks": took})
        story.append({"at": 3.0, "event": "wave_committed", "waves_committed": index + 1})
    one = record.plan.waves[0]
    many = tuple(dataclasses.replace(one, index=index) for index in range(waves))
    plan = dataclasses.replace(record.plan, waves=many)
    return dataclasses.replace(
        record,
        plan=plan,
        phase=PlanPhase.MIGRATING,
        waves_committed=waves,
        updated_at=9.0,
        story=tuple(story),
    )


LONG_PLAN = pytest.mark.fault(
    "a fleet with a plan of hundreds of waves",
    "the plan was written and could not be read, so a new leader skipped its own active plan",
)


@LONG_PLAN
async def test_a_plan_of_two_thousand_waves_is_read_as_it_was_last_written(store):
    whole = carried_out(make_record(), 2000)
    for rows in (1, 3, 4, 3999, 4001):
        # The figures of a wave are entered into an earlier row once it has ended.
        story = tuple(
            row | {"noted": rows} if at == rows - 1 else row
            for at, row in enumerate(whole.story[:rows])
        )
        record = dataclasses.replace(whole, waves_committed=rows // 2, story=story)
        await store.store_plan(record, 1)
        (found,) = await store.fetch_plans(DEMO, [record.plan.plan_id])
        assert found.story == story and found.waves_committed == rows // 2
    assert form(found) == form(record)


async def test_plans_without_waves_or_transfers_are_read_as_they_were_stored(store):
    few = make_record("few")
    for waves in ((), (dataclasses.replace(few.plan.waves[0], batches=()),)):
        record = dataclasses.replace(few, plan=dataclasses.replace(few.plan, waves=waves))
        await store.store_plan(record, 1)
        (found,) = await store.fetch_plans(DEMO, [few.plan.plan_id])
        assert form(found) == form(record)


TRIMMED = pytest.mark.fault(
    "an operator who made many dry runs beside a plan that ran",
    "the store dropped the plan that ran, and dropped it again at each write",
)


@TRIMMED
async def test_plans_that_have_not_ended_are_never_dropped_and_of_the_others_the_oldest(store):
    active = make_record("active", 100.0, phase=PlanPhase.PAUSED)
    await store.store_plan(active, 1)
    for number in range(2 * PLANS_KEPT):
        dry = make_record(f"dry{number}", 200.0 + number, phase=PlanPhase.EXPIRED)
        await store.store_plan(dry, 1)
    await store.store_plan(dataclasses.replace(active, phase=PlanPhase.MIGRATING), 1)
    assert await store.open_plans(DEMO) == ["active"]
    newest = [f"dry{2 * PLANS_KEPT - n}" for n in range(1, PLANS_KEPT)]
    assert [name for name, _ in await store.plan_order(DEMO)] == [*newest, "active"]
    assert [record.plan.plan_id for record in await every_plan(store)] == [*newest, "active"]


@TRIMMED
async def test_more_open_plans_than_are_kept_all_stay_and_the_rest_goes(store):
    names = [f"open{number}" for number in range(2 * PLANS_KEPT)]
    for number, name in enumerate(names):
        await store.store_plan(make_record(f"dry{number}", number, phase=PlanPhase.EXPIRED), 1)
        await store.store_plan(make_record(name, 100.0 + number), 1)
    assert await store.open_plans(DEMO) == sorted(names)
    assert len(await every_plan(store)) == len(names)
    ends = make_record(names[0], 100.0, phase=PlanPhase.CANCELLED)
    await store.store_plan(ends, 1)
    assert {record.plan.plan_id for record in await every_plan(store)} == set(names[1:])


async def test_a_leader_of_an_older_term_cannot_write(store):
    old = await store.acquire_lease(DEMO, "a", 60.0, 0)
    await store.release_lease(DEMO, old)
    new = await store.acquire_lease(DEMO, "b", 60.0, 0)
    writes = (
        lambda term: store.store_plan(make_record(), term),
        lambda term: store.store_epoch(DEMO, Epoch(1), BASE, term),
        lambda term: store.store_document(DEMO, "policy", {}, term),
    )
    for write in writes:
        with pytest.raises(Conflict, match="term 2 has taken over from term 1") as caught:
            await write(old.term)
        assert caught.value.reason is Reason.LEASE_LOST
    assert await store.plan_order(DEMO) == []
    assert await store.fetch_epochs(DEMO) == {}
    assert await store.fetch_document(DEMO, "policy") is None
    for write in writes:
        await write(new.term)


async def test_a_write_of_a_higher_term_fences_lower_ones(store):
    await store.store_document(DEMO, "policy", {"mode": "auto"}, 8)
    with pytest.raises(Conflict):
        await store.store_document(DEMO, "policy", {"mode": "observe"}, 7)
    assert await store.fetch_document(DEMO, "policy") == {"mode": "auto"}
    assert (await store.acquire_lease(DEMO, "a", 60.0, 0)).term == 9


async def test_the_newest_epochs_are_kept_and_later_epochs_become_replaced_ones(store):
    for epoch in range(1, 8):
        await store.store_epoch(DEMO, Epoch(epoch), BASE, 1)
    assert list(await store.fetch_epochs(DEMO)) == [
        7 - EPOCHS_KEPT + n for n in range(1, EPOCHS_KEPT + 1)
    ]
    await store.store_epoch(DEMO, Epoch(5), TARGET, 1)
    epochs = await store.fetch_epochs(DEMO)
    assert list(epochs) == [4, 5]
    assert (epochs[4], epochs[5]) == (BASE, TARGET)
    assert await store.fetch_replaced_epochs(DEMO) == [(7, BASE), (6, BASE)]


async def test_all_epochs_become_replaced_ones_where_a_history_begins(store):
    for epoch in (1, 2):
        await store.store_epoch(DEMO, Epoch(epoch), BASE, 1)
    for _ in ("first", "repeated"):
        await store.store_epoch(DEMO, Epoch(2), TARGET, 1, begins_history=True)
        assert await store.fetch_epochs(DEMO) == {2: TARGET}
        assert await store.fetch_replaced_epochs(DEMO) == [(2, BASE), (1, BASE)]
    assert await store.fetch_replaced_epochs(OTHER) == []


async def test_the_last_replaced_epochs_are_kept(store):
    for epoch in range(2 * EPOCHS_KEPT):
        await store.store_epoch(DEMO, Epoch(epoch + 1), BASE, 1)
        await store.store_epoch(DEMO, Epoch(0), TARGET, 1, begins_history=True)
    replaced = await store.fetch_replaced_epochs(DEMO)
    assert replaced == [(2 * EPOCHS_KEPT - n, BASE) for n in range(EPOCHS_KEPT)]


async def test_documents_are_replaced_whole(store):
    await store.store_document(DEMO, "policy", {"a": 1, "b": [2]}, 1)
    await store.store_document(DEMO, "policy", {"b": {"c": None}}, 1)
    assert await store.fetch_document(DEMO, "policy") == {"b": {"c": None}}
    assert await store.fetch_document(DEMO, "shape") is None
    assert await store.fetch_document(OTHER, "policy") is None


async def test_decisions_come_newest_first(store):
    for cycle in range(5):
        await store.append_decision(DEMO, make_decision(cycle) | {"numbers": {"gain": 0.5}})
    found = await store.fetch_decisions(DEMO, 3)
    assert [row["cycle"] for row in found] == [4, 3, 2]
    assert [row["cycle"] for row in await store.fetch_decisions(DEMO, 1)] == [4]
    assert await store.fetch_decisions(DEMO, 0) == []
    assert await store.fetch_decisions(OTHER, 3) == []
    await store.ping()


async def test_a_decision_whose_write_is_repeated_is_stored_once(store):
    for cycle in (1, 2, 2, 3):
        await store.append_decision(DEMO, make_decision(cycle))
    assert [row["cycle"] for row in await store.fetch_decisions(DEMO, 9)] == [3, 2, 1]


# --- windows -----------------------------------------------------------------------------------


async def test_a_window_is_read_as_it_was_stored(windows):
    window = make_window(range(8))
    assert await fetch(windows, DEMO, Phase.DECODE) is None
    await windows.append(DEMO, Phase.DECODE, window.slice(slice(0, 3)))
    await windows.append(DEMO, Phase.DECODE, window.slice(slice(3, 8)))
    assert_same(await fetch(windows, DEMO, Phase.DECODE), window)
    assert await fetch(windows, DEMO, Phase.PREFILL) is None
    assert await fetch(windows, OTHER, Phase.DECODE) is None


async def test_parts_appended_together_are_one_window(windows):
    window = make_window(range(200))
    cuts = (slice(0, 3), slice(3, 3), slice(3, 90), slice(90, 91), slice(91, 200))
    await windows.append(DEMO, Phase.DECODE, *(window.slice(cut) for cut in cuts))
    assert_same(await fetch(windows, DEMO, Phase.DECODE), window.last(10))


async def test_large_counts_are_kept(windows):
    window = make_window(range(2), high=1 << 32)
    await windows.append(DEMO, Phase.MIXED, window)
    assert_same(await fetch(windows, DEMO, Phase.MIXED), window)


async def test_source_sums_are_the_newest_appended(windows):
    await windows.append(DEMO, Phase.DECODE, make_window(range(2), source=True))
    newest = make_window(range(2, 4), seed=1, source=True)
    await windows.append(DEMO, Phase.DECODE, newest)
    await windows.append(DEMO, Phase.DECODE, make_window(range(4, 6)))
    found = await fetch(windows, DEMO, Phase.DECODE)
    assert len(found) == 6
    np.testing.assert_array_equal(found.source, newest.source)


@pytest.mark.parametrize("sizes", [[1] * 40, [7] * 6, [45], [3, 1, 20, 2]])
async def test_a_window_has_the_newest_steps_for_any_sizes_of_parts(windows, sizes):
    window = make_window(range(sum(sizes)))
    first = 0
    for size in sizes:
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + size)))
        first += size
    assert_same(await fetch(windows, DEMO, Phase.DECODE), window.last(CAPACITY))


async def test_forget_deletes_all_phases_of_one_deployment(windows):
    for deployment in (DEMO, OTHER):
        for phase in (Phase.DECODE, Phase.PREFILL):
            await windows.append(deployment, phase, make_window(range(3), source=True))
    await windows.forget(DEMO)
    assert await fetch(windows, DEMO, Phase.DECODE) is None
    assert await fetch(windows, DEMO, Phase.PREFILL) is None
    assert await fetch(windows, OTHER, Phase.DECODE) is not None
    restarted = make_window(range(4))
    await windows.append(DEMO, Phase.DECODE, restarted)
    assert_same(await fetch(windows, DEMO, Phase.DECODE), restarted)
