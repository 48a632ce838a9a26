"""The gRPC server of the rank link: it reads and writes the streams, and limits them."""

import asyncio
import contextlib
import itertools
import math
from functools import partial
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from structlog.contextvars import bound_contextvars

from evenkeel_moe.adapters.grpc.brief_calls import (
    HealthService,
    ReflectionService,
    brief_call,
)
from evenkeel_moe.adapters.grpc.encoder import Encoder
from evenkeel_moe.adapters.grpc.rank_port import RankPort, ServerOptions
from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.adapters.grpc.server_tls import check_identity
from evenkeel_moe.errors import EvenkeelError, PeerViolation, Reason
from evenkeel_moe.peer_budget import Place, Places, Rate, Share, Shares, refused
from evenkeel_moe.protocol.messages import Hello, RankState
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire.from_rank import decode_rank_message
from evenkeel_moe.wire.limits import MAX_HELLO_BYTES, most_message_bytes
from evenkeel_moe.wire.link import FromRankLink
from evenkeel_moe.wire.reports import reported_steps
from evenkeel_moe.wire.trace import trace_id_or_new

_log = structlog.get_logger(__name__)
_SERVICE = "evenkeel.v1.RankLink"
_FLUSH_WITHIN_S = 2.0
"""Time to send what is queued when a stream ends, and then its status."""
_LARGE_BYTES = 256 * 1024
"""Messages above this are decoded in a thread: what grows with a shape must not stop the loop."""
_RETRY_MS = 2000
"""Retry hint in an answer RESOURCE_EXHAUSTED, in the header that gRPC clients know."""


class Attached(Protocol):
    """Receives the messages of one rank's stream."""

    def received(self, message: FromRankLink) -> None:
        """Handle a message after the Hello."""
        ...

    def malformed(self, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        """Handle an invalid report; steps: the step numbers it claims."""
        ...

    def lost(self) -> None:
        """Handle the end of the stream."""
        ...


class RankHub(Protocol):
    """Receives new streams."""

    async def attach(self, hello: Hello, stream: RankStream) -> Attached | None:
        """Register a rank and queue the answer; None: refused, and the stream is closed."""
        ...

    def refuse(self, violation: PeerViolation, stream: RankStream) -> None:
        """Answer an invalid first message, and close the stream."""
        ...


class GrpcServer:
    """Serves RankLink and grpc.health.v1 on one port, and reflection if it is enabled."""

    def __init__(self, options: ServerOptions) -> None:
        self._hub: RankHub | None = None
        self._options = options
        self._encoder = Encoder()
        self._numbers = itertools.count(1)
        self._port = RankPort(options, self._add_services)
        self._limits = limits = options.limits
        self._waiting: Places[Place] = Places(limits.waiting_streams, "silent_streams_ended")
        """A stream without a Hello takes no place of a rank."""
        self._streams = Share(limits.max_streams)
        self._streams_of_hosts = Shares(limits.max_streams_per_peer, self._streams)
        self._bytes_of_deployments = Shares(limits.deployment_bytes, Share(limits.message_bytes))
        self._decoding = asyncio.Lock()
        """One large message at a time: protobuf holds the interpreter's lock, so two would take
        hardly less time, and the event loop would wait twice as long for its turn."""
        self._brief = partial(brief_call, self._waiting, limits.first_message_s)
        self._health = HealthService(self._brief)

    def bind(self) -> None:
        """Bind the port.

        Raises:
            InvalidInput: the address is in use or a TLS file cannot be read.
        """
        self._port.bind()

    @property
    def port(self) -> int:
        """The port; known once bound."""
        return self._port.number

    def _add_services(self, server: Any) -> None:
        attach: Any = grpc.stream_stream_rpc_method_handler(
            self._attach,
            # We parse the messages: an invalid one must count as a violation, not fail the call.
            request_deserializer=None,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Attach": attach}),)
        )
        self._health.add_to(server)
        if self._options.reflection:
            names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            service = ReflectionService(names, self._brief)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(service, server)

    @property
    def open_streams(self) -> int:
        """Streams of ranks that are open, without those whose Hello has not arrived."""
        return self._streams.held

    async def start(self, hub: RankHub) -> None:
        """Accept ranks."""
        self._hub = hub
        await self._port.start()
        await self._health.set_serving("", _SERVICE)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop accepting streams and end the open ones. May be called twice."""
        await self._health.stop_serving()
        await self._port.stop(grace_s)

    async def _attach(self, _requests: Any, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get("traceparent")
        trace_id = trace_id_or_new(given if isinstance(given, str) else None)
        stream = RankStream(next(self._numbers), context.peer(), capacity=self._options.send_queue)
        self._waiting.add(stream)
        try:
            with bound_contextvars(trace_id=trace_id):
                await self._serve_stream(stream, context)
        finally:
            self._waiting.remove(stream)
            if stream.place is not None:
                stream.place.add(-1)

    async def _serve_stream(self, stream: RankStream, context: Any) -> None:
        name = f"rank-stream-{stream.number}"
        writer = asyncio.create_task(self._write(stream, context), name=f"{name}-writer")
        reader = asyncio.create_task(self._read(stream, context), name=f"{name}-reader")
        try:
            # The reader ends when the rank does. The writer may wait for a rank that reads nothing.
            await self._wait_for_end(stream, (stream.ended, writer, reader))
            stream.close()
            await asyncio.wait((writer,), timeout=_FLUSH_WITHIN_S)
        finally:
            stream.close()
            for task in (reader, writer):
                task.cancel()
            for outcome in await asyncio.gather(reader, writer, return_exceptions=True):
                if isinstance(outcome, Exception) and not _is_hang_up(outcome):
                    _log.error("rank_stream_failed", stream=stream.number, exc_info=outcome)
        if stream.exhausted:
            # A rank that reads nothing takes no status either.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_WITHIN_S):
                    await _exhausted(context, stream.exhausted)

    async def _wait_for_end(
        self, stream: RankStream, ends: tuple[asyncio.Future[None], ...]
    ) -> None:
        """Wait for the first end, or until the rank has been silent for too long.

        One timer for all messages: a timer for each would take as long as decoding it.
        """
        loop = asyncio.get_running_loop()
        left_s = silent_s = self._limits.silent_s
        while left_s > 0:
            ended, _ = await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if ended:
                return
            left_s = min(silent_s, stream.reading_since + silent_s - loop.time())
        _refuse(stream, "rank_silent", f"nothing was heard for {silent_s:g} s")

    async def _write(self, stream: RankStream, context: Any) -> None:
        while (message := await stream.next()) is not None:
            try:
                data = self._encoder.encode(message)
            except (EvenkeelError, ValueError) as error:
                _log.error("message_not_sent", kind=type(message).__name__, error=str(error))
                continue
            await context.write(data)

    async def _read(self, stream: RankStream, context: Any) -> None:
        """Pass the rank's messages to its deployment until the stream ends."""
        hub = self._hub
        assert hub is not None
        try:
            async with asyncio.timeout(self._limits.first_message_s):
                first = await context.read()
        except TimeoutError:
            return
        if first is grpc.aio.EOF:
            return
        try:
            _check_size(first, MAX_HELLO_BYTES)
            hello = decode_rank_message(_parse(first), None)
            assert isinstance(hello, Hello)
            required = self._options.tls_require_identity
            auth = context.auth_context()
            stream.certified = check_identity(auth, hello.identity, required=required)
        except PeerViolation as violation:
            hub.refuse(violation, stream)
            return
        if not self._take_place(stream):
            return
        of_deployment = self._bytes_of_deployments.of(hello.identity.deployment)
        stream.waiting = Share(self._limits.stream_bytes, of_deployment)
        attached = await hub.attach(hello, stream)
        if attached is None:
            return
        try:
            await self._read_messages(hello, stream, context, attached)
        finally:
            attached.lost()

    def _take_place(self, stream: RankStream) -> bool:
        """Give a rank whose Hello is checked its place; return False if there is none."""
        self._waiting.remove(stream)
        of_host = self._streams_of_hosts.of(stream.host)
        full = of_host.exceeded(1)
        if full is not None:
            whose = f" of {stream.host}" if full is of_host else ""
            why = f"{full.held} streams{whose} are open, no more are taken"
            _refuse(stream, "too_many_streams", why)
            return False
        stream.place = of_host
        of_host.add(1)
        return True

    async def _read_messages(
        self, hello: Hello, stream: RankStream, context: Any, attached: Attached
    ) -> None:
        """Pass on what follows the Hello, until the stream ends or breaks a limit."""
        loop, limits = asyncio.get_running_loop(), self._limits
        most, per_s = most_message_bytes(hello.shape), limits.max_messages_per_s
        rate = Rate(per_s, per_s * limits.message_burst_s)
        while True:
            stream.reading_since = loop.time()
            data = await context.read()
            stream.reading_since = math.inf
            if data is grpc.aio.EOF:
                return
            if rate.take(loop.time()):
                _refuse(stream, "rank_too_fast", f"more than {per_s:g} messages a second")
                return
            try:
                _check_size(data, most)
                stream.message_bytes = len(data)
                if len(data) > _LARGE_BYTES:
                    message = await self._decode_in_thread(data, hello, stream)
                else:
                    message = _decode(data, hello)
                attached.received(message)
            except _BadReport as report:
                attached.malformed(report, report.steps)
            except PeerViolation as violation:
                refused("rank_violation", stream.peer, stream=stream.number, detail=str(violation))
                return
            del data
            await stream.waiting.room()

    async def _decode_in_thread(
        self, data: bytes, hello: Hello, stream: RankStream
    ) -> FromRankLink:
        assert stream.place is not None
        async with stream.place.turn, self._decoding:
            return await asyncio.to_thread(_decode, data, hello)


def _refuse(stream: RankStream, event: str, why: str) -> None:
    """Let the stream end with the limit that it met, and a hint when the rank may come back."""
    refused(event, stream.peer, stream=stream.number, detail=why)
    stream.exhausted = why


async def _exhausted(context: Any, why: str) -> None:
    """End the call with a hint when to retry. Raises, as `abort` does."""
    hint = (("grpc-retry-pushback-ms", str(_RETRY_MS)),)
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why, hint)


def _check_size(data: bytes, most: int) -> None:
    """Refuse a message that is larger than any right one, before it is parsed.

    Raises:
        PeerViolation: LIMIT_EXCEEDED.
    """
    if len(data) > most:
        detail = f"a message of {len(data)} bytes, at most {most} are taken from this rank"
        raise PeerViolation(detail, Reason.LIMIT_EXCEEDED)


class _BadReport(PeerViolation):
    """A load report that cannot be right; it does not end the stream."""

    def __init__(self, violation: PeerViolation, steps: tuple[int, ...]) -> None:
        super().__init__(str(violation), violation.reason)
        self.steps = steps


def _decode(data: bytes, hello: Hello) -> FromRankLink:
    """Decode one message; may run on any thread.

    Raises:
        PeerViolation: the message is invalid.
    """
    wire = _parse(data)
    try:
        message = decode_rank_message(wire, hello)
    except PeerViolation as violation:
        if wire.WhichOneof("body") != "load_report":
            raise
        raise _BadReport(violation, tuple(reported_steps(wire.load_report))) from None
    if isinstance(message, RankState) and message.placement is not None:
        _ = message.placement.digest  # Computed here, because it reads the whole map.
    return message


def _is_hang_up(error: Exception) -> bool:
    """Return True if the error only means that the rank disconnected."""
    return isinstance(error, grpc.RpcError | grpc.aio.UsageError | grpc.aio.InternalError)


def _parse(data: bytes) -> agent_pb2.RankMessage:
    try:
        return agent_pb2.RankMessage.FromString(data)
    except DecodeError as error:
        raise PeerViolation(f"{len(data)} bytes that are no message: {error}") from None
