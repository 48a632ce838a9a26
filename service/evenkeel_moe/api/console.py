"""Serves the console and the runbooks: static files of the package, without a token.

The files hold no data. The console asks for a token and calls the same routes as every other
client.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from evenkeel_moe.api.middleware import Middleware
from evenkeel_moe.errors import InvalidInput

_FOLDER = Path(__file__).parents[1] / "console"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
"""Suffix -> media type. Files with another suffix are not served."""

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'"
)
"""Scripts, styles and requests only from this server; nothing inline, no eval, no frames."""
_HEADERS = {
    # The names carry no version, so that browsers must ask; an unchanged file costs a 304.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, ready to be sent in two forms. `ReadTags` gives each its tag."""

    body: bytes
    plain: Response
    compressed: Response


@cache
def console_files() -> Mapping[str, StaticFile]:
    """Return the files by path: the console at `/` and `/console/`, the runbooks at `/runbooks/`.

    A runbook is a page, and its path ends in `.md` as its source's does, so that a `runbook_url`
    has one form wherever the pages are read.

    Raises:
        InvalidInput: the package was not installed, so that nothing has rendered the runbooks.
    """
    served = {
        _served_at(file.relative_to(_FOLDER).as_posix()): _static_file(file)
        for file in _FOLDER.rglob("*")
        if file.suffix in _MEDIA_TYPES
    }
    index = served.get("/runbooks/README.md")
    if index is None:
        raise InvalidInput(
            "the package has no rendered runbooks: `pip install .`, or -e ., renders them"
        )
    return served | {"/runbooks/": index}


def _served_at(name: str) -> str:
    if name == "index.html":
        return "/"
    if name.startswith("runbooks/"):
        return f"/{name.removesuffix('.html')}.md"
    return f"/console/{name}"


def _static_file(file: Path) -> StaticFile:
    body, kind = file.read_bytes(), _MEDIA_TYPES[file.suffix]
    packed = gzip.compress(body, mtime=0)
    compressed = Response(packed, headers=_HEADERS | {"Content-Encoding": "gzip"}, media_type=kind)
    return StaticFile(body, Response(body, headers=_HEADERS, media_type=kind), compressed)


class Console(Middleware):
    """Stands before `BearerAuth`, and answers GET and HEAD of the paths of its files.

    Paths are compared whole, so that no request can reach another file or hide a route.
    """

    def __init__(self, app: ASGIApp, static: Mapping[str, StaticFile]) -> None:
        super().__init__(app)
        self._static = static

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file of the path, or pass the request on."""
        file = self._static.get(scope["path"])
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        compress = "gzip" in Headers(scope=scope).get("accept-encoding", "")
        await (file.compressed if compress else file.plain)(scope, receive, send)
