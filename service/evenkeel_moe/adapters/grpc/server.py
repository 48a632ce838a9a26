"""The controller's end of the rank link: streams, bounded queues, health, limits."""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from structlog.contextvars import bound_contextvars

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.adapters.grpc.encoder import Encoder
from evenkeel_moe.adapters.grpc.server_tls import ServerCertificates, check_identity
from evenkeel_moe.errors import EvenkeelError, InvalidInput, PeerViolation
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire.codec import decode_rank_message
from evenkeel_moe.wire.link import FromRankLink, ReportAck, ToRankLink
from evenkeel_moe.wire.reports import steps_said
from evenkeel_moe.wire.trace import trace_id_or_new

__all__ = ["Attached", "GrpcServer", "RankHub", "RankStream", "ServerOptions"]

_log = structlog.get_logger(__name__)
_SERVICE = "evenkeel.v1.RankLink"
_HELLO_WITHIN_S = 10.0
_LAST_WORDS_S = 2.0
"""For what is queued when a stream ends."""
_ACK_EVERY_S = 4.0
"""Answers to reports are joined for so long: to write one costs more than to read a report."""
_ACK_AFTER = 12
"""And no more reports than these: with 16 that are not answered a rank waits."""
_BURST_S = 4.0
"""A stream may be that many seconds of its rate ahead: after a reconnect all unacknowledged reports come again."""
_WINDOW_BYTES = 256 * 1024
"""Of one stream, on their way to us and not yet read."""
_RETRY_MS = 2000
"""Hint in an answer RESOURCE_EXHAUSTED, in the header gRPC clients know it by."""


class RankStream:
    """One open stream, as the controller writes to it."""

    def __init__(self, number: int, peer: str, *, capacity: int) -> None:
        self.number = number
        """Rises over the life of this process."""
        self.peer = peer
        self.too_fast = False
        """It was ended for sending more than it may."""
        # Kept: to ask for the running loop is a system call each time.
        self._loop = asyncio.get_running_loop()
        self._capacity = capacity
        self._queue: deque[ToRankLink] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._ack: ReportAck | None = None
        """Held back until the next is due."""
        self._held_back = 0
        """Reports it answers."""
        self._next_ack_at = 0.0
        self._ack_timer: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more will be sent."""
        return self._closed

    def send(self, message: ToRankLink) -> None:
        """Queue a message; dropped when the stream is closed. A rank too slow to take them is cut off."""
        if self._closed:
            return
        if isinstance(message, ReportAck):
            self._acknowledge(message)
        else:
            self._enqueue(message)

    def _acknowledge(self, ack: ReportAck) -> None:
        """Answer a report at once, or together with those that come until the next answer is due."""
        self._held_back += 1
        if self._ack is not None:
            self._ack = _join_acks(self._ack, ack)
            if self._held_back >= _ACK_AFTER:
                self._flush_ack()
            return
        now = self._loop.time()
        self._ack = ack
        if ack.reason is not None or now >= self._next_ack_at:
            self._flush_ack()
        else:
            self._ack_timer = self._loop.call_at(self._next_ack_at, self._flush_ack)

    def _flush_ack(self) -> None:
        ack, self._ack, self._held_back = self._ack, None, 0
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if ack is None or self._closed:
            return
        self._next_ack_at = self._loop.time() + _ACK_EVERY_S
        if self._queue and isinstance(last := self._queue[-1], ReportAck):
            self._queue.pop()
            ack = _join_acks(last, ack)
        self._enqueue(ack)

    def _enqueue(self, message: ToRankLink) -> None:
        if len(self._queue) >= self._capacity:
            _log.warning(
                "rank_too_slow", peer=self.peer, stream=self.number, queued=len(self._queue)
            )
            self._queue.clear()
            self.close()
            return
        self._queue.append(message)
        self._wake.set()

    def close(self, last: ToRankLink | None = None) -> None:
        """Send what is queued and one last message, then end the stream."""
        if not self._closed:
            self._flush_ack()
        if last is not None:
            self.send(last)
        self._closed = True
        self._wake.set()

    async def next(self) -> ToRankLink | None:
        """The next message to write; None at the end."""
        while not self._queue:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()


class _Pace:
    """Messages a stream may send: `per_s` on average, a burst ahead."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._left = per_s * _BURST_S
        self._at = now

    def take(self, now: float) -> bool:
        """Whether one more message is within the rate."""
        self._left = min(self._per_s * _BURST_S, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Attached(Protocol):
    """One rank's stream, as the controller hears it."""

    def received(self, message: FromRankLink) -> None:
        """A message after the Hello."""
        ...

    def malformed(self, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        """A report that cannot be right; steps: the step numbers it claims."""
        ...

    def lost(self) -> None:
        """The stream ended."""
        ...


class RankHub(Protocol):
    """Where streams lead."""

    async def attach(self, hello: Hello, stream: RankStream) -> Attached | None:
        """Register a rank; its answer is queued on the stream. None: turned away, the stream is closed."""
        ...

    def refuse(self, violation: PeerViolation, stream: RankStream) -> None:
        """A first message that is no usable Hello: answer and close the stream."""
        ...


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server listens."""

    host: str
    port: int
    max_message_bytes: int
    send_queue: int
    keepalive_s: float
    keepalive_timeout_s: float
    max_streams: int = 4096
    """Streams open at a time; more are answered RESOURCE_EXHAUSTED."""
    max_messages_per_s: float = 200.0
    """Of one stream; a faster one is ended with RESOURCE_EXHAUSTED."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    max_connection_age_s: float = 0.0
    """A connection this old is told to go, a tenth more or less by chance; 0: never."""
    max_connection_age_grace_s: float = 60.0
    """After that its streams are cut."""
    tls_require_identity: bool = False
    """Turn away certificates that name no ranks; those that name some are held to them in any case."""
    reflection: bool = False
    """Tell clients which services and messages there are."""


class GrpcServer:
    """RankLink and grpc.health.v1 on one port, and reflection where it is wanted."""

    def __init__(self, options: ServerOptions) -> None:
        self._hub: RankHub | None = None
        self._options = options
        self._encoder = Encoder()
        self._numbers = itertools.count(1)
        self._server: Any = None
        self._open = 0
        self._health = health.aio.HealthServicer()
        self.port = 0
        """Known once bound."""

    def bind(self) -> None:
        """Take the port.

        Raises:
            InvalidInput: the address is taken or a TLS file cannot be read.
        """
        options = self._options
        server = grpc.aio.server(
            options=[
                *_ages(options),
                ("grpc.max_receive_message_length", options.max_message_bytes),
                ("grpc.max_send_message_length", options.max_message_bytes),
                ("grpc.keepalive_time_ms", round(options.keepalive_s * 1000)),
                ("grpc.keepalive_timeout_ms", round(options.keepalive_timeout_s * 1000)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                # Ranks probe too; a server that counts that as abuse would cut them off.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.http2.max_ping_strikes", 0),
                # gRPC measures each connection's bandwidth with a ping after every read, to size this window by it:
                # that is half of what its threads do here.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                # A second server on the port would get every other rank.
                ("grpc.so_reuseport", 0),
            ]
        )
        attach: Any = grpc.stream_stream_rpc_method_handler(
            self._attach,
            # Parsed by us: what is no message must count as a violation, not as a crash of the call.
            request_deserializer=None,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Attach": attach}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if options.reflection:
            names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        address = host_port(options.host, options.port)
        cert, key = options.tls_cert_file, options.tls_key_file
        try:
            if cert is None or key is None:
                self.port = server.add_insecure_port(address)
            else:
                certificates = ServerCertificates(cert, key, options.tls_client_ca_file)
                self.port = server.add_secure_port(address, certificates.credentials())
        except (RuntimeError, OSError) as error:
            raise InvalidInput(f"cannot listen for ranks on {address}: {error}") from error
        self._server = server

    async def start(self, hub: RankHub) -> None:
        """Let ranks in."""
        self._hub = hub
        await self._server.start()
        for service in ("", _SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop taking streams and end those there are. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            await server.stop(grace_s)

    async def _attach(self, _requests: Any, context: Any) -> None:
        if self._open >= self._options.max_streams:
            _log.warning("too_many_streams", peer=context.peer(), open=self._open)
            await _exhausted(context, f"{self._open} streams are open, no more are taken")
        self._open += 1
        given = dict(context.invocation_metadata() or ()).get("traceparent")
        try:
            with bound_contextvars(
                trace_id=trace_id_or_new(given if isinstance(given, str) else None)
            ):
                await self._serve_stream(context)
        finally:
            self._open -= 1

    async def _serve_stream(self, context: Any) -> None:
        stream = RankStream(next(self._numbers), context.peer(), capacity=self._options.send_queue)
        writer = asyncio.create_task(
            self._write(stream, context), name=f"rank-stream-{stream.number}-writer"
        )
        reader = asyncio.create_task(
            self._read(stream, context), name=f"rank-stream-{stream.number}-reader"
        )
        try:
            # The writer ends when the stream is closed by us, the reader when the rank closed it.
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            stream.close()
            await asyncio.wait((writer,), timeout=_LAST_WORDS_S)
        finally:
            stream.close()
            for task in (reader, writer):
                task.cancel()
            for outcome in await asyncio.gather(reader, writer, return_exceptions=True):
                if isinstance(outcome, Exception) and not _is_gone(outcome):
                    _log.error("rank_stream_failed", stream=stream.number, exc_info=outcome)
        if stream.too_fast:
            per_s = self._options.max_messages_per_s
            await _exhausted(context, f"more than {per_s:g} messages a second")

    async def _write(self, stream: RankStream, context: Any) -> None:
        while (message := await stream.next()) is not None:
            try:
                data = self._encoder.encode(message)
            except (EvenkeelError, ValueError) as error:
                _log.error("message_not_sent", kind=type(message).__name__, error=str(error))
                continue
            await context.write(data)

    async def _read(self, stream: RankStream, context: Any) -> None:
        """The rank's messages to its deployment, until either end is done."""
        hub = self._hub
        assert hub is not None
        try:
            async with asyncio.timeout(_HELLO_WITHIN_S):
                first = await context.read()
        except TimeoutError:
            return
        if first is grpc.aio.EOF:
            return
        try:
            hello = decode_rank_message(_parse(first), None)
            assert isinstance(hello, Hello)
            required = self._options.tls_require_identity
            check_identity(context.auth_context(), hello.identity, required=required)
        except PeerViolation as violation:
            hub.refuse(violation, stream)
            return
        attached = await hub.attach(hello, stream)
        if attached is None:
            return
        loop = asyncio.get_running_loop()
        pace = _Pace(self._options.max_messages_per_s, loop.time())
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                if not pace.take(loop.time()):
                    _log.warning("rank_too_fast", stream=stream.number, peer=stream.peer)
                    stream.too_fast = True
                    return
                if not _deliver(data, hello, attached, stream):
                    return
        finally:
            attached.lost()


def _ages(options: ServerOptions) -> list[tuple[str, int]]:
    """gRPC's own way to move streams; it spreads the ages by 10 % so that a fleet does not come back at once."""
    if not options.max_connection_age_s:
        return []
    return [
        ("grpc.max_connection_age_ms", max(1, round(options.max_connection_age_s * 1000))),
        (
            "grpc.max_connection_age_grace_ms",
            max(1, round(options.max_connection_age_grace_s * 1000)),
        ),
    ]


async def _exhausted(context: Any, why: str) -> None:
    """End the call so that the client knows when to come again. Raises, as `abort` does."""
    hint = (("grpc-retry-pushback-ms", str(_RETRY_MS)),)
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why, hint)


def _deliver(data: bytes, hello: Hello, attached: Attached, stream: RankStream) -> bool:
    """One message; False when it ends the stream."""
    try:
        message = _parse(data)
    except PeerViolation as violation:
        _log.warning(
            "rank_violation", stream=stream.number, peer=stream.peer, detail=str(violation)
        )
        return False
    try:
        attached.received(decode_rank_message(message, hello))
    except PeerViolation as violation:
        if message.WhichOneof("body") == "load_report":
            attached.malformed(violation, tuple(steps_said(message.load_report)))
            return True
        _log.warning(
            "rank_violation", stream=stream.number, peer=stream.peer, detail=str(violation)
        )
        return False
    return True


def _join_acks(one: ReportAck, other: ReportAck) -> ReportAck:
    """One answer for two reports, where the first was not written yet."""
    highest = other.highest_step if one.highest_step is None else one.highest_step
    if highest is not None and other.highest_step is not None:
        highest = max(highest, other.highest_step)
    return ReportAck(highest, one.rejected_steps + other.rejected_steps, other.reason or one.reason)


def _is_gone(error: Exception) -> bool:
    """Whether it only says that the rank hung up."""
    return isinstance(error, grpc.RpcError | grpc.aio.UsageError | grpc.aio.InternalError)


def _parse(data: bytes) -> agent_pb2.RankMessage:
    try:
        return agent_pb2.RankMessage.FromString(data)
    except DecodeError as error:
        raise PeerViolation(f"{len(data)} bytes that are no message: {error}") from None
