"""Limits the size of request bodies, of each and of all that are held at a time."""

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel_moe.api.auth import Role, needed_role
from evenkeel_moe.api.problems import problem_response
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.peer_budget import PeerLimits, Share, Shares, refused

_SHARE = 4
"""The part of what bodies may take together that the requests of one token may take, but at least
one whole body."""
_SMALL = 1024
"""The part of it that each token may take whatever the others take: 64 KiB."""


class BodyLimit:
    """ASGI middleware that limits the memory that bodies take, before a route sees any of them.

    The bodies of one token take only a part of it, so that a client that sends slowly does not keep
    others out. A small body is accepted from a token that holds nothing else, also if the memory is
    full: the token file bounds how many there are.

    The body of a request that only reads is never taken, because no route wants it.

    Args:
        app: next application.
        limits: a larger body is answered 413, and what would make all bodies, or those of one
            token, more than they may be is answered 503.
    """

    def __init__(self, app: ASGIApp, limits: PeerLimits) -> None:
        self._app = app
        self._max_bytes, in_all = limits.body_bytes, limits.bodies_bytes
        of_token = max(self._max_bytes, in_all // _SHARE)
        self._of_tokens = Shares(of_token, Share(in_all), always=in_all // _SMALL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif needed_role(scope["method"], scope["path"]) is Role.READ:
            await self._app(scope, replay(b"", receive), send)
        else:
            await self._limit(scope, receive, send)

    async def _limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = scope["state"]["token"].name
        share, held = self._of_tokens.of(token), 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            arrived = len(message.get("body", b""))
            held += arrived
            share.add(arrived)
            if (full := share.exceeded()) is not None:
                whose = f" of token {token}" if full is share else ""
                detail = f"at most {full.most} bytes of bodies{whose} are held at a time"
                refused("body_refused", token, detail=detail)
                raise Unavailable(detail, Reason.BUSY)
            return message

        try:
            taken = await self._take(scope, counted)
            if isinstance(taken, bytes):
                await self._app(scope, replay(taken, receive), send)
            elif taken is not None:
                await taken(scope, receive, send)
        finally:
            share.add(-held)

    async def _take(self, scope: Scope, receive: Receive) -> bytes | Response | None:
        """Return the whole body, or a refusal; None if the client has gone."""
        # The rest of a refused body is not read, so the connection cannot be used again.
        close = {"Connection": "close"}
        path = scope["path"]
        declared = Headers(scope=scope).get("content-length", "").lstrip("0")
        body = None
        # 20 digits and more are over any limit, and `int` refuses very long numbers.
        over = declared.isdecimal() and (len(declared) > 19 or int(declared) > self._max_bytes)
        if not over:
            try:
                body = await read_body(receive, self._max_bytes)
            except ClientDisconnect:
                return None  # A body that was cut off might be read as another, valid one.
            except Unavailable as error:
                headers = {**close, "Retry-After": "1"}
                return problem_response("unavailable", str(error), path, error.reason, headers)
        if body is None:
            detail = f"a body may have at most {self._max_bytes} bytes"
            return problem_response("too-large", detail, path, headers=close)
        return body


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
