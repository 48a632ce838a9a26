"""The times at which a lease is dropped, or the store is asked again. The clock stands still."""

import asyncio
import math
import re
import time

import pytest

from evenkeel_moe.controller.leadership import leases
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.ports.stores import Lease
from tests.contracts.memory_store import MemoryStore
from tests.waiting import deadline

BEGIN = 0.0
OVER = BEGIN + 0.3
"""The end of a lease that was taken or renewed at BEGIN."""
DROPPED = OVER - 0.03
"""One renewal earlier."""


async def test_a_lease_is_dropped_one_renewal_before_it_runs_out_and_not_earlier(rig):
    """R13: after that another replica may hold it before the next renewal has failed."""
    rig.clock.still_at = BEGIN - 0.2
    keeper = rig.start("a")
    await keeper.decided(deadline(5))
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
    keeper = rig.start("a")
    await keeper.decided(deadline(5))
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
    keeper = rig.keeper("a")
    keeper.renew_s = 1000.0
    keeper.lease_s = 3000.0
    keeper.want()
    task = asyncio.create_task(keeper.run())
    try:
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
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_lease_that_the_machine_has_lost_is_dropped_without_telling_it(rig):
    keeper = rig.start("a")
    await keeper.decided(deadline(5))
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
