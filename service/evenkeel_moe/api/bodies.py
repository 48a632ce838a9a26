"""Limits the size of request bodies."""

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel_moe.api.problems import problem_response

MAX_BODY_BYTES = 8 << 20
"""An explicit target of 61 layers on 320 ranks of 9 slots is about 1 MB."""


class BodyLimit:
    """ASGI middleware that answers 413 to a body over the limit, before a route sees any of it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "").lstrip("0")
        body = None
        # 20 digits and more are over any limit, and `int` refuses very long numbers.
        over = declared.isdecimal() and (len(declared) > 19 or int(declared) > self._max_bytes)
        if not over:
            try:
                body = await read_body(receive, self._max_bytes)
            except ClientDisconnect:
                return  # A body that was cut off might be read as another, valid one.
        if body is None:
            refusal = problem_response(
                "too-large",
                f"a body may have at most {self._max_bytes} bytes",
                scope["path"],
                # The rest of the body is not read, so the connection cannot be used again.
                headers={"Connection": "close"},
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, replay(body, receive), send)


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the whole body; None if it is larger than `max_bytes`.

    Raises:
        ClientDisconnect: the client disconnected before the end of the body.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > max_bytes:
            return None
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives this body first, then whatever `receive` gives."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
