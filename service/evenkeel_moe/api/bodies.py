"""Limits the size of request bodies, of each and of all that are held at a time."""

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel_moe.api.auth import Role, needed_role
from evenkeel_moe.api.problems import problem_response
from evenkeel_moe.errors import Reason
from evenkeel_moe.peer_budget import PeerLimits, Share, Shares, refused

_SHARE = 4
"""The part of what bodies may take together that the requests of one token may take, but at least
one whole body."""
_SMALL = 1024
"""The part of it that each token may take whatever the others take: 64 KiB."""
_CLOSE = {"Connection": "close"}
"""The rest of a refused body is not read, so the connection cannot be used again."""


class _Refused(Exception):
    """A body is not taken; `answer` says why."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


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
