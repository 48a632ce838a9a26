"""grpc.health.v1 without calls that stay open: each takes a place among the streams that wait."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from evenkeel_moe.adapters.grpc.stream_slots import StreamSlots

_REQUEST_WITHIN_S = 10.0


class HealthService:
    """Answers `Check`. `Watch` is not served: its streams would count as no rank's.

    gRPC begins to handle an ordinary call when its request has arrived, so nothing could limit the
    calls before. Therefore `Check` is served as a stream of one request, which clients cannot tell
    apart.

    Args:
        slots: of the streams of the server.
        next_number: returns another number of a stream.
    """

    def __init__(self, slots: StreamSlots, next_number: Callable[[], int]) -> None:
        self._slots = slots
        self._next_number = next_number
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
        number = self._next_number()
        try:
            async with asyncio.timeout(_REQUEST_WITHIN_S) as limit:
                self._slots.wait(number, context.peer(), lambda: _end_now(limit))
                request = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request came")
        finally:
            self._slots.free(number)
        if request is grpc.aio.EOF:
            return
        try:
            question = health_pb2.HealthCheckRequest.FromString(request)
        except DecodeError:
            detail = f"{len(request)} bytes are no HealthCheckRequest"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        await context.write(await self._known.Check(question, context))


def _end_now(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0.0)
