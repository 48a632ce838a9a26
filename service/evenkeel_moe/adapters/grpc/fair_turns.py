"""One turn at a time, given in rotation to those who wait, so that a busy peer delays no other."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """Lets one task at a time work. Among those that wait, each peer gets a turn after the other.

    A plain lock would serve a peer with a hundred tasks a hundred times before the next peer.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those that wait by peer; the first peer is next."""

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it inside the context."""
        if self._taken:
            await self._wait(peer)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, peer: str) -> None:
        given = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._pass_on()  # The turn came together with the cancellation.
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next peer that still waits."""
        while self._waiting:
            peer = next(iter(self._waiting))
            waiting = self._waiting.pop(peer)
            given = waiting.popleft()
            if waiting:
                self._waiting[peer] = waiting  # Behind the other peers.
            if not given.done():
                given.set_result(None)
                return
        self._taken = False
