"""The clock of the device is told at first and whenever it has changed."""

import asyncio
import contextlib

from evenkeel_moe.agent.clock_watch import watch_clock
from evenkeel_moe.wire.link import DeviceClock


class Readings:
    """Gives one reading after the other, then none."""

    def __init__(self, *readings):
        self.left, self.ended = list(readings), asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def read(self):
        if self.left:
            return self.left.pop(0)
        self.loop.call_soon_threadsafe(self.ended.set)
        return None


async def told_of(*readings):
    told: list[DeviceClock] = []
    reader = Readings(*readings)
    task = asyncio.create_task(watch_clock(reader, told.append, every_s=0.0))
    await asyncio.wait_for(reader.ended.wait(), 20)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return told


async def test_only_changes_are_told():
    first, ripple, lower = DeviceClock(0.95), DeviceClock(0.96), DeviceClock(0.80, "heat")
    assert await told_of(first, ripple, first, lower, lower) == [first, lower]


async def test_a_slow_fall_is_told_in_steps():
    falling = [DeviceClock(0.95 - 0.01 * step) for step in range(5)]
    assert await told_of(*falling) == [falling[0], falling[2], falling[4]]


async def test_what_limits_the_clock_is_told_although_the_clock_is_the_same():
    assert len(await told_of(DeviceClock(0.9), DeviceClock(0.9, "power"))) == 2


async def test_an_idle_device_tells_nothing():
    assert await told_of(None, None) == []
