"""Health and reflection, without calls that stay open."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from evenkeel_moe.adapters.addresses import host_of
from evenkeel_moe.peer_budget import Place, Places


@dataclass(eq=False, slots=True)
class _BriefCall:
    """A call that is to end soon."""

    host: str
    limit: asyncio.Timeout
    waits: bool = True

    def give_way(self) -> None:
        """End the call."""
        if not self.limit.expired():
            self.limit.reschedule(0.0)


@contextlib.asynccontextmanager
async def brief_call(waiting: Places[Place], within_s: float, context: Any) -> AsyncIterator[None]:
    """Give a call a place among the streams that wait; it ends if it gives way or takes too long.

    Args:
        waiting: the streams of the server whose first message has not arrived.
        within_s: time for the call.
        context: of the call.
    """
    limit = asyncio.timeout(within_s)
    call = _BriefCall(host_of(context.peer()), limit)
    try:
        async with limit:
            waiting.add(call)
            yield
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request came")
    finally:
        waiting.remove(call)


Brief = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]
"""`brief_call` of a server."""


class ReflectionService(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """Describes services, in calls that do not stay open.

    Args:
        names: of the services.
        brief: gives each call its place.
    """

    def __init__(self, names: Sequence[str], brief: Brief) -> None:
        super().__init__(names)
        self._brief = brief

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Answer the requests of one call."""
        async with self._brief(context):
            async for answer in super().ServerReflectionInfo(requests, context):
                yield answer


class HealthService:
    """Answers `Check`. `Watch` is not served: its streams would count as no rank's.

    gRPC begins to handle an ordinary call when its request has arrived, so nothing could limit the
    calls before. Therefore `Check` is served as a stream of one request, which clients cannot tell
    apart.

    Args:
        brief: gives each call its place.
    """

    def __init__(self, brief: Brief) -> None:
        self._brief = brief
        self._known = health.aio.HealthServicer()

    def add_to(self, server: Any) -> None:
        """Serve `Check` on a server."""
        check: Any = grpc.stream_stream_rpc_method_handler(
            self._check,
            # We parse the request: gRPC would log a traceback for each that is not valid.
            request_deserializer=None,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),)
        )

    async def set_serving(self, *services: str) -> None:
        """Report services as serving."""
        for service in services:
            await self._known.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop_serving(self) -> None:
        """Report all services as not serving."""
        await self._known.enter_graceful_shutdown()

    async def _check(self, _requests: Any, context: Any) -> None:
        async with self._brief(context):
            request = await context.read()
        if request is grpc.aio.EOF:
            return
        try:
            question = health_pb2.HealthCheckRequest.FromString(request)
        except DecodeError:
            detail = f"{len(request)} bytes are no HealthCheckRequest"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        await context.write(await self._known.Check(question, context))
