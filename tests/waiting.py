"""Waiting for something to come true, with an end."""

import asyncio
from typing import Any


async def until(ask: Any, *, within_s: float = 20.0, every_s: float = 0.05, what: str = "") -> Any:
    """The first true answer of `ask`, which may be a coroutine function; AssertionError after the time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        answer = ask()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"waited {within_s:g} s for {what or ask}")
        await asyncio.sleep(every_s)
