"""Routes of plans: create, read, approve, cancel, roll back."""

import hashlib
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Request, Response

from evenkeel_moe.api.auth import Role
from evenkeel_moe.api.context import (
    DIGEST_PATTERN,
    PLAN_ID_PATTERN,
    Caller,
    CallerToken,
    DeploymentPath,
    OperationsOf,
    PageSize,
    PageToken,
    PlanPath,
    keep_for_audit,
    page_token_of,
    read_page_token,
)
from evenkeel_moe.api.convert import plan_out, plan_request, plan_summary
from evenkeel_moe.api.large_bodies import LargeBodyRoute
from evenkeel_moe.api.schemas import (
    CONFLICT,
    EpochsOut,
    PlanIn,
    PlanOut,
    PlanPage,
    RollbackIn,
    RollbackPreviewOut,
    StoryOut,
    problem_answers,
)
from evenkeel_moe.api.words.gates import hold_words
from evenkeel_moe.api.words.plan_figures import preview_figures
from evenkeel_moe.api.words.plans import plan_between, story_rows
from evenkeel_moe.errors import NotFound, Unavailable
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.ports.operations import Operations, RollbackRequest

router = APIRouter(tags=["plans"], route_class=LargeBodyRoute)

_LOOKED_AT = 100
"""Newest plans among which a rollback looks for the one that it takes back."""


async def _accepted(operations: Operations, record: PlanRecord, response: Response) -> PlanOut:
    plan = record.plan
    response.headers["Location"] = f"/v1/deployments/{plan.deployment}/plans/{plan.plan_id}"
    return await _plan_of(operations, record)


async def _plan_of(operations: Operations, record: PlanRecord) -> PlanOut:
    """Return a plan; any replica can, also one that does not know its deployment's state."""
    status = None
    with suppress(NotFound, Unavailable):
        status = (await operations.deployment(record.plan.deployment)).status()
    return plan_out(record, status)


@router.post(
    "/deployments/{deployment}/plans",
    status_code=202,
    responses={
        200: {"model": PlanOut, "description": "A dry run: nothing is kept"},
        201: {"model": PlanOut, "description": "Proposed: it starts when approved"},
        **CONFLICT,
    },
)
async def create_plan(
    request: Request,
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    body: PlanIn,
    response: Response,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=PLAN_ID_PATTERN,
            description="The plan_id, if the body has none.",
        ),
    ] = None,
) -> PlanOut:
    """Create a manual plan: 201 if it waits for approval, 202 if it runs. Location is the plan.

    The same plan_id with the same body gives the same plan; with another body it gives 409
    `id_reused`.
    """
    status = (await operations.deployment(deployment)).status()
    asked = body.model_dump(mode="json", exclude_defaults=True, exclude={"plan_id", "target"})
    wanted = plan_request(body, body.plan_id or idempotency_key, status, caller)
    target = None if wanted.target is None else wanted.target.digest
    keep_for_audit(request, _named(plan_id=wanted.plan_id, **asked, target=target))
    record = await operations.create_plan(deployment, wanted)
    keep_for_audit(request, _named(plan_id=record.plan.plan_id, **asked, target=target))
    if body.dry_run:
        response.status_code = 200
        return await _plan_of(operations, record)
    if record.phase is PlanPhase.PROPOSED:
        response.status_code = 201
    return await _accepted(operations, record, response)


@router.get("/deployments/{deployment}/plans")
async def list_plans(
    operations: OperationsOf,
    deployment: DeploymentPath,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> PlanPage:
    """List plans, newest first, without their maps."""
    after = read_page_token(page_token)
    records, more = await operations.plans(
        deployment, page_size, None if after is None else PlanId(after)
    )
    following = page_token_of(records[-1].plan.plan_id) if more and records else None
    return PlanPage(items=[plan_summary(record) for record in records], next_page_token=following)


@router.get("/deployments/{deployment}/plans/{plan_id}")
async def get_plan(
    operations: OperationsOf, deployment: DeploymentPath, plan_id: PlanPath
) -> PlanOut:
    """Return a plan with its target, waves and story."""
    return await _plan_of(operations, await operations.plan(deployment, plan_id))


@router.get("/deployments/{deployment}/plans/{plan_id}/story")
async def get_story(
    operations: OperationsOf, deployment: DeploymentPath, plan_id: PlanPath
) -> StoryOut:
    """Return the events of a plan and their reasons, in order."""
    record = await operations.plan(deployment, plan_id)
    rows = story_rows(record)
    return StoryOut(plan_id=plan_id, phase=record.phase, reason=record.reason, rows=rows)


@router.post(
    "/deployments/{deployment}/plans/{plan_id}/approve",
    status_code=202,
    responses=CONFLICT | problem_answers({412: "The plan has another target than If-Match"}),
)
async def approve_plan(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    plan_id: PlanPath,
    response: Response,
    if_match: Annotated[
        str | None,
        Header(description="The `target.digest` that was looked at, in quotes; or `*`."),
    ] = None,
) -> PlanOut:
    """Start a proposed plan; 409 `stale_base` if the placement has changed since it was made.

    With `If-Match` only the plan with this target is started.
    """
    if if_match is not None and if_match.strip() != "*":
        digest = (await operations.plan(deployment, plan_id)).plan.target.digest
        if f'"{digest}"' not in {tag.strip() for tag in if_match.split(",")}:
            raise HTTPException(
                412, f"the target of plan {plan_id} has digest {digest}, not {if_match:.80}"
            )
    approved = await operations.approve(deployment, plan_id, caller)
    return await _accepted(operations, approved, response)


@router.post(
    "/deployments/{deployment}/plans/{plan_id}/cancel", status_code=202, responses=CONFLICT
)
async def cancel_plan(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    plan_id: PlanPath,
    response: Response,
) -> PlanOut:
    """Stop a plan. A wave that all ranks have voted for still commits; later waves do not start."""
    cancelled = await operations.cancel(deployment, plan_id, caller)
    return await _accepted(operations, cancelled, response)


@router.get("/deployments/{deployment}/epochs")
async def get_epochs(operations: OperationsOf, deployment: DeploymentPath) -> EpochsOut:
    """Return the recorded placements: the group's history, newest first, then replaced ones."""
    return EpochsOut.model_validate({"items": await operations.epochs(deployment)})


@router.get("/deployments/{deployment}/rollback", responses=CONFLICT)
async def preview_rollback(
    operations: OperationsOf,
    deployment: DeploymentPath,
    to_epoch: Annotated[
        int | None, Query(ge=0, le=2**53, description="An epoch of the group's history.")
    ] = None,
    to_placement: Annotated[
        str | None, Query(pattern=DIGEST_PATTERN, description="Digest of a recorded placement.")
    ] = None,
) -> RollbackPreviewOut:
    """Return what a rollback would move and cost. Nothing is started or stored."""
    epoch = None if to_epoch is None else Epoch(to_epoch)
    asked = RollbackRequest(to_epoch=epoch, to_placement=to_placement)
    plan = await operations.rollback_plan(deployment, asked)
    to_epoch = int(plan.numbers["to_epoch"])
    newest, _ = await operations.plans(deployment, _LOOKED_AT)
    undone = None if to_placement else plan_between(newest, to_epoch, plan.base_epoch)
    status = (await operations.deployment(deployment)).status()
    return RollbackPreviewOut(
        to_epoch=to_epoch,
        base_epoch=plan.base_epoch,
        waves=len(plan.waves),
        moves=plan.moves,
        nbytes=plan.nbytes,
        expected_stall_s=plan.numbers.get("expected_stall_s"),
        undoes=None if undone is None else plan_summary(undone),
        figures=preview_figures(plan, status),
        hold_text=hold_words(status.mode),
    )


@router.post("/deployments/{deployment}/rollback", status_code=202, responses=CONFLICT)
async def rollback(
    request: Request,
    operations: OperationsOf,
    token: CallerToken,
    deployment: DeploymentPath,
    response: Response,
    body: RollbackIn | None = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=PLAN_ID_PATTERN,
            description="If the body has no plan_id, it is derived from this key and the name of"
            " the token.",
        ),
    ] = None,
) -> PlanOut:
    """Return to a recorded placement and hold automatic plans until `resume`.

    Beyond the limits of the policy this needs role admin, and is 409 `limit_exceeded` for others.

    The same plan_id with the same target gives the same plan; with another one it gives 409
    `id_reused`. Without plan_id and key every call is a new rollback: a repeated call undoes the
    first.
    """
    from_body = body if body is not None else RollbackIn()
    to_epoch, to_placement = from_body.to_epoch, from_body.to_placement
    plan_id = from_body.plan_id
    if plan_id is None and idempotency_key is not None:
        plan_id = _rollback_id(token.name, idempotency_key)
    chosen = None if plan_id is None else PlanId(plan_id)
    target = _named(to_epoch=to_epoch, to_placement=to_placement)
    keep_for_audit(request, _named(plan_id=chosen) | target)
    asked = RollbackRequest(
        chosen,
        None if to_epoch is None else Epoch(to_epoch),
        to_placement,
        bounded=not token.role.covers(Role.ADMIN),
        requested_by=token.name,
    )
    record = await operations.rollback(deployment, asked)
    keep_for_audit(request, _named(plan_id=record.plan.plan_id) | target)
    return await _accepted(operations, record, response)


def _named(**asked: Any) -> dict[str, Any]:
    """Return the fields that a request names, for the audit record."""
    return {name: value for name, value in asked.items() if value is not None}


def _rollback_id(caller: str, key: str) -> str:
    """Return an id that neither another caller's rollback has nor a plan named like the key."""
    return f"rollback-{hashlib.sha256(f'{caller} {key}'.encode()).hexdigest()[:24]}"
