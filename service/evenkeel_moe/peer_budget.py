"""Limits what peers may hold, and counts and logs each refusal.

A peer is known by an identity: its address, its token, or the deployment that it belongs to. gRPC,
HTTP and the bodies of requests are limited by the same parts: `Share` bounds amounts, such as
streams or bytes, `Rate` bounds messages, and `Places` chooses who gives way. `PeerLimits` has the
numbers.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import structlog

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """The limits of a replica's peers: what they hold at a time, and how long they may take.

    The names that begin with `max_` are those of settings.
    """

    max_streams: int = 8192
    """Streams of ranks; more are answered RESOURCE_EXHAUSTED."""
    max_streams_per_peer: int = 2048
    """Streams of ranks from one address."""
    waiting_streams: int = 512
    """Streams without a Hello and health checks without a request. A rank says hello as soon as its
    stream is open."""
    first_message_s: float = 10.0
    """Time for that Hello or request."""
    silent_s: float = 30.0
    """A stream of a rank that sends nothing for this long is ended; ranks send heartbeats."""
    max_messages_per_s: float = 200.0
    """Messages of one stream; a faster one is ended with RESOURCE_EXHAUSTED."""
    message_burst_s: float = 4.0
    """Seconds of its rate that a stream may be ahead: after a reconnect, all unacknowledged reports
    arrive again."""
    stream_bytes: int = 4 << 20
    deployment_bytes: int = 64 << 20
    message_bytes: int = 256 << 20
    """Bytes of messages of a stream, of a deployment and in all that wait to be processed. Above
    any of them a stream is not read. A message that is read already may exceed them."""
    connections: int = 512
    """Connections of one HTTP server."""
    request_s: float = 20.0
    """Time for a whole HTTP request, from the first byte; and for the first byte."""
    answer_s: float = 20.0
    """Time in which a client must read what it was sent before more is written."""
    requests_per_s: float = 200.0
    """HTTP requests of one address. Operators behind one proxy share it: a console asks some times
    a second."""
    request_burst: int = 200
    """Requests of an address that are answered at once after a pause. Loading the console takes
    some forty."""
    request_turn_s: float = 5.0
    """Longest time that a request waits for its turn. Connections are few, so each of an address
    that asks far too much then adds a request in this time to its rate."""
    body_bytes: int = 8 << 20
    """A larger body of a request is refused. An explicit target of 61 layers on 320 ranks of 9
    slots is about 1 MB."""
    bodies_bytes: int = 64 << 20
    """Bytes of the bodies of all requests while they are answered."""


DELIVERED_LIMITS = PeerLimits()
"""The limits where no setting says otherwise."""


class Share:
    """The amount that one peer holds, of streams or of bytes, as a part of what all hold.

    Args:
        most: the peer may hold as much.
        whole: what all such peers hold together; None for the whole itself.
        always: as much the peer may hold whatever the others hold.

    Attributes:
        held: the amount.
        turn: a lock of this peer. A task that takes it before the lock of all peers leaves that one
            to each other peer before another task of its own peer has it.
    """

    def __init__(self, most: int, whole: "Share | None" = None, *, always: int = -1) -> None:
        self.most, self.held = most, 0
        self.turn = asyncio.Lock()
        self._whole, self._always = whole, always
        self._freed: asyncio.Event = asyncio.Event() if whole is None else whole._freed

    def add(self, amount: int) -> None:
        """Hold more, or with a negative amount, less."""
        self.held += amount
        if self._whole is not None:
            self._whole.add(amount)
        elif amount < 0:
            self._freed.set()

    def exceeded(self, more: int = 0) -> "Share | None":
        """Return the share, this one or the whole, that `more` would exceed; None if it fits."""
        held = self.held + more
        if held > self.most:
            return self
        if self._whole is None or held <= self._always:
            return None
        return self._whole.exceeded(more)

    async def room(self) -> None:
        """Wait until nothing is exceeded."""
        while self.exceeded() is not None:
            self._freed.clear()
            await self._freed.wait()


class Shares:
    """The shares of peers by identity; one that nobody uses any more is forgotten.

    Args:
        most, whole, always: of each share.
    """

    def __init__(self, most: int, whole: Share, *, always: int = -1) -> None:
        self._make = partial(Share, most, whole, always=always)
        self._known: WeakValueDictionary[str, Share] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, identity: str) -> Share:
        """Return the share of a peer."""
        return self._known.setdefault(identity, self._make())


class Rate:
    """So many messages a second on average, and a burst of them at once after a pause."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._interval_s = 1 / per_s
        self._ahead_s = (burst - 1) * self._interval_s
        self.busy_until = float("-inf")
        """Time at which as many messages as were taken have had their interval."""

    def take(self, now: float, most_wait_s: float = 0.0) -> float:
        """Return how long a message has to wait; it does not count if that is above the most."""
        wait_s = max(0.0, self.busy_until - now - self._ahead_s)
        if wait_s <= most_wait_s:
            self.busy_until = max(self.busy_until, now) + self._interval_s
        return wait_s


class Place(Protocol):
    """An open stream or connection."""

    @property
    def host(self) -> str:
        """The address of the peer."""
        ...

    @property
    def waits(self) -> bool:
        """True while nothing is lost but an unused connection if this one ends."""
        ...

    def give_way(self) -> None:
        """End it."""
        ...


P = TypeVar("P", bound=Place)


class Places(Generic[P]):
    """The open streams or connections of all peers.

    If one more than `most` comes, the oldest one that waits gives way, of the address that has the
    most of them. So a peer that opens connections and does not use them takes places from itself
    first, and a peer that uses its own finds one.

    Args:
        most: number of places.
        event: name of the log line about one that gave way.
    """

    def __init__(self, most: int, event: str) -> None:
        self._most, self._event = most, event
        self._open: dict[P, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[P]:
        return iter(self._open)

    def add(self, new: P) -> None:
        """Add one; end another one, or this one, if there are too many."""
        self._open[new] = None
        if len(self._open) > self._most:
            waiting = [one for one in self._open if one.waits]
            counts = Counter(one.host for one in waiting)
            most = max(counts.values(), default=0)
            gone = next((one for one in waiting if counts[one.host] == most), new)
            refused(self._event, gone.host, open=len(self._open))
            self.remove(gone)
            gone.give_way()

    def remove(self, old: P) -> None:
        """Remove one, unless that was done before."""
        self._open.pop(old, None)


refusals: Counter[str] = Counter()
"""The number of refusals, by the name of the log line."""


def refused(event: str, peer: str, **details: Any) -> None:
    """Count and log that a peer was refused something; the log keeps one line a second of each."""
    refusals[event] += 1
    _log.warning(event, peer=peer, **details)
