"""ASGI middleware in front of the routes, in the order in which it sees a request.

Each answers the request, or passes it on.
"""

import hashlib
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from evenkeel_moe.api.auth import OPEN_PATHS, Role, Token, Tokens, needed_role
from evenkeel_moe.api.context import deployment_in, tags_in
from evenkeel_moe.api.problems import problem_response
from evenkeel_moe.errors import Reason
from evenkeel_moe.peer_budget import PeerLimits, Share, Shares, refused
from evenkeel_moe.ports.operations import AuditEntry, Operations
from evenkeel_moe.wire.trace import trace_id_or_new

_MOST_PATH = 256
_MOST_KEY = 128
"""Characters of a path and of an idempotency key that an audit row keeps."""
_SHARE = 4
"""The part of what bodies may take together that the requests of one token may take, but at least
one whole body."""
_SMALL = 1024
"""The part of it that each token may take whatever the others take: 64 KiB."""
_CLOSE = {"Connection": "close"}
"""The rest of a refused body is not read, so the connection cannot be used again."""


class Middleware:
    """Passes on whatever is no HTTP request; a subclass handles those that are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        handle = self.handle if scope["type"] == "http" else self._app
        await handle(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on, or answer it."""
        raise NotImplementedError


class TraceMiddleware(Middleware):
    """Gives every request a trace: the one its `traceparent` names, or a new one.

    Puts the trace id into the request's state, into every log line of the request, and into the
    response header `Trace-Id`.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the trace id and pass the request on."""
        trace_id = trace_id_or_new(Headers(scope=scope).get("traceparent"))
        scope.setdefault("state", {})["trace_id"] = trace_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (b"trace-id", trace_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with bound_contextvars(trace_id=trace_id):
            await self._app(scope, receive, send_named)


class ReadTags(Middleware):
    """Adds an ETag to answers of GET and honours `If-None-Match`.

    The answer is still computed; 304 saves its transfer and the client's work. Of an answer to HEAD
    only the headers are sent.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer 304 if the client has this answer."""
        if scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        # A proxy that compresses the answer makes its tag a weak one (RFC 9110, section 13.1.2).
        named = tags_in(Headers(scope=scope).get("if-none-match"))
        tags = {tag.removeprefix("W/") for tag in named}
        start: Message | None = None

        async def send_tagged(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] == 200:
                start = message  # Held back until its body, and so its tag, is known.
                return
            if start is None:
                await send(message)
                return
            held, start = start, None
            if not message.get("more_body", False):
                held, message = _tagged(held, message, tags)
            if scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(held)
            await send(message)

        await self._app(scope, receive, send_tagged)


def _tagged(start: Message, body: Message, tags: set[str]) -> tuple[Message, Message]:
    """Return start and body of the answer, with a tag; a 304 if the client knows that tag."""
    headers = MutableHeaders(raw=[*start["headers"]])
    if "etag" not in headers:
        digest = hashlib.blake2b(body.get("body", b""), digest_size=16).hexdigest()
        headers["etag"] = f'"{digest}"'
    headers.setdefault("cache-control", "no-cache")
    if headers["etag"] not in tags and "*" not in tags:
        return {**start, "headers": headers.raw}, body
    del headers["content-length"]
    del headers["content-type"]
    return {**start, "status": 304, "headers": headers.raw}, {**body, "body": b""}


class BearerAuth(Middleware):
    """Without a token even an unknown path gives 401, not 404."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        super().__init__(app)
        self._tokens = tokens

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its token in `request.state`, or answer 401."""
        if scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            refusal = problem_response(
                "unauthorized",
                "send a known token that has not ended, as `Authorization: Bearer TOKEN`",
                scope["path"],
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["token"] = token
        await self._app(scope, receive, send)


class Changes(Middleware):
    """Answers 403 if a token's role does not allow a change, and records every change asked for.

    Args:
        app: next application.
        operations: returns the controller that keeps the records.
    """

    def __init__(self, app: ASGIApp, operations: Callable[[], Operations]) -> None:
        super().__init__(app)
        self._operations = operations

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it, and record its outcome, unless it only reads."""
        needed = needed_role(scope["method"], scope["path"])
        if needed is Role.READ:
            await self._app(scope, receive, send)
            return
        token: Token = scope["state"]["token"]
        recorded = False

        async def record(status: int) -> None:
            nonlocal recorded
            recorded = True
            path: str = scope["path"]
            key = Headers(scope=scope).get("idempotency-key")
            await self._operations().record(
                AuditEntry(
                    deployment=deployment_in(path),
                    by=token.name,
                    role=token.role.value,
                    method=scope["method"],
                    path=path[:_MOST_PATH],
                    status=status,
                    idempotency_key=None if key is None else key[:_MOST_KEY],
                    trace_id=scope["state"].get("trace_id"),
                    change=scope["state"].get("change"),
                )
            )

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await record(message["status"])
            await send(message)

        answer = self._app
        if not token.role.covers(needed):
            answer = problem_response(
                "forbidden",
                f"{scope['method']} needs role {needed} here, token {token.name} has {token.role}",
                scope["path"],
            )
        try:
            await answer(scope, receive, send_recorded)
        except BaseException:
            # A failure, or the server's stop in the middle of a change. It goes on to the server.
            if not recorded:
                await record(500)
            raise


class _Refused(Exception):
    """A body is not taken; `answer` says why."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


class BodyLimit(Middleware):
    """Limits the memory that bodies take, before a route sees any of them.

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
        super().__init__(app)
        self._max_bytes, in_all = limits.body_bytes, limits.bodies_bytes
        of_token = max(self._max_bytes, in_all // _SHARE)
        self._of_tokens = Shares(of_token, Share(in_all), always=in_all // _SMALL)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or refuse it."""
        if needed_role(scope["method"], scope["path"]) is Role.READ:
            await self._app(scope, replay(b"", receive), send)
            return
        share, held = self._of_tokens.of(scope["state"]["token"].name), 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            arrived = len(message.get("body", b""))
            held += arrived
            share.add(arrived)
            self._check(scope, held, share)
            return message

        try:
            self._check(scope, _declared(scope), share)
            body = await Request(scope, counted).body()
        except ClientDisconnect:
            return  # A body that was cut off might be read as another, valid one.
        except _Refused as refusal:
            await refusal.answer(scope, receive, send)
        else:
            await self._app(scope, replay(body, receive), send)
        finally:
            share.add(-held)

    def _check(self, scope: Scope, nbytes: int, share: Share) -> None:
        """Refuse a body of so many bytes, or one that does not fit beside the others."""
        path, token = scope["path"], scope["state"]["token"].name
        if nbytes > self._max_bytes:
            detail = f"a body may have at most {self._max_bytes} bytes"
            raise _Refused(problem_response("too-large", detail, path, headers=_CLOSE))
        if (full := share.exceeded()) is not None:
            whose = f" of token {token}" if full is share else ""
            detail = f"at most {full.most} bytes of bodies{whose} are held at a time"
            refused("body_refused", token, detail=detail)
            headers = _CLOSE | {"Retry-After": "1"}
            raise _Refused(problem_response("unavailable", detail, path, Reason.BUSY, headers))


def _declared(scope: Scope) -> int:
    """Return the bytes that a request says its body has; 0 if it does not say."""
    declared = Headers(scope=scope).get("content-length", "").lstrip("0")
    # 20 digits are over any limit, and `int` refuses very long numbers.
    return int(declared[:20]) if declared.isdecimal() else 0


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
