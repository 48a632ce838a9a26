"""RFC 9457 problem details: the one table from what went wrong to what the client is told.

Each body has `type`, `title`, `status`, `detail`, `instance` and, from the closed list, `reason`. Types
are `urn:evenkeel:problem:KIND` with KIND a key of `KINDS`.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evenkeel_moe.errors import (
    Conflict,
    EvenkeelError,
    InfeasiblePlan,
    InvalidInput,
    NotFound,
    PeerViolation,
    Reason,
    Unavailable,
)
from evenkeel_moe.ports import NotLeading

__all__ = ["KINDS", "add_problem_handlers", "problem_response"]

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = "5"


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of problem."""

    status: int
    title: str
    reason: Reason | None = None
    """Given where the cause carries none of its own."""


KINDS = {
    "malformed": Kind(400, "The request cannot be read", Reason.MALFORMED),
    "unauthorized": Kind(401, "No valid token"),
    "forbidden": Kind(403, "The token may not do this"),
    "not-found": Kind(404, "No such thing", Reason.NOT_FOUND),
    "method-not-allowed": Kind(405, "The path has no such method", Reason.UNSUPPORTED),
    "conflict": Kind(409, "The state has moved on", Reason.WRONG_PHASE),
    "precondition-failed": Kind(
        412, "The document has changed since it was read", Reason.STALE_BASE
    ),
    "too-large": Kind(413, "The body is larger than the server takes", Reason.LIMIT_EXCEEDED),
    "invalid-input": Kind(422, "The input can never be right", Reason.INVALID_INPUT),
    "key-reused": Kind(422, "The Idempotency-Key was used with another body", Reason.ID_REUSED),
    "infeasible-plan": Kind(422, "No placement satisfies the limits"),
    "internal": Kind(500, "A defect in the controller"),
    "peer-violation": Kind(502, "A rank broke the protocol", Reason.MALFORMED),
    "unavailable": Kind(503, "Out of reach for now, try again", Reason.STORE_UNAVAILABLE),
}

_OF_ERROR: dict[type[EvenkeelError], str] = {
    InvalidInput: "invalid-input",
    NotFound: "not-found",
    Conflict: "conflict",
    InfeasiblePlan: "infeasible-plan",
    PeerViolation: "peer-violation",
    Unavailable: "unavailable",
}
"""What is missing here, IllegalEvent above all, is our own bug."""

_OF_STATUS = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    413: "too-large",
}


class _Problem(JSONResponse):
    """What a client sent is told back to it: also text that UTF-8 cannot say."""

    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:
        """JSON; half a surrogate pair, which a JSON string may escape (RFC 8259, section 8.2), becomes a `?`."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def problem_response(
    kind: str,
    detail: str,
    instance: str,
    reason: Reason | None = None,
    headers: dict[str, str] | None = None,
    **members: Any,
) -> JSONResponse:
    """A problem+json answer.

    Args:
        kind: a key of `KINDS`.
        detail: what is wrong in this case, in words the caller can act on.
        instance: path of the request.
        reason: from the closed list; None uses the kind's.
        headers: added to the answer.
        members: extension members.
    """
    row = KINDS[kind]
    body: dict[str, Any] = {
        "type": f"urn:evenkeel:problem:{kind}",
        "title": row.title,
        "status": row.status,
        "detail": detail,
        "instance": instance,
    }
    cause = reason if reason is not None else row.reason
    if cause is not None:
        body["reason"] = cause.value
    return _Problem({**body, **members}, row.status, headers=headers)


def add_problem_handlers(app: FastAPI) -> None:
    """Make every error of the app a problem."""
    app.add_exception_handler(EvenkeelError, _evenkeel_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _defect)


async def _evenkeel_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EvenkeelError)
    kind = next((_OF_ERROR[cls] for cls in type(error).__mro__ if cls in _OF_ERROR), None)
    if kind is None:
        return await _defect(request, error)
    headers = {"Retry-After": _RETRY_AFTER_S} if kind == "unavailable" else None
    led = error.led if isinstance(error, NotLeading) else None
    members = {} if led is None else {"leader": led.leader, "leader_address": led.address}
    return problem_response(kind, str(error), request.url.path, error.reason, headers, **members)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"location": [str(part) for part in row["loc"]], "detail": str(row["msg"])}
        for row in error.errors()
    ]
    first = errors[0]
    where = ".".join(first["location"])
    more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
    return problem_response(
        "invalid-input", f"{where}: {first['detail']}{more}", request.url.path, errors=errors
    )


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _OF_STATUS.get(error.status_code, "internal")
    return problem_response(
        kind,
        str(error.detail),
        request.url.path,
        headers=dict(error.headers) if error.headers else None,
    )


async def _defect(request: Request, error: Exception) -> JSONResponse:
    # This runs outside all middleware, where the trace is known by the request alone.
    where = {"path": request.url.path, "trace_id": getattr(request.state, "trace_id", None)}
    _log.error("request_failed_by_defect", exc_info=error, extra=where)
    return problem_response("internal", "the controller's log has the details", request.url.path)
