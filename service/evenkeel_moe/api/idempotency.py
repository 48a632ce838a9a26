"""`Idempotency-Key`: a repeated POST with the same key gets the first response again.

Source: draft-ietf-httpapi-idempotency-key-header-07. A plan_id chosen by the client is independent
of it: a used plan_id with another body is 409, whatever the key.

This replica keeps whole responses in memory for a day, within bounds. The store has the newest
responses of each deployment without their bodies: after a restart, and on the replica that takes
over, the response is the plan in its state of that time.
"""

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel_moe.api.bodies import read_body, replay
from evenkeel_moe.api.context import PLAN_ID_PATTERN, deployment_in
from evenkeel_moe.api.problems import problem_response
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import Operations, StoredResponse

_TTL_S = 86_400.0
_MOST_KEYS = 4096
_MOST_BYTES = 64 << 20
"""Bytes of all responses; a plan of a large model is about 1 MB."""

_Name = tuple[str, str, str]
"""Token, path, key."""


@dataclass(frozen=True, slots=True)
class _Answer:
    digest: bytes
    """Digest of the body that the key was used with."""
    expires_at: float
    messages: tuple[Message, ...]
    size: int


class Idempotency:
    """ASGI middleware behind authentication. The same key of another token or path is another key.

    Args:
        app: next application.
        operations: returns the controller that stores responses.
        max_body_bytes: largest body, enforced by `BodyLimit` before.
        most_keys, most_bytes: bounds of the responses in memory; the oldest are dropped.
    """

    def __init__(
        self,
        app: ASGIApp,
        operations: Callable[[], Operations],
        max_body_bytes: int,
        *,
        most_keys: int = _MOST_KEYS,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._app = app
        self._operations = operations
        self._max_body_bytes = max_body_bytes
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._in_progress: dict[_Name, bytes] = {}
        """Digests of the bodies of first requests that are still in progress."""
        self._answers: OrderedDict[_Name, _Answer] = OrderedDict()
        """Oldest first."""
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from memory or store, or pass the request on and keep a 2xx response."""
        key = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST" or not re.match(PLAN_ID_PATTERN, key):
            # The route refuses keys of another form.
            await self._app(scope, receive, send)
            return
        body = await read_body(receive, self._max_body_bytes)
        assert body is not None, "BodyLimit comes before this"
        digest = hashlib.sha256(body).digest()
        name = (scope["state"]["token"].name, scope["path"], key)
        self._drop(asyncio.get_running_loop().time())
        known = self._answers.get(name)
        if known is not None and known.digest == digest:
            for message in known.messages:
                await send(_marked(message))
        elif known is not None or self._in_progress.get(name, digest) != digest:
            await _refuse_other_body(scope, receive, send)
        elif name in self._in_progress:
            detail = f"the first request with Idempotency-Key {key} is still in progress"
            headers = {"Retry-After": "1"}
            refusal = problem_response("conflict", detail, scope["path"], Reason.BUSY, headers)
            await refusal(scope, receive, send)
        else:
            self._in_progress[name] = digest
            try:
                await self._answer(name, digest, scope, replay(body, receive), send)
            finally:
                del self._in_progress[name]

    async def _answer(
        self, name: _Name, digest: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer from the store, or else from the application."""
        deployment = deployment_in(scope["path"])
        try:
            stored = (
                None
                if deployment is None
                else await self._operations().fetch_response(deployment, _hash(name))
            )
        except Unavailable as error:
            headers = {"Retry-After": "1"}
            refusal = problem_response(
                "unavailable", str(error), scope["path"], error.reason, headers
            )
            await refusal(scope, receive, send)
            return
        if stored is None:
            await self._answer_from_app(name, digest, deployment, scope, receive, send)
        elif stored.digest != digest.hex():
            await _refuse_other_body(scope, receive, send)
        else:
            await self._answer_as_stored(stored, scope, send)

    async def _answer_from_app(
        self,
        name: _Name,
        digest: bytes,
        deployment: DeploymentId | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(dict(message))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # Before the client can repeat the call. Errors are not kept: they changed nothing,
                # or a 503 may still be carried out, and then a repetition finds the plan by its id.
                status = messages[0]["status"]
                if 200 <= status < 300:
                    self._remember(name, digest, tuple(messages))
                    if deployment is not None:
                        location = Headers(raw=messages[0].get("headers", [])).get("location")
                        stored = StoredResponse(_hash(name), digest.hex(), status, location)
                        await self._operations().store_response(deployment, stored)
            await send(message)

        await self._app(scope, receive, keep)

    async def _answer_as_stored(self, stored: StoredResponse, scope: Scope, send: Send) -> None:
        """Send status and Location of the first response, with the plan as a GET shows it now."""
        location = stored.location
        if location is None:
            await send(
                _marked({"type": "http.response.start", "status": stored.status, "headers": []})
            )
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_as_first(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                headers = [*message.get("headers", []), (b"location", location.encode())]
                message = _marked({**message, "status": stored.status, "headers": headers})
            await send(message)

        look = {
            **scope,
            "method": "GET",
            "path": location,
            "raw_path": location.encode(),
            "query_string": b"",
        }
        await self._app(look, _no_body, send_as_first)

    def _remember(self, name: _Name, digest: bytes, messages: tuple[Message, ...]) -> None:
        now = asyncio.get_running_loop().time()
        size = sum(len(message.get("body", b"")) for message in messages)
        self._answers[name] = _Answer(digest, now + _TTL_S, messages, size)
        self._held += size
        self._drop(now)

    def _drop(self, now: float) -> None:
        """Drop responses that are too old, and the oldest beyond the bounds."""
        while self._answers and (
            len(self._answers) > self._most_keys
            or self._held > self._most_bytes
            or next(iter(self._answers.values())).expires_at <= now
        ):
            _, answer = self._answers.popitem(last=False)
            self._held -= answer.size


def _marked(message: Message) -> MutableMapping[str, Any]:
    """Return the message with a header that marks a repeated response."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [*message.get("headers", []), (b"idempotent-replayed", b"true")]}


async def _refuse_other_body(scope: Scope, receive: Receive, send: Send) -> None:
    key = Headers(scope=scope)["idempotency-key"]
    refusal = problem_response(
        "key-reused", f"Idempotency-Key {key} was used with another body", scope["path"]
    )
    await refusal(scope, receive, send)


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _hash(name: _Name) -> str:
    """Return one hash for a name. No part of it can contain a zero byte."""
    return hashlib.sha256("\0".join(name).encode()).hexdigest()
