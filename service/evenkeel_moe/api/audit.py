"""Records every request for a change, with its caller and its outcome, before it is answered."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel_moe.api.auth import Role, Token, needed_role
from evenkeel_moe.api.context import deployment_in
from evenkeel_moe.ports.operations import AuditEntry, Operations

_MOST_PATH = 256


class Audit:
    """ASGI middleware behind `BearerAuth`: refused requests of known tokens are recorded too.

    Args:
        app: next application.
        operations: returns the controller that keeps the records.
    """

    def __init__(self, app: ASGIApp, operations: Callable[[], Operations]) -> None:
        self._app = app
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and record its outcome, unless it only reads."""
        token: Token | None = scope.get("state", {}).get("token")
        if token is None or needed_role(scope["method"], scope["path"]) is Role.READ:
            await self._app(scope, receive, send)
            return
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
                    idempotency_key=None if key is None else key[:128],
                    trace_id=scope["state"].get("trace_id"),
                    change=scope["state"].get("change"),
                )
            )

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await record(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except Exception:  # It goes on to the server; the record must tell of the failure first.
            if not recorded:
                await record(500)
            raise
