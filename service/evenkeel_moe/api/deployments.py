"""Routes of deployments: state, placement, load, policy, freeze, decisions."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Response
from pydantic import Field

from evenkeel_moe.api.auth import Role
from evenkeel_moe.api.context import About, Asked, Paging, QueryBody, entity_tag, tags_wanted
from evenkeel_moe.api.convert import (
    capacity_out,
    decision_out,
    deployment_out,
    elsewhere_out,
    phase_load,
    placement_json,
    recommendation_out,
)
from evenkeel_moe.api.large_bodies import LargeBodyRoute
from evenkeel_moe.api.problems import CONFLICT, STALE
from evenkeel_moe.api.schema_base import plain
from evenkeel_moe.api.schemas import (
    CapacityOut,
    DecisionPage,
    DeploymentOut,
    DeploymentPage,
    FreezeIn,
    GatesOut,
    LoadOut,
    PhaseLoad,
    PlacementOut,
    PolicyDocument,
    RecommendationOut,
    ResizeIn,
    ResizeOut,
)
from evenkeel_moe.api.words.gates import gates_of
from evenkeel_moe.errors import Conflict, NotFound, Reason, Unavailable
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.capacity import MOST_RANKS, CapacityRequest
from evenkeel_moe.ports.operations import ResizeRequest

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


@router.get("/deployments")
async def list_deployments(asked: Asked, paging: Paging) -> DeploymentPage:
    """List the deployments by name, once their ranks have registered.

    A deployment that another replica leads has only its name, its leader and its health.
    """
    found = [elsewhere_out(led) for led in await asked.operations.led_elsewhere()]
    for view in await asked.operations.deployments():
        with suppress(Unavailable):  # Before a rank registers there is only a name.
            found.append(deployment_out(view.status(), asked.bounds))
    rows = sorted(found, key=lambda row: row.deployment)
    chosen, after = paging.page(rows, lambda row: row.deployment)
    return DeploymentPage(items=chosen, next_page_token=after)


@router.get("/deployments/{deployment}")
async def get_deployment(about: About) -> DeploymentOut:
    """Return a deployment: health, state and reason, ranks, balance, active plan, last decision."""
    return deployment_out(await about.status(), about.bounds)


@router.get("/deployments/{deployment}/gates")
async def get_gates(about: About) -> GatesOut:
    """Return the gates of the newest planning cycle, and what would open the closed one."""
    return GatesOut(items=gates_of(await about.status()))


@router.delete("/deployments/{deployment}", status_code=204, responses=CONFLICT)
async def forget_deployment(about: About) -> None:
    """Remove lease, memory, series and windows of a deployment whose ranks are gone.

    Plans and epochs stay stored, and ranks that come back are accepted. 409 while a rank is
    connected. Needs role admin.
    """
    await about.operations.forget(about.deployment, about.caller)


@router.get("/deployments/{deployment}/placement", response_model=PlacementOut)
async def get_placement(about: About) -> Response:
    """Return the committed placement; 503 before the ranks reported it."""
    async with about.turns:
        view = await about.view()
        placement = view.placement()
        if placement is None:
            raise Unavailable(
                f"the ranks of {about.deployment} have not reported their placement yet",
                Reason.RANKS_MISSING,
            )
        epoch = view.status().epoch
        # A large map takes most of a second: not on the event loop, which serves ranks.
        body = await asyncio.to_thread(placement_json, placement, epoch)
    return Response(body, media_type="application/json")


@router.get("/deployments/{deployment}/load")
async def get_load(about: About) -> LoadOut:
    """Return the load of each phase: layers x experts, and layers x ranks of the placement."""
    async with about.turns:
        view = await about.view()
        placement = view.placement()
        windows = {phase: view.window(phase) for phase in Phase}
        # Summing a large window takes most of a second: not on the event loop, which serves ranks.
        phases = {
            phase: await asyncio.to_thread(_phase_load_of, windows, phase, placement)
            for phase in Phase
        }
    return LoadOut(deployment=about.deployment, epoch=view.status().epoch, phases=phases)


def _phase_load_of(
    windows: dict[Phase, LoadWindow | None], phase: Phase, placement: Placement | None
) -> PhaseLoad | None:
    """Return `phase_load` of the window of a phase, and take it out of `windows`.

    The thread would hold its arguments a little longer than the request's turn lasts.
    """
    return phase_load(windows.pop(phase), placement)


class _RecommendationQuery(QueryBody):
    max_age_s: float | None = Field(None, ge=0, le=86400, allow_inf_nan=False)
    """Largest age of the result; 0 asks for a new one. Default: one cycle."""
    tokens_per_sequence: int | None = Field(None, ge=1, le=2**31)
    """Tokens that a sequence holds in the KV cache: the batch that fits is then counted in
    sequences."""


@router.get("/deployments/{deployment}/recommendation", responses=CONFLICT)
async def get_recommendation(
    about: About, wanted: Annotated[_RecommendationQuery, Query()]
) -> RecommendationOut:
    """Compare the gain of a plan, of other policies, and of more or fewer replicas.

    They are planned on the older steps of the window and scored on the newer ones. Nothing is
    moved, started or stored. While a plan runs the answer is 409.
    """
    advice = await about.operations.recommendation(about.deployment, wanted.max_age_s)
    return recommendation_out(advice, wanted.tokens_per_sequence, (await about.status()).mode)


class _CapacityQuery(QueryBody):
    to_ranks: tuple[_Ranks, ...] = Field((), max_length=_MOST_WIDTHS)
    """Numbers of ranks. Default: up to eight, in whole nodes if there are several."""
    to_slots: int | None = Field(None, ge=1, le=2**31)
    """Slots of a layer over all ranks at these widths. Default: at least as many replicas as
    today."""
    retire: tuple[_Rank, ...] = Field((), max_length=MOST_RANKS)
    """Ranks to retire, instead of `to_ranks`."""
    whole_nodes: bool = False
    """Only all ranks of a node retire or join."""
    multi_node_bytes: int = Field(0, ge=0, le=2**50)
    """Memory of a rank that only a group on several nodes needs, such as buffers of its
    transport."""


@router.get("/deployments/{deployment}/capacity", responses=CONFLICT)
async def get_capacity(about: About, wanted: Annotated[_CapacityQuery, Query()]) -> CapacityOut:
    """Compare what other numbers of ranks would bring, and what would have to move.

    Each width is planned by the deployment's policy on the older steps of the window, from today's
    placement, and scored on the newer ones; large fleets take seconds for each. Nothing is moved,
    started or stored. While a plan runs the answer is 409.
    """
    request = CapacityRequest(**wanted.model_dump())
    return capacity_out(await about.operations.capacity(about.deployment, request))


@router.get("/deployments/{deployment}/policy", responses=_POLICY, response_model=None)
async def get_policy(about: About, response: Response) -> dict[str, Any]:
    """Return the policy document, with an ETag for `If-Match`."""
    document: dict[str, Any] = plain(await about.operations.policy(about.deployment))
    response.headers["ETag"] = entity_tag(document)
    return document


@router.patch(
    "/deployments/{deployment}/policy", responses=CONFLICT | STALE | _POLICY, response_model=None
)
async def set_policy(
    about: About,
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
    about.keep_for_audit(changes)
    tags, admin, token = tags_wanted(if_match), about.is_admin, about.token
    # What the role allows depends on the document, so it must not change before it is written.
    depends = "mode" in changes and not admin
    operations, name = about.operations, about.deployment
    base = await operations.policy(name) if depends or tags else None
    if not admin and (needs := _needs_admin(changes, base)):
        raise HTTPException(
            403, f"{needs} need role {Role.ADMIN}, token {token.name} has {token.role}"
        )
    try:
        if base is not None and tags and entity_tag(plain(base)) not in tags:
            raise Conflict("the policy document is not the one If-Match names", Reason.STALE_BASE)
        document: dict[str, Any] = plain(
            await operations.set_policy(name, changes, token.name, base)
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
async def resize(about: About, body: ResizeIn) -> ResizeOut:
    """Let ranks retire: a plan leaves no expert on them alone, and no other plan starts meanwhile.

    Once `ready`, the group may form again without them. `resume` ends it before. The same request
    may be repeated: it moves what has come to live on those ranks alone since. A `plan_id` names
    one evacuation: once it has ended, a request with that id that would move something is 409
    `wrong_phase`.
    """
    about.keep_for_audit(body.model_dump(exclude_defaults=True))
    wanted = ResizeRequest(**body.model_dump(), requested_by=about.caller)
    return ResizeOut.model_validate(await about.operations.resize(about.deployment, wanted))


@router.get("/deployments/{deployment}/resize")
async def get_resize(about: About) -> ResizeOut:
    """Return which ranks retire, and if they may leave; 404 if none retire."""
    status = await about.status()
    if status.resize is None:
        raise NotFound(f"no rank of {about.deployment} retires")
    return ResizeOut.model_validate(status.resize)


@router.post("/deployments/{deployment}/freeze", status_code=204, responses=CONFLICT)
async def freeze(about: About, body: FreezeIn) -> None:
    """Pause: start no new plan for some seconds; 0 ends it. A running plan continues."""
    about.keep_for_audit(body.model_dump())
    await about.operations.freeze(about.deployment, body.seconds, about.caller)


@router.post("/deployments/{deployment}/resume", status_code=204, responses=CONFLICT)
async def resume(about: About) -> None:
    """End a pause, the retirement of ranks, and the hold on automatic plans after a rollback or
    undelivered gains."""
    await about.operations.resume(about.deployment, about.caller)


@router.get("/deployments/{deployment}/decisions")
async def list_decisions(about: About, paging: Paging) -> DecisionPage:
    """List the decision of every cycle with its reason, the newest first.

    A decision to change nothing is listed too.
    """
    rows = await about.operations.decisions(about.deployment, _DECISIONS_SHOWN)
    chosen, after = paging.page(rows, lambda row: f"{row['at']!r} {row['reason']}")
    items = [plain(decision_out(row)) for row in chosen]
    return DecisionPage(items=items, next_page_token=after)
