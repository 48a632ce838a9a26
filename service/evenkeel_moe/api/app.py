"""The REST application."""

from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from evenkeel_moe import __version__
from evenkeel_moe.api import deployments, health, insight, plans
from evenkeel_moe.api.audit import Audit
from evenkeel_moe.api.auth import BearerAuth, RoleGate, Tokens
from evenkeel_moe.api.bodies import MAX_BODY_BYTES, BodyLimit
from evenkeel_moe.api.idempotency import Idempotency
from evenkeel_moe.api.problems import KINDS, add_problem_handlers
from evenkeel_moe.api.schemas import ProblemOut
from evenkeel_moe.api.trace import Trace
from evenkeel_moe.ports import Operations

__all__ = ["create_app"]

_DESCRIPTION = """Plans, approves, cancels and rolls back expert placements.

Success means that the change is stored; a failure other than 4xx may have happened all the same, so every
call can be repeated: plans carry the client's id, targets are absolute. Every answer carries `Trace-Id`, the trace of the
request's `traceparent` or one made up, as do the log lines it led to. Errors are RFC 9457 problems of
these types:

"""


def create_app(
    operations: Operations, tokens: Tokens, *, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application over one controller.

    Args:
        operations: what the routes call; errors it raises become problems.
        tokens: who may call; every path but `/healthz` and `/readyz` needs one of them.
        max_body_bytes: larger requests are answered 413.
    """
    listing = "\n".join(
        f"- `urn:evenkeel:problem:{name}` ({kind.status}): {kind.title}."
        for name, kind in KINDS.items()
    )
    app = FastAPI(
        title="Evenkeel",
        version=__version__,
        description=_DESCRIPTION + listing,
        docs_url=None,
        redoc_url=None,
        # The documents would otherwise offer two schemas for one type; clients generate from this file.
        separate_input_output_schemas=False,
    )
    app.state.operations = operations
    add_problem_handlers(app)
    # The last added is the first to see a request.
    app.add_middleware(
        Idempotency, operations=lambda: app.state.operations, max_body_bytes=max_body_bytes
    )
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(RoleGate)
    app.add_middleware(Audit, operations=lambda: app.state.operations)
    app.add_middleware(BearerAuth, tokens=tokens)
    app.add_middleware(Trace)
    bearer = [
        Security(
            HTTPBearer(auto_error=False, description="A token of the controller's token file.")
        )
    ]
    refusals: dict[int | str, dict[str, Any]] = {
        code: {"model": ProblemOut, "description": title}
        for code, title in (
            (401, "No valid token"),
            (403, "The token may not do this"),
            (404, "No such deployment, plan or epoch"),
            (413, "The body is larger than the server takes"),
            (422, "The input can never be right"),
            (503, "Out of reach for now"),
        )
    }
    for router in (deployments.router, insight.router, plans.router):
        app.include_router(router, prefix="/v1", dependencies=bearer, responses=refusals)
    app.include_router(health.router)
    generate = app.openapi

    def document() -> dict[str, Any]:
        return _with_problem_media_type(generate())

    app.openapi = document  # type: ignore[method-assign]
    return app


def _with_problem_media_type(document: dict[str, Any]) -> dict[str, Any]:
    """The same document, with problems under the media type they are sent with.

    Mutates: `document`. The framework files every model under `application/json`.
    """
    for item in document["paths"].values():
        for operation in item.values():
            for response in operation["responses"].values():
                content = response.get("content", {})
                if (
                    content.get("application/json", {})
                    .get("schema", {})
                    .get("$ref", "")
                    .endswith("/ProblemOut")
                ):
                    content["application/problem+json"] = content.pop("application/json")
    return document
