"""Limits of HTTP: connections, the time for a request to arrive, and the requests of an address."""

import asyncio
import ssl
from collections.abc import Collection
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from evenkeel_moe.peer_budget import PeerLimits, Places, Rate, refused

_KEPT_ADDRESSES = 1024
"""Addresses that are kept before those whose turn has come are forgotten."""
_ARRIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)


class PeerRates:
    """The times at which requests of each address may be answered."""

    def __init__(self, limits: PeerLimits) -> None:
        self._limits = limits
        self._rates: dict[str, Rate] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def wait_s(self, host: str, now: float) -> float:
        """Take a request of an address; return how long it must wait."""
        if len(self._rates) > _KEPT_ADDRESSES:
            self._rates = {one: rate for one, rate in self._rates.items() if rate.busy_until > now}
        limits = self._limits
        rate = self._rates.setdefault(host, Rate(limits.requests_per_s, limits.request_burst))
        return min(rate.take(now, limits.request_turn_s), limits.request_turn_s)


class BoundedConfig(uvicorn.Config):
    """The settings of a server whose connections are bounded.

    Args:
        probes: paths whose request is answered at once if it is the first of its connection, so
            that a probe does not wait behind other requests of its address.
    """

    def __init__(
        self,
        app: Any,
        connections: "Places[BoundedHttp]",
        limits: PeerLimits,
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
        self.limits = limits
        self.rates = PeerRates(limits)


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

    def give_way(self) -> None:
        """End the connection for another one."""
        self.transport.abort()

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

    def on_response_complete(self) -> None:
        """Turn to the next request; if only its head came with the last, its body must follow."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._timer is None:
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
        self._timer = self.loop.call_later(
            self.config.limits.request_s, self._end, "no whole request"
        )

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(
            self.config.limits.answer_s, self._end, "answer not read"
        )

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _end(self, why: str) -> None:
        refused("connection_ended", self.host, detail=why)
        self.transport.abort()
