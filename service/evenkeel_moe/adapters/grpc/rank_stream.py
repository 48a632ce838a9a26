"""The controller's side of a stream: a bounded send queue, and what waits of received messages."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from evenkeel_moe.adapters.addresses import host_of
from evenkeel_moe.peer_budget import DELIVERED_LIMITS, Share, refused
from evenkeel_moe.wire.link import ReportAck, ToRankLink

_ACK_EVERY_S = 4.0
"""Answers to reports are joined for this long: writing one costs more than reading a report."""
_ACK_AFTER = 12
"""The most reports that one answer joins; a rank waits once 16 of them are not answered."""


class RankStream:
    """One open stream: its send queue, and what it holds."""

    waits = True
    """It may give way while it is among those without a Hello."""

    def __init__(self, number: int, peer: str, *, capacity: int) -> None:
        self.number = number
        """Rises during the life of this process."""
        self.peer = peer
        self.place: Share | None = None
        """The streams of its address, of which it is one; None before its Hello is checked."""
        self.waiting = Share(DELIVERED_LIMITS.stream_bytes)
        """Bytes of its received messages that are not processed yet."""
        self.reading_since = math.inf
        """The loop's time since which the next message is waited for; infinite while none is."""
        self.message_bytes = 0
        """Size of the message that is being delivered."""
        self.certified = False
        """True if the certificate of the connection names the rank."""
        self.exhausted = ""
        """The limit for which the stream was ended; the rank is told to come back later."""
        # Stored, because asking for the running loop is a system call each time.
        self._loop = asyncio.get_running_loop()
        self._capacity = capacity
        self._queue: deque[ToRankLink] = deque()
        self._wake = asyncio.Event()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done once nothing more will be sent."""
        self._ack: ReportAck | None = None
        """The answer held back until it is due."""
        self._acked_reports = 0
        """Reports that `_ack` answers."""
        self._ack_due = 0.0

    @property
    def host(self) -> str:
        """The address of the peer, without its port."""
        return host_of(self.peer)

    @property
    def closed(self) -> bool:
        """True if nothing more will be sent."""
        return self.ended.done()

    def send(self, message: ToRankLink) -> None:
        """Queue a message; drop it if the stream is closed. A full queue closes the stream."""
        if self.closed:
            return
        if isinstance(message, ReportAck):
            self._acknowledge(message)
        else:
            self._enqueue(message)

    def close(self, last: ToRankLink | None = None) -> None:
        """Send what is queued and one last message, then end the stream."""
        if last is not None:
            self.send(last)
        if not self.closed:
            self.ended.set_result(None)
        self._wake.set()

    def give_way(self) -> None:
        """End the stream for another one."""
        self.close()

    def hold(self) -> Callable[[], None]:
        """Count the message that is being delivered as waiting; return what ends it, once."""
        self.waiting.add(self.message_bytes)
        return partial(self.waiting.add, -self.message_bytes)

    async def next(self) -> ToRankLink | None:
        """Wait for the next message to write; None at the end."""
        while True:
            ack, now = self._ack, self._loop.time()
            if ack is not None and (self.closed or now >= self._ack_due):
                self._ack, self._acked_reports = None, 0
                self._ack_due = now + _ACK_EVERY_S
                return ack
            if self._queue:
                return self._queue.popleft()
            if self.closed:
                return None
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if ack is None else self._ack_due):
                    await self._wake.wait()

    def _acknowledge(self, ack: ReportAck) -> None:
        """Answer a report at once, or together with others when the next answer is due."""
        held, self._acked_reports = self._ack, self._acked_reports + 1
        self._ack = ack if held is None else _join_acks(held, ack)
        if ack.reason is not None or self._acked_reports >= _ACK_AFTER:
            self._ack_due = 0.0
        if held is None or not self._ack_due:
            self._wake.set()

    def _enqueue(self, message: ToRankLink) -> None:
        if len(self._queue) >= self._capacity:
            refused("rank_too_slow", self.peer, stream=self.number, queued=len(self._queue))
            self._queue.clear()
            self._ack = None
            self.close()
            return
        self._queue.append(message)
        self._wake.set()


def _join_acks(one: ReportAck, other: ReportAck) -> ReportAck:
    """Return one answer for two, where the first was not written yet."""
    highest = other.highest_step if one.highest_step is None else one.highest_step
    if highest is not None and other.highest_step is not None:
        highest = max(highest, other.highest_step)
    return ReportAck(highest, one.rejected_steps + other.rejected_steps, other.reason or one.reason)
