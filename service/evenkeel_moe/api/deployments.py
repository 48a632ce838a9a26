"""Routes of a deployment: state, placement, load, policy, freeze, decisions."""

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response

from evenkeel_moe.api.auth import Role
from evenkeel_moe.api.context import (
    Caller,
    CallerToken,
    DeploymentPath,
    IdempotencyKey,
    OperationsOf,
    PageSize,
    PageToken,
    entity_tag,
    page,
)
from evenkeel_moe.api.convert import (
    deployment_out,
    elsewhere_out,
    phase_load,
    placement_out,
    recommendation_out,
)
from evenkeel_moe.api.insight_schemas import RecommendationOut
from evenkeel_moe.api.problems import problem_response
from evenkeel_moe.api.schema_base import plain
from evenkeel_moe.api.schemas import (
    DecisionPage,
    DeploymentOut,
    DeploymentPage,
    FreezeIn,
    LoadOut,
    PlacementOut,
    ProblemOut,
)
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.load import Phase
from evenkeel_moe.ports import DeploymentStatus, Operations

__all__ = ["router"]

router = APIRouter(tags=["deployments"])

_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {
        "model": ProblemOut,
        "description": "The state has moved on, or the Idempotency-Key is taken",
    }
}
_DECISIONS_SHOWN = 1000
"""Newest rows that can be paged through."""


async def _told(operations: Operations) -> list[DeploymentStatus]:
    """States of the deployments that have one: a name alone, without a shape, is none yet."""
    told = []
    for view in await operations.deployments():
        with suppress(Unavailable):
            told.append(view.status())
    return told


@router.get("/deployments")
async def list_deployments(
    operations: OperationsOf, page_size: PageSize = 100, page_token: PageToken = None
) -> DeploymentPage:
    """Every deployment whose ranks have said what they are, by name. Of those that another replica leads only who leads
    is known here, the rest is null."""
    found = [deployment_out(status) for status in await _told(operations)]
    found += [elsewhere_out(led) for led in await operations.led_elsewhere()]
    rows = sorted(found, key=lambda row: row.deployment)
    chosen, after = page(rows, lambda row: row.deployment, page_token, page_size)
    return DeploymentPage(items=chosen, next_page_token=after)


@router.get("/deployments/{deployment}")
async def get_deployment(operations: OperationsOf, deployment: DeploymentPath) -> DeploymentOut:
    """One deployment: state and why, ranks, balance, the active plan, the last decision."""
    return deployment_out((await operations.deployment(deployment)).status())


@router.delete("/deployments/{deployment}", status_code=204, responses=_CONFLICT)
async def forget_deployment(
    operations: OperationsOf, caller: Caller, deployment: DeploymentPath
) -> None:
    """Let go of a deployment whose ranks are gone: lease, memory, series, windows. Plans and epochs stay stored, and
    ranks that come back are taken again. 409 while a rank is connected. Needs role admin."""
    await operations.forget(deployment, caller)


@router.get("/deployments/{deployment}/placement")
async def get_placement(operations: OperationsOf, deployment: DeploymentPath) -> PlacementOut:
    """The committed placement; 503 before the ranks told it."""
    view = await operations.deployment(deployment)
    placement = view.placement()
    if placement is None:
        raise Unavailable(
            f"the ranks of {deployment} have not told their placement yet", Reason.RANKS_MISSING
        )
    return placement_out(placement, view.status().epoch)


@router.get("/deployments/{deployment}/load")
async def get_load(operations: OperationsOf, deployment: DeploymentPath) -> LoadOut:
    """Load matrices of each phase's window: layers x experts, and layers x ranks under the committed placement."""
    view = await operations.deployment(deployment)
    placement = view.placement()
    windows = {phase: view.window(phase) for phase in Phase}
    # Summing a window of a large model takes a good part of a second: off the loop that serves the ranks.
    phases = {
        phase: await asyncio.to_thread(phase_load, window, placement)
        for phase, window in windows.items()
    }
    return LoadOut(deployment=deployment, epoch=view.status().epoch, phases=phases)


@router.get(
    "/deployments/{deployment}/recommendation",
    responses={409: {"model": ProblemOut, "description": "Weights are moving"}},
)
async def get_recommendation(
    operations: OperationsOf,
    deployment: DeploymentPath,
    max_age_s: Annotated[
        float | None,
        Query(
            ge=0,
            le=86400,
            allow_inf_nan=False,
            description="An answer this old will do, 0 asks for a new one; none allows one cycle.",
        ),
    ] = None,
) -> RecommendationOut:
    """What would pay now: a plan, other policies, more or fewer replicas. Planned on the older steps of the window and
    scored on the newer ones; nothing is moved, started or stored."""
    return recommendation_out(await operations.recommendation(deployment, max_age_s))


@router.get("/deployments/{deployment}/policy")
async def get_policy(
    operations: OperationsOf, deployment: DeploymentPath, response: Response
) -> dict[str, Any]:
    """The policy document, with an ETag for `If-Match`."""
    document: dict[str, Any] = plain(await operations.policy(deployment))
    response.headers["ETag"] = entity_tag(document)
    return document


@router.patch(
    "/deployments/{deployment}/policy",
    responses={
        **_CONFLICT,
        412: {"model": ProblemOut, "description": "The document has changed since it was read"},
    },
    response_model=None,
)
async def set_policy(
    operations: OperationsOf,
    token: CallerToken,
    deployment: DeploymentPath,
    changes: Annotated[dict[str, Any], Body(description="Fields to change; the others stay.")],
    response: Response,
    if_match: Annotated[
        str | None, Header(description="ETag the change rests on, several, or `*`.")
    ] = None,
) -> Any:
    """Change mode, policy, gates, schedule or limits; answers with the whole document. `limits` needs role admin."""
    if "limits" in changes and not token.role.covers(Role.ADMIN):
        return problem_response(
            "forbidden",
            f"limits need role {Role.ADMIN}, token {token.name} has {token.role}",
            f"/v1/deployments/{deployment}/policy",
        )
    tags = None if if_match is None else {tag.strip() for tag in if_match.split(",")}
    # `*` asks only that there be a document, and there always is (RFC 9110, section 13.1.1).
    base = None if tags is None or tags == {"*"} else await operations.policy(deployment)
    try:
        if base is not None and tags is not None and entity_tag(plain(base)) not in tags:
            raise Conflict("the policy document is not the one If-Match names", Reason.STALE_BASE)
        document: dict[str, Any] = plain(
            await operations.set_policy(deployment, changes, token.name, base)
        )
    except Conflict as error:
        if error.reason is not Reason.STALE_BASE:
            raise
        path = f"/v1/deployments/{deployment}/policy"
        return problem_response("precondition-failed", f"{error}, read it again", path)
    response.headers["ETag"] = entity_tag(document)
    return document


@router.post("/deployments/{deployment}/freeze", status_code=204, responses=_CONFLICT)
async def freeze(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    body: FreezeIn,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """No new plan for so many seconds; it ends by itself, 0 ends it now. A running plan goes on."""
    await operations.freeze(deployment, body.seconds, caller)


@router.post("/deployments/{deployment}/resume", status_code=204, responses=_CONFLICT)
async def resume(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Let automatic plans run again after a rollback."""
    await operations.resume(deployment, caller)


@router.get("/deployments/{deployment}/decisions")
async def list_decisions(
    operations: OperationsOf,
    deployment: DeploymentPath,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> DecisionPage:
    """What each cycle decided and why, newest first, also when it did nothing."""
    rows = [plain(row) for row in await operations.decisions(deployment, _DECISIONS_SHOWN)]
    chosen, after = page(rows, lambda row: f"{row['at']!r} {row['reason']}", page_token, page_size)
    return DecisionPage(items=chosen, next_page_token=after)
