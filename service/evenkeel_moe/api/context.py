"""Shared parts of the routes: what they are given, parameters, pages and entity tags."""

import asyncio
import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from evenkeel_moe.api.auth import Role, Token
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import DEPLOYMENT_ID, DeploymentId, PlanId
from evenkeel_moe.ports.operations import DeploymentView, Operations
from evenkeel_moe.ports.status import DeploymentStatus, HealthBounds

T = TypeVar("T")

_DEPLOYMENT_PATH = re.compile(rf"^/v1/deployments/({DEPLOYMENT_ID})(?:/|$)")
_MOST_CHANGE = 256
"""Characters of a request's content that its audit row keeps."""
PLAN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
DIGEST_PATTERN = "^[0-9a-f]{32}$"

DeploymentPath = Annotated[
    DeploymentId,
    Path(alias="deployment", pattern=f"^{DEPLOYMENT_ID}$", description="Deployment id."),
]
PlanPath = Annotated[PlanId, Path(alias="plan_id", pattern=PLAN_ID_PATTERN, description="Plan id.")]


class _Asked:
    """A request: who asks, and the parts of the application that answer."""

    def __init__(self, request: Request) -> None:
        state = request.app.state
        self._request = request
        self.operations: Operations = state.operations
        self.bounds: HealthBounds = state.health_bounds
        self.turns: asyncio.Semaphore = state.window_turns
        """Held by a request that copies windows, which may have hundreds of megabytes, or writes
        out a map, which takes a hundred bytes for each slot meanwhile."""
        self.token: Token = request.state.token
        self.caller = self.token.name
        self.is_admin = self.token.role.covers(Role.ADMIN)

    def keep_for_audit(self, change: Mapping[str, Any]) -> None:
        """Let the audit row of the request say what it asked for."""
        text = json.dumps(change, separators=(",", ":"))[:_MOST_CHANGE]
        self._request.state.change = text if change else None


class _About(_Asked):
    """A request about one deployment."""

    def __init__(self, request: Request, deployment: DeploymentId) -> None:
        super().__init__(request)
        self.deployment = deployment

    async def view(self) -> DeploymentView:
        """Return the deployment."""
        return await self.operations.deployment(self.deployment)

    async def status(self) -> DeploymentStatus:
        """Return the present state of the deployment."""
        return (await self.view()).status()


# Not plain functions: FastAPI would run each in a thread, where it waits behind all other requests.


async def _asked(request: Request) -> _Asked:
    return _Asked(request)


async def _about(request: Request, deployment: DeploymentPath) -> _About:
    return _About(request, deployment)


Asked = Annotated[_Asked, Depends(_asked)]
About = Annotated[_About, Depends(_about)]


class QueryBody(BaseModel):
    """Parameters of a query; the docstrings are their descriptions in docs/openapi.json."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class _Paging(QueryBody):
    page_size: int = Field(100, ge=1, le=1000)
    """Largest number of rows on a page."""
    page_token: str | None = Field(None, max_length=512)
    """`next_page_token` of the previous page; the first page needs none."""

    @property
    def after(self) -> str | None:
        """The key in the page token.

        Raises:
            InvalidInput: not a token of this API.
        """
        try:
            token = self.page_token
            return None if token is None else base64.urlsafe_b64decode(token.encode()).decode()
        except (binascii.Error, UnicodeError) as error:
            raise InvalidInput("page_token is not one of this API") from error

    def page(self, rows: Sequence[T], key: Callable[[T], str]) -> tuple[list[T], str | None]:
        """Return the rows after the one in the token, and the token of the next page.

        Raises:
            InvalidInput: that row no longer exists; start again at the first page.
        """
        start, after = 0, self.after
        if after is not None:
            keys = [key(row) for row in rows]
            if after not in keys:
                raise InvalidInput("the row in page_token no longer exists, start again without it")
            start = len(keys) - keys[::-1].index(after)  # A decision may be stored twice.
        chosen = list(rows[start : start + self.page_size])
        more = start + self.page_size < len(rows)
        return chosen, page_token_of(key(chosen[-1])) if more else None


Paging = Annotated[_Paging, Query()]


def page_token_of(key: str) -> str:
    """Return the token of the page after a row."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def deployment_in(path: str) -> DeploymentId | None:
    """Return the deployment that a request's path names; None if it names none."""
    named = _DEPLOYMENT_PATH.match(path)
    return None if named is None else DeploymentId(named[1])


def entity_tag(document: Any) -> str:
    """Return a strong ETag of a JSON document's content."""
    text = json.dumps(document, sort_keys=True, default=str)
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def tags_in(header: str | None) -> set[str]:
    """Return the ETags of an `If-Match` or `If-None-Match`; none if it is absent."""
    return set() if header is None else {tag.strip() for tag in header.split(",")}


def tags_wanted(if_match: str | None) -> set[str]:
    """Return the ETags of an `If-Match` of which a document must have one; none if any will do.

    `*` requires that the document exists, which it always does (RFC 9110, section 13.1.1).
    """
    return tags_in(if_match) if if_match is not None and if_match.strip() != "*" else set()
