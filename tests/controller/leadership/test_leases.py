"""The lease is taken, kept, and dropped before another replica can have it."""

import asyncio
import math
import re
import time

import pytest
import structlog

from evenkeel_moe.controller.leadership import leases
from evenkeel_moe.errors import Conflict, Reason, Unavailable
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
    keeper = await rig.decided("a", load_fails=2)
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
    keeper = await rig.decided("a")
    rig.down = True
    await rig.until(lambda: not keeper.leading)
    assert rig.happened[-1] == ("lost", "a")
    assert (await rig.store.acquire_lease(DEMO, "b", 1.0, 0)).holder in ("a", "b")
    rig.down = False
    await rig.until(lambda: keeper.leading or keeper.winner.holder == "b")


async def test_alone_an_unreachable_store_costs_nothing(rig):
    keeper = await rig.decided("a", alone=True)
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
        await rig.decided("a", alone=alone)
        rig.store = MemoryStore(rig.clock)
        await rig.until(lambda: ("lost", "a") in rig.happened)
    (why,) = [line["why"] for line in logs if line["event"] == "lease_lost"]
    assert why == "it ran out in the store" + ("" if alone else ", or another replica took it")


async def test_the_term_rises_above_what_ranks_know(rig):
    keeper = await rig.decided("a")
    keeper.raise_term(40)
    assert not keeper.leading
    await keeper.decided(5)
    assert keeper.lease == Lease("a", 41)
    assert ("lost", "a") not in rig.happened, "the machine stepped down by itself"


async def test_a_lease_that_is_yielded_is_free_and_not_sought_before_ranks_come(rig):
    one = await rig.decided("a")
    await one.yield_lease("nobody reaches it")
    assert not one.leading
    assert one.winner is None
    assert rig.happened[-1] == ("lost", "a")
    asked = rig.calls["acquire_lease"]
    two = await rig.decided("b")
    assert two.leading
    await rig.after("renew_lease", LONGER_THAN_A_LEASE)
    assert rig.calls["acquire_lease"] == asked + 1, "only the other replica asks for it"
    await two.yield_lease("nor this")
    await one.decided(5)
    assert one.leading


@pytest.mark.parametrize("ends", ["fails", "times out"])
async def test_a_renewal_that_fails_after_the_lease_was_yielded_leaves_no_fault(rig, ends):
    """The store is not asked for it again, so the fault would last until a rank comes."""
    one = await rig.decided("a")
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
    keeper = await rig.decided("a")
    keeper.lose("term 9 has taken over")
    assert not keeper.leading
    assert rig.happened[-1] == ("lost", "a")
    keeper.lose("once more")
    assert rig.happened.count(("lost", "a")) == 1


async def test_a_lease_that_cannot_be_given_back_is_given_up_all_the_same(rig):
    keeper = await rig.decided("a")
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


BEGIN = 0.0
OVER = BEGIN + 0.3
"""The end of a lease that was taken or renewed at BEGIN."""
DROPPED = OVER - 0.03
"""One renewal earlier."""


async def test_a_lease_is_dropped_one_renewal_before_it_runs_out_and_not_earlier(rig):
    """R13: after that another replica may hold it before the next renewal has failed."""
    rig.clock.still_at = BEGIN - 0.2
    keeper = await rig.decided("a")
    rig.clock.still_at = BEGIN
    await rig.after("renew_lease", 1)
    rig.down = True
    rig.clock.still_at = math.nextafter(DROPPED, 0)
    await rig.after("renew_lease", 3)
    assert keeper.leading and isinstance(keeper.fault, Unavailable)
    rig.clock.still_at = DROPPED
    await rig.until(lambda: not keeper.leading)
    assert rig.happened == [("won", "a", 1), ("lost", "a")]


async def test_an_answer_is_awaited_for_as_long_as_the_lease_is_held(rig):
    rig.clock.still_at = 100.0
    keeper = await rig.decided("a")
    rig.silent, began = True, time.monotonic()
    await rig.until(lambda: not keeper.leading)
    assert time.monotonic() - began > 0.25
    assert ("lost", "a") in rig.happened and "within 0.27 s" in str(keeper.fault)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("loaded_at", [math.nextafter(OVER, 0), OVER])
async def test_a_lease_that_is_over_when_the_records_are_loaded_is_led_by_alone(
    rig, loaded_at, alone
):
    rig.clock.still_at = BEGIN
    keeper = rig.keeper("a", alone=alone)

    async def won(lease):
        rig.clock.still_at = loaded_at

    keeper.won = won
    assert await keeper._acquire() is (alone or loaded_at - BEGIN < keeper.lease_s)
    assert rig.happened == ([] if keeper.leading else [("lost", "a")])


async def test_a_renewal_while_the_records_are_loaded_prolongs_the_lease(rig):
    rig.clock.still_at = BEGIN - 0.2
    keeper = rig.keeper("a")

    async def won(lease):
        rig.clock.still_at = BEGIN
        await rig.after("renew_lease", 1)
        rig.clock.still_at = math.nextafter(OVER, 0)

    keeper.won = won
    assert await keeper._acquire()
    assert keeper.leading and rig.happened == []


async def test_the_term_does_not_fall_with_a_store_that_lost_its_data(rig):
    """R2: ranks know the term."""
    keeper = rig.start("a")
    keeper.raise_term(40)
    await rig.until(lambda: keeper.lease == Lease("a", 41))
    rig.store = MemoryStore(rig.clock)
    await rig.until(lambda: keeper.lease == Lease("a", 42))


async def test_who_waits_for_a_decision_is_woken_by_it(rig):
    async with asyncio.timeout(deadline(20)):
        for name in "ab":
            await rig.start(name).decided(1000.0)
    assert rig.happened == [("won", "a", 1), ("outrun", "b", "a")]


async def test_a_store_that_failed_is_asked_again_soon(rig, monkeypatch):
    """A long interval between renewals is meant for a store that answers."""
    monkeypatch.setattr(leases, "_RETRY_S", 0.01)
    rig.clock.still_at = BEGIN
    rig.down = True
    keeper = rig.start("a")
    keeper.renew_s, keeper.lease_s = 1000.0, 3000.0
    keeper.want()
    await rig.after("acquire_lease", 3)
    keeper.renew_s, rig.down = 0.01, False
    await rig.until(lambda: keeper.leading)
    rig.down = True
    await rig.until(lambda: keeper.fault is not None)
    keeper.renew_s = 1000.0
    await rig.after("renew_lease", 3)
    assert keeper.leading
    rig.down = False
    await rig.until(lambda: keeper.fault is None)
    asked = rig.calls["renew_lease"]
    await asyncio.sleep(0.1)
    assert rig.calls["renew_lease"] == asked


async def test_a_lease_that_the_machine_has_lost_is_dropped_without_telling_it(rig):
    keeper = await rig.decided("a")
    keeper.drop("term 9 has taken over")
    assert not keeper.leading and rig.happened == [("won", "a", 1)]
    asked, keeper.renew_s = rig.calls["renew_lease"], 1000.0
    await keeper.decided(deadline(5))
    assert rig.calls["renew_lease"] == asked, "a lease that was dropped is not renewed"


PAST_ITS_END = pytest.mark.fault(
    "an operator with a short leader.renew_s",
    "a lease was held past its end, when another replica may already lead",
)


@PAST_ITS_END
@pytest.mark.parametrize("renew_s", [0.003, 0.02, 0.03, 0.1])
@pytest.mark.parametrize("left_s", [0.0, 0.002, 0.02])
async def test_no_answer_is_awaited_past_the_end_of_a_lease(rig, renew_s, left_s):
    rig.clock.still_at = BEGIN
    keeper = rig.start("a")
    keeper.renew_s = renew_s
    await keeper.decided(deadline(5))
    await rig.after("renew_lease", 1)
    rig.clock.still_at, rig.silent = OVER - left_s, True
    await rig.until(lambda: not keeper.leading)
    waited_s = float(re.findall("within (.*) s", str(keeper.fault))[0])
    assert waited_s == pytest.approx(max(left_s / 2, left_s - renew_s))


@PAST_ITS_END
async def test_a_lease_is_not_held_past_its_end_while_records_are_loaded(rig):
    """The machine leads once they are loaded, and a renewal that fails must end that in time."""
    rig.clock.still_at = BEGIN
    keeper = rig.start("a")

    async def won(lease):
        await rig.after("renew_lease", 1)
        rig.happened.append("won")

    keeper.won, rig.silent_renewals = won, True
    keeper.want()
    async with asyncio.timeout(deadline(5)):
        await rig.until(lambda: rig.happened[:2] == ["won", ("lost", "a")])
    assert not keeper.leading and "within 0.3 s" in str(keeper.fault)


@PAST_ITS_END
async def test_after_a_failure_the_store_is_asked_again_before_the_lease_is_dropped(rig):
    rig.clock.still_at = BEGIN
    keeper = rig.keeper("a")
    keeper.renew_s, keeper._held_since, keeper.fault = 0.1, BEGIN, Unavailable("down")
    for now, pause_s in ((BEGIN, 0.1), (OVER - 0.15, 0.05), (OVER - 0.1, 0.0)):
        rig.clock.still_at = now
        assert keeper._pause_s() == pytest.approx(pause_s)
    keeper.alone = True
    assert keeper._pause_s() == 0.1


async def test_a_new_deployment_is_listed_once_it_is_claimed(rig):
    keeper = await rig.decided("a", lasting=False)
    await rig.after("renew_lease", 1)
    assert not keeper.lasting and await rig.store.deployments() == []
    await keeper.claim()
    assert keeper.lasting and await rig.store.deployments() == [DEMO]
    asked = rig.calls["renew_lease"]
    await keeper.claim()
    assert rig.calls["renew_lease"] == asked, "it is claimed already"


@pytest.mark.parametrize("held", [False, True])
async def test_a_deployment_that_another_replica_leads_cannot_be_claimed(rig, held):
    keeper = rig.keeper("a", lasting=False)
    if held:
        keeper.lease = Lease("a", 1, False)
    with pytest.raises(Conflict, match="demo: another replica leads") as caught:
        await keeper.claim()
    assert caught.value.reason is Reason.LEASE_LOST
    assert not keeper.lasting


@pytest.mark.parametrize(
    "lasting, forget, next_term", [(False, True, 1), (False, False, 2), (True, True, 2)]
)
async def test_a_released_lease_is_free_and_a_new_deployment_can_be_forgotten(
    rig, lasting, forget, next_term
):
    keeper = await rig.decided("a", lasting=lasting)
    keeper.want = lambda: None
    keeper._wanted.clear()
    await keeper.release(forget=forget)
    assert not keeper.leading and ("lost", "a") not in rig.happened
    assert await rig.store.acquire_lease(DEMO, "b", 60.0, 0) == Lease("b", next_term)
    await keeper.release(forget=forget)
    assert rig.calls["release_lease"] + rig.calls["drop_lease"] == 1


async def test_a_deployment_with_records_is_claimed_already(rig):
    await rig.store.store_document(DEMO, "policy", {}, 1)
    keeper = await rig.decided("a", lasting=False)
    assert keeper.leading and keeper.lasting
