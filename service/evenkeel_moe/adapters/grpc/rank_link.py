"""The rank's end of the stream: it keeps one open to the leading replica, and never gives up."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog

from evenkeel_moe.adapters.addresses import is_host_port
from evenkeel_moe.adapters.grpc.call_errors import asked_to_wait, brief
from evenkeel_moe.adapters.grpc.controller_addresses import ControllerAddresses
from evenkeel_moe.errors import EvenkeelError, InvalidInput, PeerViolation
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.peer_budget import Rate
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.limits import most_order_bytes
from evenkeel_moe.wire.link import (
    FromRankLink,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ToRankLink,
)
from evenkeel_moe.wire.to_rank import decode_controller_message

_log = structlog.get_logger(__name__)
_MAX_MESSAGE_BYTES = 64 << 20
"""A full map with checksums of the largest models is a few megabytes."""
_MAX_MESSAGES_PER_S = 200.0
"""Messages of a controller, which sends a few. Each takes time that the engine's thread needs."""
_BURST_S = 4.0
"""Seconds of that rate that may come at once."""
_REST = 4.0
"""Rest after a message, as a multiple of the processor time that it took, in which the engine's
thread could run no Python. A Prepare of thousands of transfers takes a tenth of a second."""
_MAX_REST_S = 2.0
_MIN_BEAT_S = 0.01
"""Least time between heartbeats, whatever the controller asks for."""
_MAX_WAIT_S = 60.0
"""Longest wait for another stream, whatever the controller asks for."""
_QUIET_BEATS = 3
"""Heartbeats in a row that are skipped while other messages show that the rank is alive."""
_MAX_OUTBOX = 1024
"""Messages queued on a stream. At most 16 are reports, and most others answer the controller."""


class LinkListener(Protocol):
    """Receives the events of a link, and is called on its event loop."""

    def hello(self) -> Hello:
        """Return the first message of a stream."""
        ...

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat that is due."""
        ...

    def received(self, stream: int, message: ToRankLink) -> None:
        """Handle a message that arrived on a stream."""
        ...

    def lost(self, stream: int) -> None:
        """Handle the end of a stream."""
        ...


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Timeouts and waits of the link."""

    backoff_min_s: float = 0.2
    """Wait after the first failure; doubles with each further one."""
    backoff_max_s: float = 10.0
    keepalive_s: float = 10.0
    """Silence on the connection after which a ping is sent; the server must allow this rate."""
    keepalive_timeout_s: float = 5.0
    connect_timeout_s: float = 10.0
    """Time from opening a stream to its Registration."""


@dataclass(frozen=True, slots=True)
class LinkTls:
    """PEM files of a link that uses TLS.

    They are read for each connection, because gRPC cannot change the certificate of a channel.
    """

    ca_file: Path
    """The CA that signed the controllers' certificates."""
    cert_file: Path | None = None
    """This rank's certificate chain, if the controllers require one; needs `key_file`."""
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files as they are now.

        Raises:
            OSError: a file cannot be read.
        """
        pair = [
            None if file is None else file.read_bytes() for file in (self.key_file, self.cert_file)
        ]
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), *pair)


def channel_options(timing: LinkTiming, shape: ModelShape | None = None) -> list[tuple[str, int]]:
    """Return gRPC's options of a rank's channel; the shape bounds what it receives."""
    received = _MAX_MESSAGE_BYTES if shape is None else most_order_bytes(shape)
    return [
        ("grpc.keepalive_time_ms", int(timing.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timing.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", min(received, _MAX_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # Identity alone: a compressed message may be a thousand times larger than what arrived.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # gRPC would measure bandwidth with a ping after every answer, which costs the controller.
        ("grpc.http2.bdp_probe", 0),
        # Two agents of one process must not share a connection: both would lose it at once.
        ("grpc.use_local_subchannel_pool", 1),
    ]


class GrpcRankLink:
    """Client of RankLink.Attach. Create it on any thread; use it on the event loop of `run`.

    Args:
        addresses: `host:port` of the controller replicas. All ranks of a deployment try them in the
            same order, which depends on the deployment: so the replicas share the deployments, and
            when one dies, the others share its deployments.
        timing: timeouts and waits.
        seed: seed of the jitter. Give each rank its own, so that the ranks of a fleet do not
            reconnect all at once.
        tls: None connects in clear text.
        on_change: takes why the rank is not connected, "" once it is; called when that changes.

    Raises:
        InvalidInput: there is no address, or one is no `host:port`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timing: LinkTiming | None = None,
        seed: int = 0,
        tls: LinkTls | None = None,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        wrong = [address for address in addresses if not is_host_port(address)]
        if not addresses or wrong:
            raise InvalidInput(
                f"a link needs a list of controller addresses `host:port`, got {addresses!r:.200}"
            )
        self._addresses = ControllerAddresses(addresses)
        self._timing = timing if timing is not None else LinkTiming()
        self._jitter = random.Random(seed)
        self._tls = tls
        self._stream = 0
        self._outbox: asyncio.Queue[FromRankLink] | None = None
        self._call: Any = None
        """The call of the open stream."""
        self._full = asyncio.Event()
        """Set when the outbox of the open stream was full."""
        self._spoke = False
        """True if another message was sent since the last heartbeat."""
        self._on_change = on_change
        self._unconnected: str | None = None

    async def run(self, listener: LinkListener) -> None:
        """Keep a stream open until cancelled; streams are numbered from 1."""
        failures = 0
        self._addresses.sort(listener.hello().identity.deployment)
        while True:
            address, wait_s = self._addresses.next(), None
            try:
                wait_s = await self._attach(address, listener)
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                _log.info("link_lost", address=address, detail=brief(error))
                self._note(f"no controller answers at {address} ({brief(error)})")
                self._addresses.failed(address)
                wait_s = asked_to_wait(error)
            except EvenkeelError as error:
                _log.warning(
                    "link_violated", address=address, reason=error.reason, detail=str(error)
                )
                self._note(f"{address} answers like no controller: {error}")
            except Exception as error:  # our own bug may cost this stream, but no later one
                _log.exception("link_failed", address=address, detail=brief(error))
            if wait_s is None:
                failures += 1
                doubled = self._timing.backoff_min_s * 2.0 ** min(failures - 1, 16)
                wait_s = min(self._timing.backoff_max_s, doubled)
            else:
                failures = 0
                wait_s = min(max(wait_s, self._timing.backoff_min_s), _MAX_WAIT_S)
            await asyncio.sleep(wait_s * self._jitter.uniform(0.5, 1.0))

    def send(self, message: FromRankLink, stream: int | None = None) -> None:
        """Queue a message; drop it unless `stream` (None: any) is open.

        A full queue ends the stream: the controller is too slow.
        """
        if self._outbox is None or stream not in (None, self._stream):
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("controller_too_slow", stream=self._stream, queued=self._outbox.qsize())
            self._outbox = None
            self._full.set()

    async def finish(self, message: FromRankLink) -> None:
        """Send a last message and wait until the controller has ended the stream.

        Nothing is sent if no stream is open. The caller limits the wait, and cancels `run` next.
        """
        outbox, call = self._outbox, self._call
        if outbox is None or call is None:
            return
        self.send(message)
        self._outbox = None  # Nothing can be written after it.
        await outbox.join()
        await call.done_writing()
        await call.code()

    async def _attach(self, address: str, listener: LinkListener) -> float | None:
        """Run one stream to its end.

        Returns:
            Seconds to wait before the next stream; None to back off.
        """
        hello = listener.hello()
        async with self._channel(address, hello.shape) as channel:
            call = agent_pb2_grpc.RankLinkStub(channel).Attach()  # type: ignore[no-untyped-call]
            self._stream += 1
            stream = self._stream
            try:
                async with asyncio.timeout(self._timing.connect_timeout_s):
                    await call.write(encode_rank_message(hello))
                    first = _decoded(await call.read())
                if (
                    isinstance(first, Registration)
                    and first.outcome is not RegistrationOutcome.REFUSED
                ):
                    return await self._serve(call, stream, address, first, listener)
                return self._refused(address, first)
            finally:
                call.cancel()

    def _refused(self, address: str, answer: ToRankLink | None) -> float | None:
        match answer:
            case NotLeader(address=leader, retry_after_s=retry_after_s):
                self._note(f"the controller at {address} does not lead")
                follow = self._addresses.redirect(address, leader)
                return self._timing.backoff_min_s if follow else retry_after_s
            case Registration(reason=reason, detail=detail):
                _log.warning("registration_refused", address=address, reason=reason, detail=detail)
                self._note(f"the controller at {address} refuses: {detail} ({reason})")
            case _:
                self._note(f"the controller at {address} ended the stream")
        return None

    def _note(self, unconnected: str) -> None:
        if self._on_change is not None and unconnected != self._unconnected:
            self._unconnected = unconnected
            self._on_change(unconnected)

    async def _serve(
        self,
        call: Any,
        stream: int,
        address: str,
        registration: Registration,
        listener: LinkListener,
    ) -> float | None:
        self._note("")
        self._outbox, self._call = asyncio.Queue(_MAX_OUTBOX), call
        self._spoke = False
        self._full.clear()
        # This task runs first: the listener must know of the registration before any call to it.
        reader = asyncio.create_task(
            self._listen(call, stream, address, registration, listener), name="link-reader"
        )
        others: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._write(call, self._outbox), name="link-writer"),
            asyncio.create_task(
                self._beat(registration.heartbeat_interval_s, listener), name="heartbeat"
            ),
            asyncio.create_task(self._full.wait(), name="link-overflow"),
        ]
        try:
            await asyncio.wait([reader, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                # If the call has ended too, the reader reports how it ended.
                if task.done() and not call.done():
                    # Without this task the stream would seem healthy while the rank is mute.
                    task.result()
                    return None
            return await reader
        finally:
            self._outbox = self._call = None
            listener.lost(stream)
            for task in (reader, *others):
                task.cancel()
            await asyncio.gather(reader, *others, return_exceptions=True)

    async def _listen(
        self,
        call: Any,
        stream: int,
        address: str,
        registration: Registration,
        listener: LinkListener,
    ) -> float | None:
        """Pass the controller's messages to the listener until the stream ends."""
        loop = asyncio.get_running_loop()
        began, used = loop.time(), time.thread_time()
        rate = Rate(_MAX_MESSAGES_PER_S, _MAX_MESSAGES_PER_S * _BURST_S)
        message: ToRankLink | None = registration
        while message is not None:
            if rate.take(loop.time()):
                raise PeerViolation(f"more than {_MAX_MESSAGES_PER_S:g} messages a second")
            if isinstance(message, Registration) and message is not registration:
                if message.outcome is RegistrationOutcome.REFUSED:  # The rank has lost its place.
                    return self._refused(address, message)
                raise PeerViolation("a second registration on one stream")
            if isinstance(message, NotLeader):
                # This controller shuts down. Start again at the deployment's first address, so that
                # a rolling update spreads the deployments over the replicas.
                self._addresses.restart()
                return self._refused(address, message)
            listener.received(stream, message)
            await asyncio.sleep(min(_MAX_REST_S, _REST * (time.thread_time() - used)))
            # A controller sends a message at least every half lease. After a silent lease it is
            # paused or out of reach, whatever the state of the connection, and another may lead.
            async with asyncio.timeout(registration.lease_s):
                wire = await call.read()
            used = time.thread_time()
            message = _decoded(wire)
        self._refused(address, None)
        # A controller that ends every stream at once is tried more and more rarely.
        lasted_s = loop.time() - began
        return self._timing.backoff_min_s if lasted_s >= self._timing.backoff_max_s else None

    async def _beat(self, interval_s: float, listener: LinkListener) -> None:
        """Send heartbeats, and skip some while other messages show that the rank is alive.

        A heartbeat with a new trouble is never skipped.
        """
        skipped, sent_trouble = 0, ""
        while True:
            beat = listener.heartbeat()
            if self._spoke and beat.trouble == sent_trouble and skipped < _QUIET_BEATS:
                skipped += 1
            else:
                self.send(beat)
                skipped, sent_trouble = 0, beat.trouble
            self._spoke = False
            await asyncio.sleep(max(interval_s, _MIN_BEAT_S))

    async def _write(self, call: Any, outbox: asyncio.Queue[FromRankLink]) -> None:
        """Write the queued messages. One that cannot be encoded is our own bug: log and skip it."""
        while True:
            message = await outbox.get()
            try:
                encoded = encode_rank_message(message)
            except Exception as error:  # a report would end the next stream too: it is sent again
                _log.error("message_not_sent", kind=type(message).__name__, detail=str(error))
            else:
                await call.write(encoded)
                if not isinstance(message, Heartbeat):
                    self._spoke = True
            outbox.task_done()

    def _channel(self, address: str, shape: ModelShape) -> Any:
        options = channel_options(self._timing, shape)
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self._tls.credentials(), options)


def _decoded(wire: Any) -> ToRankLink | None:
    """Return what gRPC has read; None at the end of the stream.

    Raises:
        PeerViolation: malformed.
    """
    if wire is None:  # so gRPC gives bytes that protobuf cannot read
        raise PeerViolation("bytes that are no message")
    return None if wire is grpc.aio.EOF else decode_controller_message(wire)
