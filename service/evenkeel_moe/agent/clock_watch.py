"""Tells the controller the clock of the device when it has changed."""

import asyncio
from collections.abc import Callable

from evenkeel_moe.agent.ports import ClockReader
from evenkeel_moe.wire.link import DeviceClock

_EVERY_S = 5.0
_CHANGE = 0.02
"""Change of the ratio that is told: smaller ones are the ripple of the driver's own control."""


async def watch_clock(
    reader: ClockReader, tell: Callable[[DeviceClock], None], every_s: float = _EVERY_S
) -> None:
    """Read the clock every few seconds, and tell it at first and whenever it has changed."""
    told: DeviceClock | None = None
    while True:
        clock = await asyncio.to_thread(reader.read)
        if clock is not None and (
            told is None
            or abs(clock.ratio - told.ratio) >= _CHANGE
            or clock.limited_by != told.limited_by
        ):
            tell(clock)
            told = clock
        await asyncio.sleep(every_s)
