"""The rank's end of the stream: keeps one open to whichever replica leads, and never gives up."""

import asyncio
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog

from evenkeel_moe.errors import EvenkeelError, InvalidInput
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.codec import decode_controller_message, encode_rank_message
from evenkeel_moe.wire.link import (
    FromRankLink,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ToRankLink,
)

__all__ = ["GrpcRankLink", "LinkTiming", "LinkTls", "channel_options"]

_log = structlog.get_logger(__name__)
_MAX_MESSAGE_BYTES = 64 << 20
"""A full map with checksums of the largest models is a few megabytes."""
_QUIET_BEATS = 3
"""Heartbeats in a row that are left out while other messages say that the rank lives."""
_MAX_OUTBOX = 1024
"""Messages queued on a stream; 16 are reports, and few others come without the controller having asked."""


class _Listener(Protocol):
    def hello(self) -> Hello: ...
    def heartbeat(self) -> Heartbeat: ...
    def received(self, stream: int, message: ToRankLink) -> None: ...
    def lost(self, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """How patient the link is."""

    backoff_min_s: float = 0.2
    """Wait after the first failure; doubles with each further one."""
    backoff_max_s: float = 10.0
    keepalive_s: float = 10.0
    """Silence on the connection after which it is probed; the server must allow probes this often."""
    keepalive_timeout_s: float = 5.0
    connect_timeout_s: float = 10.0
    """From opening a stream to its Registration."""


@dataclass(frozen=True, slots=True)
class LinkTls:
    """PEM files of a link that speaks TLS. gRPC cannot change a channel's certificate, so they are read for each connection."""

    ca_file: Path
    """Of the CA that signed the controllers' certificates."""
    cert_file: Path | None = None
    """This rank's chain, where the controllers want one; with its key."""
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """As the files are now.

        Raises:
            OSError: one cannot be read.
        """
        pair = [
            None if file is None else file.read_bytes() for file in (self.key_file, self.cert_file)
        ]
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), *pair)


def channel_options(timing: LinkTiming) -> list[tuple[str, int]]:
    """gRPC's options of a rank's channel."""
    return [
        ("grpc.keepalive_time_ms", int(timing.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timing.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # gRPC would measure bandwidth with a ping after every answer, and the controller's transport answers each.
        ("grpc.http2.bdp_probe", 0),
        # Two agents of one process must not share a connection: its loss would be felt twice.
        ("grpc.use_local_subchannel_pool", 1),
    ]


class GrpcRankLink:
    """Client of RankLink.Attach. Made on any thread, used on the event loop that runs `run`.

    Args:
        addresses: `host:port` of the controller replicas. A deployment's ranks all begin with the same one, each deployment
            with its own, so that replicas share the deployments; then they try the others in turn.
        timing: patience.
        seed: of the jitter, so that the ranks of a fleet do not come back all at once: give each its own.
        tls: None connects in clear text.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timing: LinkTiming | None = None,
        seed: int = 0,
        tls: LinkTls | None = None,
    ) -> None:
        if not addresses:
            raise InvalidInput("a link needs at least one controller address")
        self._addresses = tuple(addresses)
        self._tried = 0
        """Addresses tried, from the deployment's own on."""
        self._timing = timing if timing is not None else LinkTiming()
        self._jitter = random.Random(seed)
        self._tls = tls
        self._redirect = ""
        self._stream = 0
        self._outbox: asyncio.Queue[FromRankLink] | None = None
        self._full = asyncio.Event()
        """The outbox of the open stream was full."""
        self._spoke = False
        """Something else was sent since the heartbeat before."""

    async def run(self, listener: _Listener) -> None:
        """Keep a stream open until cancelled; each has a number of its own, from 1."""
        failures = 0
        home = zlib.crc32(listener.hello().identity.deployment.encode())
        while True:
            address, self._redirect = self._redirect or self._next_address(home), ""
            wait_s = None
            try:
                wait_s = await self._attach(address, listener)
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                _log.info("link_lost", address=address, detail=_brief(error))
                wait_s = _asked_to_wait(error)
            except EvenkeelError as error:
                _log.warning(
                    "link_violated", address=address, reason=error.reason, detail=str(error)
                )
            except Exception as error:  # a mistake of ours costs this stream, not all that follow
                _log.exception("link_failed", address=address, detail=_brief(error))
            if wait_s is None:
                failures += 1
                doubled = self._timing.backoff_min_s * 2.0 ** min(failures - 1, 16)
                wait_s = min(self._timing.backoff_max_s, doubled)
            else:
                failures = 0
            await asyncio.sleep(wait_s * self._jitter.uniform(0.5, 1.0))

    def send(self, message: FromRankLink, stream: int | None = None) -> None:
        """Queue a message; dropped unless `stream` (None: any) is open. A controller too slow to take them is left."""
        if self._outbox is None or stream not in (None, self._stream):
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("controller_too_slow", stream=self._stream, queued=self._outbox.qsize())
            self._outbox = None
            self._full.set()

    def _next_address(self, home: int) -> str:
        self._tried += 1
        return self._addresses[(home + self._tried - 1) % len(self._addresses)]

    async def _attach(self, address: str, listener: _Listener) -> float | None:
        """One stream, to its end: seconds to wait before the next; None to back off."""
        async with self._channel(address) as channel:
            call = agent_pb2_grpc.RankLinkStub(channel).Attach()  # type: ignore[no-untyped-call]
            self._stream += 1
            stream = self._stream
            try:
                async with asyncio.timeout(self._timing.connect_timeout_s):
                    await call.write(encode_rank_message(listener.hello()))
                    first = await _read(call)
                if (
                    isinstance(first, Registration)
                    and first.outcome is not RegistrationOutcome.REFUSED
                ):
                    return await self._serve(call, stream, first, listener)
                return self._turned_away(address, first)
            finally:
                call.cancel()

    def _turned_away(self, address: str, answer: ToRankLink | None) -> float | None:
        match answer:
            case NotLeader(address=leader, retry_after_s=retry_after_s):
                self._redirect = leader if leader != address else ""
                return self._timing.backoff_min_s if self._redirect else retry_after_s
            case Registration(reason=reason, detail=detail):
                _log.warning("registration_refused", address=address, reason=reason, detail=detail)
        return None

    async def _serve(
        self, call: Any, stream: int, registration: Registration, listener: _Listener
    ) -> float | None:
        self._outbox = asyncio.Queue(_MAX_OUTBOX)
        self._spoke = False
        self._full.clear()
        # First of the tasks to run: the listener hears of the registration before anything is asked of it.
        listening = asyncio.create_task(
            self._listen(call, stream, registration, listener), name="link-reader"
        )
        helpers: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._write(call, self._outbox), name="link-writer"),
            asyncio.create_task(
                self._beat(registration.heartbeat_interval_s, listener), name="heartbeat"
            ),
            asyncio.create_task(self._full.wait(), name="link-overflow"),
        ]
        try:
            await asyncio.wait([listening, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for helper in helpers:
                # One that ended with the call leaves it to the reader to say how that ended.
                if helper.done() and not call.done():
                    helper.result()  # Without it the rank would be mute on a stream that seems well.
                    return None
            return await listening
        finally:
            self._outbox = None
            listener.lost(stream)
            for task in (listening, *helpers):
                task.cancel()
            await asyncio.gather(listening, *helpers, return_exceptions=True)

    async def _listen(
        self, call: Any, stream: int, registration: Registration, listener: _Listener
    ) -> float | None:
        """Hand on what the controller says, to the stream's end."""
        message: ToRankLink | None = registration
        while message is not None:
            if isinstance(message, NotLeader):
                # A controller that goes in order: begin anew, so that a roll-out spreads the deployments.
                self._tried = 0
                return self._turned_away("", message)
            listener.received(stream, message)
            message = await self._hear(call, registration.lease_s)
        return self._timing.backoff_min_s

    async def _hear(self, call: Any, lease_s: float) -> ToRankLink | None:
        """The next message. A controller says something at least every half of a lease; one that was silent for a
        whole one is paused or out of reach, whatever the connection says, and another may lead by now."""
        async with asyncio.timeout(lease_s if lease_s > 0 else None):
            return await _read(call)

    async def _beat(self, interval_s: float, listener: _Listener) -> None:
        """That the rank lives, what it has free and what troubles it; the first of these others messages may say too."""
        left_out, told = 0, ""
        while True:
            beat = listener.heartbeat()
            if self._spoke and beat.trouble == told and left_out < _QUIET_BEATS:
                left_out += 1
            else:
                self.send(beat)
                left_out, told = 0, beat.trouble
            self._spoke = False
            await asyncio.sleep(interval_s)

    async def _write(self, call: Any, outbox: asyncio.Queue[FromRankLink]) -> None:
        """Write what is queued. A message the codec refuses is our own mistake: said, and left out."""
        while True:
            message = await outbox.get()
            try:
                encoded = encode_rank_message(message)
            except (
                Exception
            ) as error:  # a report would end the next stream too, where it is sent again
                _log.error("message_not_sent", kind=type(message).__name__, detail=str(error))
                continue
            await call.write(encoded)
            if not isinstance(message, Heartbeat):
                self._spoke = True

    def _channel(self, address: str) -> Any:
        options = channel_options(self._timing)
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self._tls.credentials(), options)


async def _read(call: Any) -> ToRankLink | None:
    """The next message; None at the end of the stream."""
    message = await call.read()
    return None if message is grpc.aio.EOF else decode_controller_message(message)


def _asked_to_wait(error: BaseException) -> float | None:
    """Seconds a server that is full asks for, so that its clients do not make it worse; None when it does not.

    Twice the hint, for the caller takes half of a wait at least.
    """
    if (
        not isinstance(error, grpc.aio.AioRpcError)
        or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
    ):
        return None
    hints = [
        value for name, value in error.trailing_metadata() or () if name == "grpc-retry-pushback-ms"
    ]
    text = str(hints[0]) if hints else ""
    return 2 * min(int(text), 60_000) / 1000 if text.isdecimal() else None


def _brief(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
