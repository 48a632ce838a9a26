"""Limits of HTTP: connections, the time for a request to arrive, and the requests of an address."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = structlog.get_logger(__name__)
_RECEIVE_WITHIN_S = 20.0
"""Time for a whole request, from the first byte; and for the first byte of a connection."""
_READ_WITHIN_S = 20.0
"""Time in which a client must read what it was sent before more is written."""
_REQUESTS_PER_S = 200.0
"""Requests of one address. Operators behind one proxy share it: a console asks some times a
second."""
_BURST = 200
"""Requests of an address that are answered at once after a pause. Loading the console takes some
forty."""
_MOST_WAIT_S = 5.0
"""Longest time that a request waits for its turn. Connections are few, so each of an address that
asks far too much then adds a request in this time to its rate."""
_KEPT_ADDRESSES = 1024
"""Addresses that are kept before those whose turn has come are forgotten."""
_ARRIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)


class ConnectionTable:
    """The open connections of one server.

    If one more than `most` comes, the oldest connection gives way that has no whole request, waits
    for its turn or does not read its answer, of the address that has the most of them. So a client
    that opens connections and does not use them takes places from itself first, and a client with a
    request finds one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[BoundedHttp, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator["BoundedHttp"]:
        return iter(self._open)

    def add(self, new: "BoundedHttp") -> None:
        """Add a connection; close another one, or this one, if there are too many."""
        self._open[new] = None
        if len(self._open) > self._most:
            evicted = self._choose() or new
            _log.warning("connection_evicted", peer=evicted.host, open=len(self._open))
            self.remove(evicted)
            evicted.transport.abort()

    def remove(self, old: "BoundedHttp") -> None:
        """Remove a connection, unless that was done before."""
        self._open.pop(old, None)

    def _choose(self) -> "BoundedHttp | None":
        waiting = [one for one in self._open if one.waits]
        if not waiting:
            return None
        busiest, _ = Counter(one.host for one in waiting).most_common(1)[0]
        return next(one for one in waiting if one.host == busiest)


class PeerRates:
    """The times at which requests of each address may be answered.

    Args:
        per_s: requests of an address in a second.
        burst: requests of an address that wait for nothing, after a pause.
        most_wait_s: a request waits no longer, and does not count if it should.
    """

    def __init__(self, per_s: float, burst: int, most_wait_s: float) -> None:
        self._interval_s, self._burst, self._most_wait_s = 1 / per_s, burst, most_wait_s
        self._busy_until: dict[str, float] = {}
        """Time by address at which as many requests as were taken have had their interval."""

    def __len__(self) -> int:
        return len(self._busy_until)

    def wait_s(self, host: str, now: float) -> float:
        """Take a request of an address; return how long it must wait."""
        if len(self._busy_until) > _KEPT_ADDRESSES:
            self._busy_until = {one: at for one, at in self._busy_until.items() if at > now}
        busy_until = max(self._busy_until.get(host, now), now)
        wait_s = max(0.0, busy_until - now - (self._burst - 1) * self._interval_s)
        if wait_s < self._most_wait_s:
            self._busy_until[host] = busy_until + self._interval_s
        return min(wait_s, self._most_wait_s)


class BoundedConfig(uvicorn.Config):
    """The settings of a server whose connections are bounded.

    Args:
        probes: paths whose request is answered at once if it is the first of its connection, so
            that a probe does not wait behind other requests of its address.
    """

    def __init__(
        self,
        app: Any,
        connections: ConnectionTable,
        tls: ssl.SSLContext | None = None,
        probes: Collection[str] = (),
    ) -> None:
        super().__init__(
            app,
            http=BoundedHttp,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            ws="none",
        )
        self.connections = connections
        self.probes = probes
        self.rates = PeerRates(_REQUESTS_PER_S, _BURST, _MOST_WAIT_S)


class BoundedHttp(H11Protocol):
    """One connection. uvicorn alone waits for ever for a request, and for a client that reads."""

    config: BoundedConfig
    _requests = 0
    _rated = False
    """A request waits for its turn."""
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def host(self) -> str:
        """The address of the client."""
        return self.client[0] if self.client is not None else ""

    @property
    def has_request(self) -> bool:
        """True while a whole request is being answered."""
        return self.conn.their_state in _ARRIVED

    @property
    def waits(self) -> bool:
        """True while nothing is lost but an unused connection if this one is closed."""
        return not self.has_request or self._rated or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._app, self.app = self.app, self._answer_in_turn  # type: ignore[assignment]
        self._wait_for_request()
        self.config.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place of the connection."""
        self.config.connections.remove(self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the request that they belong to has a limited time to arrive."""
        super().data_received(data)
        if self.has_request:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            self._wait_for_request()

    async def _answer_in_turn(self, scope: Any, receive: Any, send: Any) -> None:
        self._requests += 1
        if self._requests > 1 or scope["path"] not in self.config.probes:
            if wait_s := self.config.rates.wait_s(self.host, self.loop.time()):
                self._rated = True
                await asyncio.sleep(wait_s)
                self._rated = False
                if self.transport.is_closing():
                    return
        await self._app(scope, receive, send)

    def _wait_for_request(self) -> None:
        self._timer = self.loop.call_later(_RECEIVE_WITHIN_S, self._end, "no whole request")

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(_READ_WITHIN_S, self._end, "answer not read")

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _end(self, why: str) -> None:
        _log.info("connection_ended", peer=self.host, detail=why)
        self.transport.abort()
