"""The operator's settings over restarts, takeovers, and a store that lost its data."""

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.policy import Mode
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import DEMO, replicas
from tests.waiting import until


def flush(store):
    for kept in (store._leases, store._terms, store._plans, store._epochs, store._documents):
        kept.clear()
    store._decisions.clear()
    store._windows.clear()


def orders(replica):
    control = replica.member.control
    return control.policy.mode, control.held, control.frozen_until > 0


async def hold(replica):
    """Hold automatic plans, as a rollback does."""

    def change(_now):
        replica.member.control.as_leader.planning_loop.hold = Hold(Reason.HELD_AFTER_ROLLBACK)
        return None, replica.member.control.write_retry.order([replica.member.control.document()])

    await replica.member.driver.call(change)


async def test_a_flushed_store_undoes_nothing_an_operator_set():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead()
        await one.operations.set_policy(DEMO, {"mode": "observe"}, "eve")
        await one.operations.freeze(DEMO, 3600.0, "eve")
        await hold(one)
        term = one.member.leadership.term
        flush(store)
        await until(
            lambda: one.member.leadership.term > term and one.member.control.state == "ready"
        )
        assert orders(one) == (Mode.OBSERVE, True, True)
        stored = await store.fetch_document(DEMO, "policy")
        assert stored is not None and stored["mode"] == "observe"
        control = await store.fetch_document(DEMO, "control")
        assert control["held"] and control["frozen_until"] > 0
        await until(lambda: _said(one, "stay as they were"))
        # The store also learns again whose steps it holds.
        await one.member.store_windows()
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g1"


async def _said(replica, words):
    return any(
        words in row.get("detail", "") for row in await replica.operations.decisions(DEMO, 100)
    )


async def test_a_new_process_on_an_emptied_store_holds_automatic_plans_and_says_so():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead(highest_term=7)
        assert orders(one) == (Mode.AUTO, True, False)
        assert one.member.leadership.term > 7
        control = await store.fetch_document(DEMO, "control")
        assert control["held"] and control["held_because"] == "held_after_data_loss"
        await until(lambda: _said(one, "held until resume"))
        await one.operations.resume(DEMO, "eve")
        assert not one.member.control.held


async def test_a_replica_that_led_earlier_does_not_trust_its_memory():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, store):
        sessions = await one.lead()
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.leadership.term)
        await hold(two)
        flush(store)
        await two.tasks.end()
        await one.lead(first=21, highest_term=two.member.leadership.term)
        assert orders(one) == (Mode.AUTO, True, False)


async def test_what_is_stored_beats_what_a_replica_remembers():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, _):
        sessions = await one.lead()
        await hold(one)
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.leadership.term)
        assert two.member.control.held
        await two.operations.resume(DEMO, "eve")
        await two.yield_lease(sessions)
        await one.lead(first=21, highest_term=two.member.leadership.term)
        assert not one.member.control.held


@pytest.mark.parametrize("again", [False, True])
async def test_a_new_deployment_is_held_by_nothing(again):
    async with replicas("a", mode=Mode.AUTO) as (one, _):
        sessions = await one.lead()
        if again:
            await one.yield_lease(sessions)
            await one.lead(first=11, highest_term=one.member.leadership.term)
        assert orders(one) == (Mode.AUTO, False, False)
        assert not [row for row in await one.operations.decisions(DEMO, 100) if "detail" in row]


async def test_an_order_the_store_did_not_take_is_not_led_without(monkeypatch):
    store = MemoryStore(SystemClock())
    async with replicas("a", store=store) as (one, _):
        await one.lead()
        await one.operations.set_policy(DEMO, {"mode": "observe"}, "me")
        flush(store)
        refused, keep = [], store.store_document

        async def refuses(deployment, name, body, term, *lasting):
            if name == "policy" and len(refused) < 2:
                refused.append(term)
                raise Unavailable("a timeout")
            await keep(deployment, name, body, term, *lasting)

        monkeypatch.setattr(store, "store_document", refuses)
        await until(lambda: len(refused) == 2 and one.member.control.state == "ready")
        stored = await store.fetch_document(DEMO, "policy")
        assert stored is not None and stored["mode"] == "observe"
