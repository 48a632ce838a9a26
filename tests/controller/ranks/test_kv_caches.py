"""The KV tokens that were promised survive restarts of the group and of the controller."""

from dataclasses import replace

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.wire.link import Heartbeat, KvCache
from tests.controller.replicas import DEMO, replicas
from tests.protocol.machines import SHAPE

LARGER = replace(SHAPE, slots_per_rank=4)
"""One slot more in each of 2 layers: 20 bytes of experts."""
TOKEN = 2
"""Bytes."""


async def serve(replica, first, shape=SHAPE, told=(200, 180), highest_term=0):
    """Start a group whose ranks tell KV caches of so many bytes; return its sessions."""
    generation = f"g{first}"
    sessions = await replica.lead(
        generation,
        first,
        highest_term,
        shape=shape,
        placement_digest=Placement.initial(shape).digest,
    )
    for session, nbytes in zip(sessions, told, strict=False):
        session.received(KvCache(TOKEN, nbytes))
    await replica.member.store_windows()
    return sessions


def stop(sessions):
    for session in sessions:
        session.received(Heartbeat(1, 1, 1, stopping=True))
        session.lost()


def tokens(replica):
    """Return the tokens that were promised, and those that the engine reports."""
    found = replica.member.planner.recommender.kv.promise()
    return found and (found.promised_tokens, found.reported_tokens)


async def test_the_smallest_cache_is_known_once_every_rank_told_its_own():
    async with replicas("a") as (one, _):
        sessions = await serve(one, 1, told=(200,))
        kv = one.member.planner.recommender.kv
        assert kv.smallest() is None
        sessions[1].received(KvCache(TOKEN, 180))
        assert kv.smallest() == KvMemory(TOKEN, 180)


async def test_a_promise_outlives_the_group_and_the_controller():
    async with replicas("a", "b") as (one, two, store):
        sessions = await serve(one, 1)
        assert tokens(one) is None
        stop(sessions)
        sessions = await serve(one, 11, LARGER, (), one.member.leadership.term)
        assert tokens(one) == (80, None)
        for session, nbytes in zip(sessions, (170, 156), strict=True):
            session.received(KvCache(TOKEN, nbytes))
        assert tokens(one) == (80, 78)
        await one.member.store_windows()
        await one.yield_lease(sessions)
        # Another replica, which never saw the first group.
        await serve(two, 11, LARGER, (170, 156), 1)
        assert tokens(two) == (80, 78)


async def test_a_promise_is_stored_again_where_the_store_lost_it():
    async with replicas("a") as (one, store):
        sessions = await serve(one, 1)
        stop(sessions)
        await serve(one, 11, LARGER, (170, 156), one.member.leadership.term)
        kept = await store.fetch_document(DEMO, "kv_cache")
        assert kept
        del store._documents[DEMO, "kv_cache"]
        await one.lose(store, seen=False)
        await one.member.store_windows()
        assert await store.fetch_document(DEMO, "kv_cache") == kept
        assert tokens(one) == (80, 78)


async def test_a_damaged_record_promises_nothing():
    async with replicas("a") as (one, store):
        await store.store_document(DEMO, "kv_cache", {"newest": {"free_bytes": "many"}}, 0)
        await serve(one, 1, LARGER, (170, 156))
        assert tokens(one) is None
