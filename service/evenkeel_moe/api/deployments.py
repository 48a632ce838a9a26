"""Routes of deployments: state, placement, load, policy, freeze, decisions."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Request, Response
from pydantic import Field

from evenkeel_moe.api.auth import Role
from evenkeel_moe.api.context import (
    Caller,
    CallerToken,
    DeploymentPath,
    HealthBoundsOf,
    OperationsOf,
    PageSize,
    PageToken,
    WindowTurns,
    entity_tag,
    keep_for_audit,
    page,
)
from evenkeel_moe.api.convert import (
    capacity_out,
    decision_out,
    deployment_out,
    elsewhere_out,
    phase_load,
    placement_json,
    recommendation_out,
)
from evenkeel_moe.api.insight_schemas import CapacityOut, RecommendationOut
from evenkeel_moe.api.large_bodies import LargeBodyRoute
from evenkeel_moe.api.schema_base import plain
from evenkeel_moe.api.schemas import (
    CONFLICT,
    DecisionPage,
    DeploymentOut,
    DeploymentPage,
    FreezeIn,
    GatesOut,
    LoadOut,
    PhaseLoad,
    PlacementOut,
    PolicyDocument,
    ResizeIn,
    ResizeOut,
    problem_answers,
)
from evenkeel_moe.api.words.gates import gates_of
from evenkeel_moe.errors import Conflict, NotFound, Reason, Unavailable
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.capacity import MOST_RANKS, CapacityRequest
from evenkeel_moe.ports.operations import Operations, ResizeRequest
from evenkeel_moe.ports.status import DeploymentStatus

router = APIRouter(tags=["deployments"], route_class=LargeBodyRoute)

_POLICY: dict[int | str, dict[str, Any]] = {
    200: {"model": PolicyDocument, "description": "The policy document"}
}
_Rank = Annotated[int, Field(ge=0, le=2**31)]
_Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
_MOST_WIDTHS = 32
"""Widths of one request: each takes the planner some time."""
_DECISIONS_SHOWN = 1000
"""Number of newest rows that the pages cover."""


async def _known_states(operations: Operations) -> list[DeploymentStatus]:
    """Return the deployments whose shape is known; before a rank registers there is only a name."""
    known = []
    for view in await operations.deployments():
        with suppress(Unavailable):
            known.append(view.status())
    return known


@router.get("/deployments")
async def list_deployments(
    operations: OperationsOf,
    bounds: HealthBoundsOf,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> DeploymentPage:
    """List the deployments by name, once their ranks have registered.

    A deployment that another replica leads has only its name, its leader and its health.
    """
    found = [deployment_out(status, bounds) for status in await _known_states(operations)]
    found += [elsewhere_out(led) for led in await operations.led_elsewhere()]
    rows = sorted(found, key=lambda row: row.deployment)
    chosen, after = page(rows, lambda row: row.deployment, page_token, page_size)
    return DeploymentPage(items=chosen, next_page_token=after)


@router.get("/deployments/{deployment}")
async def get_deployment(
    operations: OperationsOf, bounds: HealthBoundsOf, deployment: DeploymentPath
) -> DeploymentOut:
    """Return a deployment: health, state and reason, ranks, balance, active plan, last decision."""
    return deployment_out((await operations.deployment(deployment)).status(), bounds)


@router.get("/deployments/{deployment}/gates")
async def get_gates(operations: OperationsOf, deployment: DeploymentPath) -> GatesOut:
    """Return the gates of the newest planning cycle, and what would open the closed one."""
    status = (await operations.deployment(deployment)).status()
    return GatesOut(items=gates_of(status))


@router.delete("/deployments/{deployment}", status_code=204, responses=CONFLICT)
async def forget_deployment(
    operations: OperationsOf, caller: Caller, deployment: DeploymentPath
) -> None:
    """Remove lease, memory, series and windows of a deployment whose ranks are gone.

    Plans and epochs stay stored, and ranks that come back are accepted. 409 while a rank is
    connected. Needs role admin.
    """
    await operations.forget(deployment, caller)


@router.get("/deployments/{deployment}/placement", response_model=PlacementOut)
async def get_placement(
    operations: OperationsOf, turns: WindowTurns, deployment: DeploymentPath
) -> Response:
    """Return the committed placement; 503 before the ranks reported it."""
    async with turns:
        view = await operations.deployment(deployment)
        placement = view.placement()
        if placement is None:
            raise Unavailable(
                f"the ranks of {deployment} have not reported their placement yet",
                Reason.RANKS_MISSING,
            )
        epoch = view.status().epoch
        # A large map takes most of a second: not on the event loop, which serves ranks.
        body = await asyncio.to_thread(placement_json, placement, epoch)
    return Response(body, media_type="application/json")


@router.get("/deployments/{deployment}/load")
async def get_load(
    operations: OperationsOf, turns: WindowTurns, deployment: DeploymentPath
) -> LoadOut:
    """Return the load of each phase: layers x experts, and layers x ranks of the placement."""
    async with turns:
        view = await operations.deployment(deployment)
        placement = view.placement()
        windows = {phase: view.window(phase) for phase in Phase}
        # Summing a large window takes most of a second: not on the event loop, which serves ranks.
        phases = {
            phase: await asyncio.to_thread(_phase_load_of, windows, phase, placement)
            for phase in Phase
        }
    return LoadOut(deployment=deployment, epoch=view.status().epoch, phases=phases)


def _phase_load_of(
    windows: dict[Phase, LoadWindow | None], phase: Phase, placement: Placement | None
) -> PhaseLoad | None:
    """Return `phase_load` of the window of a phase, and take it out of `windows`.

    The thread would hold its arguments a little longer than the request's turn lasts.
    """
    return phase_load(windows.pop(phase), placement)


@router.get(
    "/deployments/{deployment}/recommendation",
    responses=problem_answers({409: "A plan is running"}),
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
            description="Largest age of the result; 0 asks for a new one. Default: one cycle.",
        ),
    ] = None,
    tokens_per_sequence: Annotated[
        int | None,
        Query(
            ge=1,
            le=2**31,
            description="Tokens that a sequence holds in the KV cache: the batch that fits is then"
            " counted in sequences.",
        ),
    ] = None,
) -> RecommendationOut:
    """Compare the gain of a plan, of other policies, and of more or fewer replicas.

    They are planned on the older steps of the window and scored on the newer ones. Nothing is
    moved, started or stored.
    """
    advice = await operations.recommendation(deployment, max_age_s)
    mode = (await operations.deployment(deployment)).status().mode
    return recommendation_out(advice, tokens_per_sequence, mode)


@router.get(
    "/deployments/{deployment}/capacity",
    responses=problem_answers({409: "A plan is running"}),
)
async def get_capacity(
    operations: OperationsOf,
    deployment: DeploymentPath,
    to_ranks: Annotated[
        list[_Ranks],
        Query(
            max_length=_MOST_WIDTHS,
            description="Numbers of ranks. Default: up to eight, in whole nodes if there are"
            " several.",
        ),
    ] = [],  # noqa: B006
    to_slots: Annotated[
        int | None,
        Query(
            ge=1,
            le=2**31,
            description="Slots of a layer over all ranks at these widths. Default: at least as many"
            " replicas as today.",
        ),
    ] = None,
    retire: Annotated[
        list[_Rank],
        Query(max_length=MOST_RANKS, description="Ranks to retire, instead of `to_ranks`."),
    ] = [],  # noqa: B006
    whole_nodes: Annotated[
        bool, Query(description="Only all ranks of a node retire or join.")
    ] = False,
    multi_node_bytes: Annotated[
        int,
        Query(
            ge=0,
            le=2**50,
            description="Memory of a rank that only a group on several nodes needs, such as buffers"
            " of its transport.",
        ),
    ] = 0,
) -> CapacityOut:
    """Compare what other numbers of ranks would bring, and what would have to move.

    Each width is planned by the deployment's policy on the older steps of the window, from today's
    placement, and scored on the newer ones; large fleets take seconds for each. Nothing is moved,
    started or stored.
    """
    request = CapacityRequest(
        tuple(to_ranks), to_slots, tuple(retire), whole_nodes, multi_node_bytes
    )
    return capacity_out(await operations.capacity(deployment, request))


@router.get("/deployments/{deployment}/policy", responses=_POLICY, response_model=None)
async def get_policy(
    operations: OperationsOf, deployment: DeploymentPath, response: Response
) -> dict[str, Any]:
    """Return the policy document, with an ETag for `If-Match`."""
    document: dict[str, Any] = plain(await operations.policy(deployment))
    response.headers["ETag"] = entity_tag(document)
    return document


@router.patch(
    "/deployments/{deployment}/policy",
    responses={
        **CONFLICT,
        **problem_answers({412: "The document has changed since it was read"}),
        **_POLICY,
    },
    response_model=None,
)
async def set_policy(
    request: Request,
    operations: OperationsOf,
    token: CallerToken,
    deployment: DeploymentPath,
    body: PolicyDocument,
    response: Response,
    if_match: Annotated[
        str | None, Header(description="One or several ETags that the document may have, or `*`.")
    ] = None,
) -> dict[str, Any]:
    """Change mode, policy, its options, cost, gates, schedule, or limits (role admin).

    Role admin is also needed for `observe_lock` and `separate_approval`, and to leave mode observe
    while `observe_lock` is true.
    Returns the document. It is changed as by a JSON merge patch (RFC 7396).
    """
    changes = body.model_dump(mode="json", exclude_unset=True)
    keep_for_audit(request, changes)
    tags = None if if_match is None else {tag.strip() for tag in if_match.split(",")}
    # `*` requires that the document exists, which it always does (RFC 9110, section 13.1.1).
    tags = None if tags == {"*"} else tags
    admin = token.role.covers(Role.ADMIN)
    # What the role allows depends on the document, so it must not change before it is written.
    depends = "mode" in changes and not admin
    base = await operations.policy(deployment) if depends or tags is not None else None
    if not admin and (needs := _needs_admin(changes, base)):
        raise HTTPException(
            403, f"{needs} need role {Role.ADMIN}, token {token.name} has {token.role}"
        )
    try:
        if base is not None and tags is not None and entity_tag(plain(base)) not in tags:
            raise Conflict("the policy document is not the one If-Match names", Reason.STALE_BASE)
        document: dict[str, Any] = plain(
            await operations.set_policy(deployment, changes, token.name, base)
        )
    except Conflict as error:
        if error.reason is not Reason.STALE_BASE:
            raise
        raise HTTPException(412, f"{error}, read it again") from error
    response.headers["ETag"] = entity_tag(document)
    return document


def _needs_admin(changes: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """Return the changes that only role admin may make; empty if there are none."""
    needs = [name for name in ("limits", "observe_lock", "separate_approval") if name in changes]
    locked = base is not None and base.get("observe_lock") and base["mode"] == Mode.OBSERVE
    if locked and changes.get("mode", Mode.OBSERVE) != Mode.OBSERVE:
        needs.append("other modes than the locked mode observe")
    return " and ".join(needs)


@router.post("/deployments/{deployment}/resize", status_code=202, responses=CONFLICT)
async def resize(
    request: Request,
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    body: ResizeIn,
) -> ResizeOut:
    """Let ranks retire: a plan leaves no expert on them alone, and no other plan starts meanwhile.

    Once `ready`, the group may form again without them. `resume` ends it before. The same request
    may be repeated: it moves what has come to live on those ranks alone since.
    """
    keep_for_audit(request, body.model_dump(exclude_defaults=True))
    asked = body.model_dump() | {"retire": tuple(body.retire), "requested_by": caller}
    return ResizeOut.model_validate(await operations.resize(deployment, ResizeRequest(**asked)))


@router.get("/deployments/{deployment}/resize")
async def get_resize(operations: OperationsOf, deployment: DeploymentPath) -> ResizeOut:
    """Return which ranks retire, and if they may leave; 404 if none retire."""
    status = (await operations.deployment(deployment)).status()
    if status.resize is None:
        raise NotFound(f"no rank of {deployment} retires")
    return ResizeOut.model_validate(status.resize)


@router.post("/deployments/{deployment}/freeze", status_code=204, responses=CONFLICT)
async def freeze(
    request: Request,
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    body: FreezeIn,
) -> None:
    """Pause: start no new plan for some seconds; 0 ends it. A running plan continues."""
    keep_for_audit(request, body.model_dump())
    await operations.freeze(deployment, body.seconds, caller)


@router.post("/deployments/{deployment}/resume", status_code=204, responses=CONFLICT)
async def resume(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
) -> None:
    """End a pause, the retirement of ranks, and the hold on automatic plans after a rollback or
    undelivered gains."""
    await operations.resume(deployment, caller)


@router.get("/deployments/{deployment}/decisions")
async def list_decisions(
    operations: OperationsOf,
    deployment: DeploymentPath,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> DecisionPage:
    """List the decision of every cycle with its reason, the newest first.

    A decision to change nothing is listed too.
    """
    rows = [
        plain(decision_out(row)) for row in await operations.decisions(deployment, _DECISIONS_SHOWN)
    ]
    chosen, after = page(rows, lambda row: f"{row['at']!r} {row['reason']}", page_token, page_size)
    return DecisionPage(items=chosen, next_page_token=after)
