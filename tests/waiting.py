"""Waits for a condition, with a deadline that scales with how busy and how slow the machine is.

Every deadline of the tests goes through `deadline`: there is one place to make all of them longer.
A deadline only decides how long a failing test takes, so a generous one costs nothing.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE = float(os.environ.get("EVENKEEL_TEST_PATIENCE", "2"))
"""Factor on every deadline, on a machine that does nothing else."""
_USUAL_LOOP_S = 0.0012
"""Processor time of `_loop` where the other numbers were chosen."""
_MEASURE_EVERY_S = 10.0
_slowness = (-math.inf, 1.0)


def patience() -> float:
    """Return the factor for deadlines now.

    More processes than cores make everything slower. So do other machines on the same processor,
    which no load average tells.
    """
    return PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) * max(1.0, slowness())


def slowness() -> float:
    """Return the processor time of a short loop over what it usually takes."""
    global _slowness
    now = time.monotonic()
    if now - _slowness[0] > _MEASURE_EVERY_S:
        _slowness = now, min(_loop() for _ in range(3)) / _USUAL_LOOP_S
    return _slowness[1]


def _loop() -> float:
    began, total = time.process_time(), 0
    for number in range(30_000):
        total += number
    return time.process_time() - began


def deadline(seconds: float) -> float:
    """Return how many seconds to allow for what takes at most `seconds` on an idle machine."""
    return seconds * patience()


async def until(ask: Any, *, within_s: float = 20.0, every_s: float = 0.05, what: str = "") -> Any:
    """Return the first true answer of `ask`, which may be a coroutine function.

    Args:
        ask: called again and again.
        within_s: seconds allowed on an idle machine; see `deadline`.
        every_s: seconds between two calls.
        what: what is waited for, for the error.

    Raises:
        AssertionError: no answer was true in time.
    """
    began = time.monotonic()
    while True:
        answer = ask()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        waited = time.monotonic() - began
        if waited > deadline(within_s):
            raise AssertionError(f"waited {waited:.1f} s for {what or ask}")
        await asyncio.sleep(every_s)


def wait_until(
    ask: Callable[[], Any], *, within_s: float = 20.0, every_s: float = 0.05, what: str = ""
) -> Any:
    """Do what `until` does, for tests without an event loop."""
    began = time.monotonic()
    while not (answer := ask()):
        waited = time.monotonic() - began
        if waited > deadline(within_s):
            raise AssertionError(f"waited {waited:.1f} s for {what or ask}")
        time.sleep(every_s)
    return answer
