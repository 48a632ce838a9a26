"""Limits of HTTP connections: how many are open, and how long a request may take to arrive."""

import asyncio
import ssl
from collections import Counter
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
_ARRIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)


class ConnectionTable:
    """The open connections of one server.

    If one more than `most` comes, the oldest connection without a whole request gives way, of the
    address that has the most of them. So a client that opens connections and sends nothing takes
    places from itself first, and a client with a request finds one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[BoundedHttp, None] = {}

    def __len__(self) -> int:
        return len(self._open)

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
        waiting = [one for one in self._open if not one.has_request]
        if not waiting:
            return None
        busiest, _ = Counter(one.host for one in waiting).most_common(1)[0]
        return next(one for one in waiting if one.host == busiest)


class BoundedConfig(uvicorn.Config):
    """The settings of a server whose connections are bounded."""

    def __init__(
        self, app: Any, connections: ConnectionTable, tls: ssl.SSLContext | None = None
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


class BoundedHttp(H11Protocol):
    """One connection. uvicorn alone waits for ever for a request, and for a client that reads."""

    config: BoundedConfig
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
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
