"""The REST application."""

import asyncio
import re
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from evenkeel_moe import __version__
from evenkeel_moe.api import deployments, health, insight, plans
from evenkeel_moe.api.auth import Tokens
from evenkeel_moe.api.console import Console, console_files
from evenkeel_moe.api.middleware import (
    BearerAuth,
    BodyLimit,
    Changes,
    ReadTags,
    TraceMiddleware,
)
from evenkeel_moe.api.problems import KINDS, add_problem_handlers, problem_answers
from evenkeel_moe.peer_budget import DELIVERED_LIMITS, PeerLimits
from evenkeel_moe.ports.operations import Operations
from evenkeel_moe.ports.status import DELIVERED_BOUNDS, HealthBounds

_WINDOW_READERS = 2
"""Requests that hold a copy of windows at the same time; the others wait."""
_REFUSALS = problem_answers(401, 403, 404, 413, 422, 503)
_DESCRIPTION = """Plans, approves, cancels and rolls back expert placements.

Success means that the change is stored. After a failure other than 4xx the change may still have
been made. Every call can be repeated: plans have the client's id, and targets are absolute. Every
response has a `Trace-Id`: the trace in the request's `traceparent`, or a new one. The log lines of
the request have the same id. Reads have an `ETag` and honour `If-None-Match`. Errors are problem
details (RFC 9457) of these types:

"""


def create_app(
    operations: Operations,
    tokens: Tokens,
    *,
    limits: PeerLimits = DELIVERED_LIMITS,
    health_bounds: HealthBounds = DELIVERED_BOUNDS,
) -> FastAPI:
    """Return the application of one controller.

    Args:
        operations: called by the routes; errors it raises become problem details.
        tokens: accepted tokens; every request needs one, but GET and HEAD of `/healthz`, `/readyz`
            and the files of the console and the runbooks.
        limits: of the bodies of requests.
        health_bounds: beyond these a deployment is not healthy.
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
        # Otherwise some types have two schemas, and so two classes in generated clients.
        separate_input_output_schemas=False,
    )
    app.state.operations = operations
    app.state.health_bounds = health_bounds
    app.state.window_turns = asyncio.Semaphore(_WINDOW_READERS)
    add_problem_handlers(app)
    _add_middleware(app, tokens, limits)
    bearer = [
        Security(
            HTTPBearer(auto_error=False, description="A token from the controller's token file.")
        )
    ]
    for router in (deployments.router, insight.router, plans.router):
        app.include_router(router, prefix="/v1", dependencies=bearer, responses=_REFUSALS)
    app.include_router(health.router)
    generate = app.openapi

    def document() -> dict[str, Any]:
        return _with_shared_problems(generate())

    app.openapi = document  # type: ignore[method-assign]
    return app


def _add_middleware(app: FastAPI, tokens: Tokens, limits: PeerLimits) -> None:
    # The last one added sees a request first.
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(Changes, operations=lambda: app.state.operations)
    app.add_middleware(BearerAuth, tokens=tokens)
    app.add_middleware(Console, static=console_files())
    app.add_middleware(ReadTags)
    app.add_middleware(TraceMiddleware)


def _with_shared_problems(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with each refusal once, under the media type that it is sent with.

    FastAPI repeats responses in every operation, and puts every model under `application/json`.
    Mutates: `document`.
    """
    shared = document["components"].setdefault("responses", {})
    for item in document["paths"].values():
        for operation in item.values():
            for status, response in operation["responses"].items():
                if "content" in response and int(status) >= 400:
                    content = response["content"]
                    content["application/problem+json"] = content.pop("application/json")
                    name = re.sub(r"\W", "", response["description"].title())
                    shared[name] = response
                    operation["responses"][status] = {"$ref": f"#/components/responses/{name}"}
    return document
