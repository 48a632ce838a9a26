"""`Idempotency-Key`: a POST that is repeated with its key gets the answer it got before.

Source: draft-ietf-httpapi-idempotency-key-header-07, but for one status: another body under a used key is 409
`id_reused` here, not 422, as it is for a plan_id chosen by the client.

Kept in this replica's memory for an hour, within bounds. Plans outlive that: the key is also the plan's id where the
body has none, and plans are in the store.
"""

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel.api.bodies import read_body, replay
from evenkeel.api.context import PLAN_ID_PATTERN
from evenkeel.api.problems import problem_response
from evenkeel.errors import Reason

__all__ = ["Idempotency"]

_TTL_S = 3600.0
_MOST_KEYS = 4096
_MOST_BYTES = 64 << 20
"""Of answers; a plan of a large model is about one MB."""


_Name = tuple[str, str, str]
"""Token, path, key."""


@dataclass(frozen=True, slots=True)
class _Answer:
    digest: bytes
    """Of the body the key was used with."""
    expires_at: float
    messages: tuple[Message, ...]
    size: int


class Idempotency:
    """ASGI middleware behind authentication; keys of different tokens and paths are different keys."""

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, *, most_keys: int = _MOST_KEYS, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._under_way: dict[_Name, bytes] = {}
        """Digests of bodies whose first answer is not out yet."""
        self._answers: OrderedDict[_Name, _Answer] = OrderedDict()
        """Oldest first."""
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from memory, or let the request through and remember a 2xx answer."""
        key = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST" or not re.match(PLAN_ID_PATTERN, key):
            await self._app(scope, receive, send)  # A key of another form is for the route to refuse.
            return
        body = await read_body(receive, self._max_body_bytes)
        assert body is not None, "BodyLimit stands before this"
        digest = hashlib.sha256(body).digest()
        name = (scope["state"]["token"].name, scope["path"], key)
        self._drop(asyncio.get_running_loop().time())
        known = self._answers.get(name)
        if known is None and name not in self._under_way:
            await self._answer_anew(name, digest, scope, replay(body, receive), send)
        elif digest != (self._under_way[name] if known is None else known.digest):
            detail = f"Idempotency-Key {key} was used with another body"
            refusal = problem_response("conflict", detail, scope["path"], Reason.ID_REUSED)
            await refusal(scope, receive, send)
        elif known is None:
            detail = f"the first request with Idempotency-Key {key} is still under way"
            headers = {"Retry-After": "1"}
            refusal = problem_response("conflict", detail, scope["path"], Reason.BUSY, headers)
            await refusal(scope, receive, send)
        else:
            for message in known.messages:
                await send(_marked(message))

    async def _answer_anew(
        self, name: _Name, digest: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(dict(message))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # Before the client can repeat the call. An error changed nothing: it may be tried again.
                if 200 <= messages[0]["status"] < 300:
                    self._remember(name, digest, tuple(messages))
            await send(message)

        self._under_way[name] = digest
        try:
            await self._app(scope, receive, keep)
        finally:
            del self._under_way[name]

    def _remember(self, name: _Name, digest: bytes, messages: tuple[Message, ...]) -> None:
        now = asyncio.get_running_loop().time()
        size = sum(len(message.get("body", b"")) for message in messages)
        self._answers[name] = _Answer(digest, now + _TTL_S, messages, size)
        self._held += size
        self._drop(now)

    def _drop(self, now: float) -> None:
        """Drop answers that are too old, and the oldest of too many."""
        while self._answers and (
            len(self._answers) > self._most_keys
            or self._held > self._most_bytes
            or next(iter(self._answers.values())).expires_at <= now
        ):
            _, answer = self._answers.popitem(last=False)
            self._held -= answer.size


def _marked(message: Message) -> MutableMapping[str, Any]:
    """The same message, told apart from a first answer."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [*message.get("headers", []), (b"idempotent-replayed", b"true")]}
