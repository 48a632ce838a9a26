"""Gives every request a trace: the one its `traceparent` names, or a new one."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from evenkeel_moe.wire.trace import trace_id_or_new


class TraceMiddleware:
    """The outermost ASGI middleware.

    Puts the trace id into the request's state, into every log line of the request, and into the
    response header `Trace-Id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the trace id and pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace_id = trace_id_or_new(Headers(scope=scope).get("traceparent"))
        scope.setdefault("state", {})["trace_id"] = trace_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (b"trace-id", trace_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with bound_contextvars(trace_id=trace_id):
            await self._app(scope, receive, send_named)
