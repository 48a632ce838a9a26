"""The lease is taken, kept, and dropped before another replica can have it."""

import asyncio

import pytest
import structlog

from evenkeel_moe.errors import Unavailable
from evenkeel_moe.ports.stores import Lease
from tests.contracts.memory_store import MemoryStore
from tests.controller.leadership.conftest import DEMO
from tests.waiting import deadline

LONGER_THAN_A_LEASE = 12
"""Renewals that take longer than a lease lasts."""


async def turns():
    """Let every task run that can run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_nobody_leads_what_nobody_wants(rig):
    keeper = rig.start("a")
    await turns()
    assert not rig.calls
    await keeper.decided(5)
    assert keeper.leading
    assert rig.happened == [("won", "a", 1)]


async def test_a_follower_knows_who_leads_and_takes_over_when_the_leader_is_gone(rig):
    one, two = rig.start("a"), rig.start("b")
    await one.decided(5)
    await two.decided(5)
    assert (one.leading, two.leading) == (True, False)
    assert two.winner == Lease("a", 1)
    await rig.after("renew_lease", LONGER_THAN_A_LEASE)
    assert not two.leading, "a lease that is renewed is not taken"
    await one.release()
    one.want = lambda: None  # type: ignore[method-assign]
    await rig.until(lambda: two.leading or one.leading)


async def test_leadership_waits_for_the_records(rig):
    keeper = rig.start("a", load_fails=2)
    await keeper.decided(5)
    assert keeper.leading
    assert rig.happened == [("won", "a", 3)]


async def test_a_lease_is_kept_while_the_records_are_read_for_longer_than_it_lasts(rig):
    rig.loaded.clear()
    one = rig.start("a")
    one.want()
    await rig.after("acquire_lease", 1)
    two = rig.start("b")
    two.want()
    await rig.after("renew_lease", LONGER_THAN_A_LEASE)
    rig.loaded.set()
    await rig.until(lambda: one.leading)
    assert not two.leading
    assert rig.happened == [("won", "a", 1)] or ("outrun", "b", "a") in rig.happened
    assert ("won", "b", 2) not in rig.happened


async def test_a_lease_lost_while_the_records_are_read_is_acquired_again(rig):
    rig.loaded.clear()
    keeper = rig.start("a")
    keeper.want()
    await rig.after("renew_lease", 1)
    await rig.store.release_lease(DEMO, Lease("a", 1))
    assert await rig.store.acquire_lease(DEMO, "b", 0.5, 0) == Lease("b", 2)
    await rig.after("renew_lease", 1)
    rig.loaded.set()
    await rig.until(lambda: keeper.leading)
    assert rig.happened[-1] == ("won", "a", 3)
    assert ("won", "a", 1) not in rig.happened


@pytest.mark.parametrize("refused", [False, True])
async def test_the_machine_is_informed_when_the_lease_fails_as_the_records_arrive(rig, refused):
    """R13: otherwise the machine leads without a lease, and gets the event to lead twice."""
    rig.loaded.clear()
    renew, renewals = rig.renew_lease, 0

    async def renew_lease(*arguments):
        nonlocal renewals
        renewals += 1
        if renewals > 1:
            return await renew(*arguments)
        rig.loaded.set()  # The records arrive while the renewal is on its way.
        await rig.until(lambda: rig.happened)
        if refused:
            return False
        raise Unavailable("timeout")

    rig.renew_lease = renew_lease
    keeper = rig.start("a")
    keeper.want()
    await rig.until(lambda: keeper.leading)
    told = [happened[0] for happened in rig.happened]
    assert told == ["won", "lost", "won"]


async def test_with_other_replicas_an_unreachable_store_costs_the_lease_before_it_runs_out(rig):
    keeper = rig.start("a")
    await keeper.decided(5)
    rig.down = True
    await rig.until(lambda: not keeper.leading)
    assert rig.happened[-1] == ("lost", "a")
    assert (await rig.store.acquire_lease(DEMO, "b", 1.0, 0)).holder in ("a", "b")
    rig.down = False
    await rig.until(lambda: keeper.leading or keeper.winner.holder == "b")


async def test_a_silent_store_costs_the_lease_before_it_runs_out(rig):
    keeper = rig.start("a")
    await keeper.decided(5)
    rig.silent = True
    await rig.until(lambda: not keeper.leading)
    assert rig.happened[-1] == ("lost", "a")
    # It was last renewed before the store went silent, so nobody else can have it yet.
    held = await rig.store.acquire_lease(DEMO, "b", 1.0, 0)
    assert held == Lease("a", 1)


async def test_alone_an_unreachable_store_costs_nothing(rig):
    keeper = rig.start("a", alone=True)
    await keeper.decided(5)
    rig.down = True
    await rig.after("renew_lease", LONGER_THAN_A_LEASE)
    assert keeper.leading
    rig.down = False
    # The lease ran out meanwhile. Nobody else wants it, so it is taken again.
    await rig.until(lambda: ("won", "a", 2) in rig.happened)
    assert rig.happened == [("won", "a", 1), ("lost", "a"), ("won", "a", 2)]


@pytest.mark.fault(
    "an operator with one replica whose store restarted",
    "the log said that another replica has the lease",
)
@pytest.mark.parametrize("alone", [True, False])
async def test_a_lease_that_ran_out_in_the_store_is_said_to_be_anothers_only_if_it_may_be(
    rig, alone
):
    with structlog.testing.capture_logs() as logs:
        keeper = rig.start("a", alone=alone)
        await keeper.decided(5)
        rig.store = MemoryStore(rig.clock)
        await rig.until(lambda: ("lost", "a") in rig.happened)
    (why,) = [line["why"] for line in logs if line["event"] == "lease_lost"]
    assert why == "it ran out in the store" + ("" if alone else ", or another replica took it")


async def test_the_term_rises_above_what_ranks_know(rig):
    keeper = rig.start("a")
    await keeper.decided(5)
    keeper.raise_term(40)
    assert not keeper.leading
    await keeper.decided(5)
    assert keeper.lease == Lease("a", 41)
    assert ("lost", "a") not in rig.happened, "the machine stepped down by itself"


async def test_waiting_for_a_decision_ends(rig):
    rig.down = True
    keeper = rig.start("a")
    await keeper.decided(0.05)
    assert not keeper.leading
    await keeper.release()


async def test_a_lease_that_is_yielded_is_free_and_not_sought_before_ranks_come(rig):
    one = rig.start("a")
    await one.decided(5)
    await one.yield_lease("nobody reaches it")
    assert not one.leading
    assert one.winner is None
    assert rig.happened[-1] == ("lost", "a")
    asked = rig.calls["acquire_lease"]
    two = rig.start("b")
    await two.decided(5)
    assert two.leading
    await rig.after("renew_lease", LONGER_THAN_A_LEASE)
    assert rig.calls["acquire_lease"] == asked + 1, "only the other replica asks for it"
    await two.yield_lease("nor this")
    await one.decided(5)
    assert one.leading


@pytest.mark.parametrize("ends", ["fails", "times out"])
async def test_a_renewal_that_fails_after_the_lease_was_yielded_leaves_no_fault(rig, ends):
    """The store is not asked for it again, so the fault would last until a rank comes."""
    one = rig.start("a")
    await one.decided(5)
    asked, yielded, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    renew = rig._ask

    async def late(*arguments):
        asked.set()
        try:
            await (yielded if ends == "fails" else asyncio.Event()).wait()
            raise Unavailable("late")
        finally:
            ended.set()

    rig._ask = late
    await asyncio.wait_for(asked.wait(), deadline(5))
    rig._ask = renew
    await one.yield_lease("nobody reaches it")
    yielded.set()
    await asyncio.wait_for(ended.wait(), deadline(5))
    await turns()
    assert one.fault is None
    assert not one.leading


async def test_a_lease_that_ran_out_while_records_were_loaded_is_not_led_by(rig):
    async def won(lease):
        if not rig.happened:
            rig.clock.ahead_s = 0.5  # The process stood still, so that nothing renewed the lease.
        rig.happened.append(("loaded", lease.term))

    keeper = rig.keeper("a")
    keeper.won = won
    keeper.want()
    task = asyncio.create_task(keeper.run())
    try:
        await rig.until(lambda: keeper.leading)
        assert keeper.lease is not None
        assert rig.happened == [("loaded", 1), ("lost", "a"), ("loaded", keeper.lease.term)]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("asked", ["acquire_lease", "renew_lease while loading", "renew_lease"])
async def test_a_lease_counts_from_before_it_was_asked_for(rig, asked):
    """R13: the store counts from when it is asked, so a slow answer tells of an old lease."""
    name, _, loading = asked.partition(" ")
    if loading:
        rig.loaded.clear()
    ask = getattr(rig, name)

    async def answer_late(*arguments):
        setattr(rig, name, ask)
        answer = await ask(*arguments)
        rig.clock.ahead_s += 0.5  # Longer than the lease.
        rig.loaded.set()
        rig.down = asked == "renew_lease"
        rig.calls.clear()
        return answer

    setattr(rig, name, answer_late)
    keeper = rig.start("a")
    keeper.want()
    await rig.until(lambda: len(rig.happened) > 1)
    assert rig.happened[:2] == [("won", "a", 1), ("lost", "a")]
    assert rig.calls["renew_lease"] == rig.down, "lost with the first error"


async def test_a_fenced_write_that_the_machine_does_not_know_of_costs_the_lease(rig):
    keeper = rig.start("a")
    await keeper.decided(5)
    keeper.lose("term 9 has taken over")
    assert not keeper.leading
    assert rig.happened[-1] == ("lost", "a")
    keeper.lose("once more")
    assert rig.happened.count(("lost", "a")) == 1


async def test_a_lease_that_cannot_be_given_back_is_given_up_all_the_same(rig):
    keeper = rig.start("a")
    await keeper.decided(5)
    rig.down = True
    await keeper.release()
    assert not keeper.leading


async def test_a_store_that_refuses_is_a_fault_until_it_answers(rig):
    rig.down = True
    keeper = rig.start("a")
    await keeper.decided(0.05)
    assert isinstance(keeper.fault, Unavailable)
    rig.down = False
    await keeper.decided(5)
    assert keeper.leading and keeper.fault is None
