"""Gives reads an ETag, so that a client that asks again is sent only what has changed."""

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ReadTags:
    """ASGI middleware: adds an ETag to answers of GET and honours `If-None-Match`.

    The answer is still computed; 304 saves its transfer and the client's work. Of an answer to HEAD
    only the headers are sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer 304 if the client has this answer."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        known = Headers(scope=scope).get("if-none-match")
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
                held, message = _tagged(held, message, known)
            if scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(held)
            await send(message)

        await self._app(scope, receive, send_tagged)


def _tagged(start: Message, body: Message, known: str | None) -> tuple[Message, Message]:
    """Return start and body of the answer, with a tag; a 304 if the client knows that tag."""
    headers = MutableHeaders(raw=[*start["headers"]])
    if "etag" not in headers:
        digest = hashlib.blake2b(body.get("body", b""), digest_size=16).hexdigest()
        headers["etag"] = f'"{digest}"'
    headers.setdefault("cache-control", "no-cache")
    tags = set() if known is None else {tag.strip() for tag in known.split(",")}
    if headers["etag"] not in tags and "*" not in tags:
        return {**start, "headers": headers.raw}, body
    del headers["content-length"]
    del headers["content-type"]
    return {**start, "status": 304, "headers": headers.raw}, {**body, "body": b""}
