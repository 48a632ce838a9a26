"""Shared parts of the routes: dependencies, path and query parameters, pages and entity tags."""

import asyncio
import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request

from evenkeel_moe.api.auth import Token
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import DeploymentId, PlanId
from evenkeel_moe.ports.operations import Operations
from evenkeel_moe.ports.status import HealthBounds

T = TypeVar("T")

_DEPLOYMENT_ID = "[a-z0-9][a-z0-9._-]{0,62}"
_DEPLOYMENT_PATH = re.compile(rf"^/v1/deployments/({_DEPLOYMENT_ID})(?:/|$)")
_MOST_CHANGE = 256
"""Characters of a request's content that its audit row keeps."""
PLAN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
DIGEST_PATTERN = "^[0-9a-f]{32}$"


# Not plain functions: FastAPI would run each in a thread, where it waits behind all other requests.


async def _operations(request: Request) -> Operations:
    operations: Operations = request.app.state.operations
    return operations


async def _health_bounds(request: Request) -> HealthBounds:
    bounds: HealthBounds = request.app.state.health_bounds
    return bounds


async def _window_turns(request: Request) -> asyncio.Semaphore:
    turns: asyncio.Semaphore = request.app.state.window_turns
    return turns


async def _caller_token(request: Request) -> Token:
    token: Token = request.state.token
    return token


async def _caller(request: Request) -> str:
    return (await _caller_token(request)).name


def keep_for_audit(request: Request, asked: Mapping[str, Any]) -> None:
    """Let the audit row of a request say what it asked for."""
    text = json.dumps(asked, separators=(",", ":"))[:_MOST_CHANGE]
    request.state.change = text if asked else None


OperationsOf = Annotated[Operations, Depends(_operations)]
HealthBoundsOf = Annotated[HealthBounds, Depends(_health_bounds)]
WindowTurns = Annotated[asyncio.Semaphore, Depends(_window_turns)]
"""Held by a request that copies windows, which may have hundreds of megabytes, or writes out a map,
which takes a hundred bytes for each slot meanwhile."""
Caller = Annotated[str, Depends(_caller)]
CallerToken = Annotated[Token, Depends(_caller_token)]
DeploymentPath = Annotated[
    DeploymentId,
    Path(alias="deployment", pattern=f"^{_DEPLOYMENT_ID}$", description="Deployment id."),
]
PlanPath = Annotated[PlanId, Path(alias="plan_id", pattern=PLAN_ID_PATTERN, description="Plan id.")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="Largest number of rows on a page.")]
PageToken = Annotated[
    str | None,
    Query(
        max_length=512,
        description="`next_page_token` of the previous page; the first page needs none.",
    ),
]


def deployment_in(path: str) -> DeploymentId | None:
    """Return the deployment that a request's path names; None if it names none."""
    named = _DEPLOYMENT_PATH.match(path)
    return None if named is None else DeploymentId(named[1])


def read_page_token(token: str | None) -> str | None:
    """Return the key in a page token.

    Raises:
        InvalidInput: not a token of this API.
    """
    if token is None:
        return None
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except (binascii.Error, UnicodeError) as error:
        raise InvalidInput("page_token is not one of this API") from error


def page(
    rows: Sequence[T], key: Callable[[T], str], token: str | None, size: int
) -> tuple[list[T], str | None]:
    """Return the rows after the one in the token, and the token of the next page.

    Raises:
        InvalidInput: that row no longer exists; start again at the first page.
    """
    after = read_page_token(token)
    start = 0
    if after is not None:
        keys = [key(row) for row in rows]
        if after not in keys:
            raise InvalidInput("the row in page_token no longer exists, start again without it")
        start = keys.index(after) + 1
    chosen = list(rows[start : start + size])
    more = start + size < len(rows)
    return chosen, page_token_of(key(chosen[-1])) if more else None


def page_token_of(key: str) -> str:
    """Return the token of the page after a row."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def entity_tag(document: Any) -> str:
    """Return a strong ETag of a JSON document's content."""
    text = json.dumps(document, sort_keys=True, default=str)
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
