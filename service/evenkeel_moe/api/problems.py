"""Problem details (RFC 9457) for every error.

Each body has `type`, `title`, `status`, `detail`, `instance` and mostly `reason`, one of the closed
list. Types are `urn:evenkeel:problem:KIND`, where KIND is a key of `KINDS`.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evenkeel_moe.api.schema_base import ResponseBody
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
from evenkeel_moe.model.texts import refused
from evenkeel_moe.ports.operations import NotLeading

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = "5"
_MOST_ERRORS = 20
"""Errors of one body in an answer."""
_MOST_NAME = 80
_MOST_DETAIL = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of problem."""

    status: int
    title: str
    reason: Reason | None = None
    """Used if the error has none of its own."""
    error: type[EvenkeelError] | None = None
    """The error that it answers. Errors missing here, such as IllegalEvent, are bugs of ours."""


KINDS = {
    "malformed": Kind(400, "The request cannot be parsed", Reason.MALFORMED),
    "unauthorized": Kind(401, "No valid token"),
    "forbidden": Kind(403, "The token's role does not allow this"),
    "not-found": Kind(404, "Not found", Reason.NOT_FOUND, NotFound),
    "method-not-allowed": Kind(405, "The path does not support this method", Reason.UNSUPPORTED),
    "conflict": Kind(
        409, "The request does not fit the current state", Reason.WRONG_PHASE, Conflict
    ),
    "precondition-failed": Kind(
        412, "The document has changed since it was read", Reason.STALE_BASE
    ),
    "too-large": Kind(413, "The body is too large", Reason.LIMIT_EXCEEDED),
    "invalid-input": Kind(422, "The input is invalid", Reason.INVALID_INPUT, InvalidInput),
    "infeasible-plan": Kind(422, "No placement satisfies the limits", None, InfeasiblePlan),
    "internal": Kind(500, "Internal error of the controller"),
    "peer-violation": Kind(502, "A rank violated the protocol", Reason.MALFORMED, PeerViolation),
    "unavailable": Kind(
        503, "Temporarily unavailable, try again", Reason.STORE_UNAVAILABLE, Unavailable
    ),
}


class ProblemOut(ResponseBody):
    """Problem details (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    reason: str | None = None
    """One of the closed list of reasons."""
    leader: str | None = None
    """With `not_leader`: id of the controller replica that leads; null while none leads."""
    leader_address: str | None = None
    """host:port where ranks reach the leader; null if unknown."""


_KIND_OF_STATUS = {row.status: kind for kind, row in reversed(KINDS.items())}
"""The first kind of each status."""


def problem_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return how a route documents problems of these statuses."""
    return {
        status: {"model": ProblemOut, "description": KINDS[_KIND_OF_STATUS[status]].title}
        for status in statuses
    }


CONFLICT = problem_answers(409)
STALE = problem_answers(412)


class _Problem(JSONResponse):
    """A problem response. It may repeat text of the client that UTF-8 cannot encode."""

    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:
        """Return JSON. A lone surrogate (RFC 8259, section 8.2, allows it) becomes `?`."""
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
    """Return a problem+json response.

    Args:
        kind: a key of `KINDS`.
        detail: explanation of this error that helps the caller to correct it.
        instance: path of the request.
        reason: one of the closed list; None uses the kind's.
        headers: added to the response.
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
    """Answer every error of the app with problem details."""
    app.add_exception_handler(EvenkeelError, _evenkeel_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


async def _evenkeel_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EvenkeelError)
    answers = ((name, row.error) for name, row in KINDS.items())
    kind = next((name for name, of in answers if of is not None and isinstance(error, of)), None)
    if kind is None:
        return await _internal_error(request, error)
    headers = {"Retry-After": _RETRY_AFTER_S} if kind == "unavailable" else None
    led = error.led if isinstance(error, NotLeading) else None
    members = {} if led is None else {"leader": led.leader, "leader_address": led.address}
    return problem_response(kind, str(error), request.url.path, error.reason, headers, **members)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    errors = [
        {
            "location": [str(part)[:_MOST_NAME] for part in row["loc"]],
            "detail": refused(row["msg"][:_MOST_DETAIL], row.get("input")),
        }
        for row in found[:_MOST_ERRORS]
    ]
    first = errors[0]
    where = ".".join(first["location"])
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return problem_response(
        "invalid-input", f"{where}: {first['detail']}{more}", request.url.path, errors=errors
    )


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _KIND_OF_STATUS.get(error.status_code, "internal")
    return problem_response(
        kind,
        str(error.detail),
        request.url.path,
        headers=dict(error.headers) if error.headers else None,
    )


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    # This runs outside all middleware, so only the request has the trace id.
    where = {"path": request.url.path, "trace_id": getattr(request.state, "trace_id", None)}
    _log.error("request_failed_by_defect", exc_info=error, extra=where)
    return problem_response("internal", "the controller's log has the details", request.url.path)
