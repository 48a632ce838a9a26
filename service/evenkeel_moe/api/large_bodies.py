"""Parses and validates large request bodies in a thread, so that leases are renewed meanwhile."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

LARGE_BYTES = 64 << 10
_PARSING = 2
"""Bodies parsed at the same time; one of 8 MB takes some 100 MB meanwhile."""
_MOST_PARTS = 1 << 15
"""Names, texts, objects and lists of a body, each: what takes more memory than its bytes do. A
placement of 1,024 layers has that many lists, and a policy some hundred names."""
_PARTS = {b":": "names", b'"': "quotes", b"{": "objects", b"[": "lists"}
_turns = asyncio.Semaphore(_PARSING)


def _refuse_many_parts(body: bytes) -> None:
    """Refuse a body that would take far more memory than it has bytes, before it is parsed.

    Raises:
        RequestValidationError: it has more of something than any right body.
    """
    for mark, what in _PARTS.items():
        if (count := body.count(mark)) > _MOST_PARTS:
            words = f"{count} {what}, at most {_MOST_PARTS} are read"
            raise RequestValidationError([{"type": "too_long", "loc": ("body",), "msg": words}])


class _Parsed(Request):
    """A request whose body has been parsed."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._value = value

    async def json(self) -> Any:
        """Return the value; a valid model instance is not validated again."""
        return self._value


class LargeBodyRoute(APIRoute):
    """A route that does not parse or validate large bodies in the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of this route."""
        handle, field = super().get_route_handler(), self.body_field

        def parse(body: bytes) -> Any:
            _refuse_many_parts(body)
            try:
                value = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise RequestValidationError(
                    [{"type": "json_invalid", "loc": ("body",), "msg": str(error), "input": {}}]
                ) from None
            assert field is not None
            found, errors = field.validate(value, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors)
            return found

        async def off_the_loop(request: Request) -> Response:
            if field is None:
                return await handle(request)
            body = await request.body()
            kind = request.headers.get("content-type", "").lower()
            if len(body) < LARGE_BYTES or "json" not in kind:
                return await handle(request)
            async with _turns:
                value = await asyncio.to_thread(parse, body)
            return await handle(_Parsed(request, body, value))

        return off_the_loop
