"""grpc.health.v1 without calls that stay open: each takes a place among the streams that wait."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from evenkeel_moe.adapters.addresses import host_of
from evenkeel_moe.peer_budget import Place, Places


@dataclass(eq=False, slots=True)
class _HealthCheck:
    """A call whose request has not arrived."""

    host: str
    limit: asyncio.Timeout
    waits: bool = True

    def give_way(self) -> None:
        """End the call."""
        if not self.limit.expired():
            self.limit.reschedule(0.0)


class HealthService:
    """Answers `Check`. `Watch` is not served: its streams would count as no rank's.

    gRPC begins to handle an ordinary call when its request has arrived, so nothing could limit the
    calls before. Therefore `Check` is served as a stream of one request, which clients cannot tell
    apart.

    Args:
        waiting: the streams of the server whose first message has not arrived.
        within_s: time for a request.
    """

    def __init__(self, waiting: Places[Place], within_s: float) -> None:
        self._waiting, self._within_s = waiting, within_s
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
        limit = asyncio.timeout(self._within_s)
        call = _HealthCheck(host_of(context.peer()), limit)
        try:
            async with limit:
                self._waiting.add(call)
                request = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request came")
        finally:
            self._waiting.remove(call)
        if request is grpc.aio.EOF:
            return
        try:
            question = health_pb2.HealthCheckRequest.FromString(request)
        except DecodeError:
            detail = f"{len(request)} bytes are no HealthCheckRequest"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        await context.write(await self._known.Check(question, context))
