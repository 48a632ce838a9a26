"""Bounds the bytes of messages that were received and are not processed yet.

A machine takes no messages while its records are being stored. Until then they wait in memory. A
stream whose messages wait is not read, so that its sender has to wait (HTTP/2 flow control).
"""

import asyncio
from collections import Counter
from collections.abc import Callable

_MOST_OF_STREAM = 4 << 20
_MOST_OF_DEPLOYMENT = 64 << 20
_MOST = 256 << 20


class InboundBudget:
    """The bytes that wait in the whole process, and in each deployment.

    Args:
        of_stream, of_deployment, in_all: bytes above which no further message is read. A message
            that is read already may exceed them.
    """

    def __init__(
        self,
        of_stream: int = _MOST_OF_STREAM,
        of_deployment: int = _MOST_OF_DEPLOYMENT,
        in_all: int = _MOST,
    ) -> None:
        self.of_stream = of_stream
        self.of_deployment = of_deployment
        self.in_all = in_all
        self.waiting_bytes = 0
        self.by_deployment: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def add(self, deployment: str, nbytes: int) -> None:
        """Count bytes that begin to wait, or with a negative number, bytes that are processed."""
        self.waiting_bytes += nbytes
        self.by_deployment[deployment] += nbytes
        if not self.by_deployment[deployment]:
            del self.by_deployment[deployment]
        if nbytes < 0:
            self._freed.set()

    async def freed(self) -> None:
        """Wait until bytes are processed."""
        self._freed.clear()
        await self._freed.wait()


class StreamInbound:
    """The bytes of one stream that wait.

    Args:
        budget: shared by all streams of a server.
        deployment: of the stream's rank.
    """

    def __init__(self, budget: InboundBudget, deployment: str) -> None:
        self._budget = budget
        self._deployment = deployment
        self.waiting_bytes = 0
        self.message_bytes = 0
        """Size of the message that is being delivered."""

    def hold(self) -> Callable[[], None]:
        """Count the message that is being delivered as waiting; return the call that ends it."""
        nbytes = self.message_bytes
        self._add(nbytes)
        left = [nbytes]

        def processed() -> None:
            self._add(-left[0])
            left[0] = 0

        return processed

    def _add(self, nbytes: int) -> None:
        if nbytes:
            self.waiting_bytes += nbytes
            self._budget.add(self._deployment, nbytes)

    @property
    def is_full(self) -> bool:
        """True if no further message of the stream is to be read now."""
        budget = self._budget
        return (
            self.waiting_bytes > budget.of_stream
            or budget.by_deployment[self._deployment] > budget.of_deployment
            or budget.waiting_bytes > budget.in_all
        )

    async def room(self) -> None:
        """Wait until a further message may be read."""
        while self.is_full:
            await self._budget.freed()
