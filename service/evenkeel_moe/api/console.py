"""Serves the console and the runbooks: static files of the package, without a token.

The files hold no data. The console asks for a token and calls the same routes as every other
client.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
"""Suffix -> media type. Files with another suffix are not served."""

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'"
)
"""Scripts, styles and requests only from this server; nothing inline, no eval, no frames."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, ready to be sent."""

    body: bytes
    compressed: bytes
    media_type: str
    tag: str
    """Strong ETag of `body`."""

    def headers(self, *, compress: bool) -> list[tuple[bytes, bytes]]:
        """Return the headers of a 200 or 304; both forms have their own tag."""
        tag = f'{self.tag[:-1]}-gzip"' if compress else self.tag
        values = {
            "content-type": self.media_type,
            "etag": tag,
            # The names carry no version, so that browsers must ask; an unchanged file costs a 304.
            "cache-control": "no-cache",
            "vary": "Accept-Encoding",
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
        }
        if compress:
            values["content-encoding"] = "gzip"
        return [(name.encode(), value.encode()) for name, value in values.items()]


@cache
def console_files() -> Mapping[str, StaticFile]:
    """Return the files by path: the console at `/` and `/console/`, the runbooks at `/runbooks/`.

    A runbook is a page, and its path ends in `.md` as its source's does, so that a `runbook_url`
    has one form wherever the pages are read.
    """
    root = files("evenkeel_moe") / "console"
    found = {_path(name): _static_file(entry) for name, entry in _walk(root)}
    found["/runbooks/"] = found["/runbooks/README.md"]
    return found


def _path(name: str) -> str:
    if name == "index.html":
        return "/"
    if name.startswith("runbooks/"):
        return f"/{name.removesuffix('.html')}.md"
    return f"/console/{name}"


def _walk(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    """Return the files to serve, with their path in the folder."""
    rows: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            rows += _walk(entry, f"{name}/")
        elif _suffix(name) in _MEDIA_TYPES:
            rows.append((name, entry))
    return rows


def _suffix(name: str) -> str:
    return f".{name.rpartition('.')[2]}"


def _static_file(entry: Traversable) -> StaticFile:
    body = entry.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return StaticFile(body, gzip.compress(body, mtime=0), _MEDIA_TYPES[_suffix(entry.name)], tag)


class Console:
    """ASGI middleware before `BearerAuth`: answers GET and HEAD of the paths of its files.

    Paths are compared whole, so that no request can reach another file or hide a route.
    """

    def __init__(self, app: ASGIApp, static: Mapping[str, StaticFile]) -> None:
        self._app = app
        self._static = static

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file of the path, or pass the request on."""
        file = self._static.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        compress = "gzip" in headers.get("accept-encoding", "")
        sent = file.headers(compress=compress)
        known = {tag.strip() for tag in headers.get("if-none-match", "").split(",")}
        status, body = 200, file.compressed if compress else file.body
        if known & {file.tag, f'{file.tag[:-1]}-gzip"'}:
            status, body = 304, b""
        else:
            sent.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        shown = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": shown})
