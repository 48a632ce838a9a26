"""Routes of plans: make, look, approve, cancel, roll back."""

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from evenkeel_moe.api.context import (
    PLAN_ID_PATTERN,
    Caller,
    DeploymentPath,
    IdempotencyKey,
    OperationsOf,
    PageSize,
    PageToken,
    PlanPath,
    page_token_of,
    read_page_token,
)
from evenkeel_moe.api.convert import plan_out, plan_request, plan_summary
from evenkeel_moe.api.schema_base import plain
from evenkeel_moe.api.schemas import PlanIn, PlanOut, PlanPage, ProblemOut, RollbackIn, StoryOut
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.plan import PlanPhase, PlanRecord

__all__ = ["router"]

router = APIRouter(tags=["plans"])

_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": ProblemOut, "description": "The state has moved on"}
}


def _accepted(record: PlanRecord, response: Response) -> PlanOut:
    plan = record.plan
    response.headers["Location"] = f"/v1/deployments/{plan.deployment}/plans/{plan.plan_id}"
    return plan_out(record)


@router.post(
    "/deployments/{deployment}/plans",
    status_code=202,
    responses={201: {"model": PlanOut, "description": "Proposed: approve starts it"}, **_CONFLICT},
)
async def create_plan(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    body: PlanIn,
    response: Response,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=PLAN_ID_PATTERN,
            description="Repeating the call with the same key and body gives the same answer, with another body 422,"
            " while the first is under way 409. It is the plan_id where the body has none.",
        ),
    ] = None,
) -> PlanOut:
    """Plan by hand; 202 when it runs, 201 when it waits for approval. Location is the plan.

    The same plan_id with the same body gives the same plan again, with another body 409 `id_reused`.
    """
    status = (await operations.deployment(deployment)).status()
    request = plan_request(body, body.plan_id or idempotency_key, status, caller)
    record = await operations.create_plan(deployment, request)
    if record.phase is PlanPhase.PROPOSED:
        response.status_code = 201
    return _accepted(record, response)


@router.get("/deployments/{deployment}/plans")
async def list_plans(
    operations: OperationsOf,
    deployment: DeploymentPath,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> PlanPage:
    """Plans, newest first, without their maps."""
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
    """One plan with its target, waves and story."""
    return plan_out(await operations.plan(deployment, plan_id))


@router.get("/deployments/{deployment}/plans/{plan_id}/story")
async def get_story(
    operations: OperationsOf, deployment: DeploymentPath, plan_id: PlanPath
) -> StoryOut:
    """What happened to one plan and why, in order."""
    record = await operations.plan(deployment, plan_id)
    return StoryOut(
        plan_id=plan_id,
        phase=record.phase.value,
        reason=record.reason.value,
        rows=plain(record.story),
    )


@router.post(
    "/deployments/{deployment}/plans/{plan_id}/approve", status_code=202, responses=_CONFLICT
)
async def approve_plan(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    plan_id: PlanPath,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> PlanOut:
    """Start a proposed plan; 409 `stale_base` when the placement has changed since it was made."""
    return _accepted(await operations.approve(deployment, plan_id, caller), response)


@router.post(
    "/deployments/{deployment}/plans/{plan_id}/cancel", status_code=202, responses=_CONFLICT
)
async def cancel_plan(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    plan_id: PlanPath,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> PlanOut:
    """Stop a plan; a wave whose votes are in still commits, the later ones never start."""
    return _accepted(await operations.cancel(deployment, plan_id, caller), response)


@router.post("/deployments/{deployment}/rollback", status_code=202, responses=_CONFLICT)
async def rollback(
    operations: OperationsOf,
    caller: Caller,
    deployment: DeploymentPath,
    response: Response,
    body: RollbackIn | None = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=PLAN_ID_PATTERN,
            description="Repeating the call with the same key and body gives the same answer, with another body 422,"
            " while the first is under way 409. The plan_id is made of it and the token's name where the body has none.",
        ),
    ] = None,
) -> PlanOut:
    """Return to an earlier epoch's placement and hold automatic plans until `resume`.

    The same plan_id with the same epoch gives the same plan again, with another epoch 409 `id_reused`. Without plan_id and
    key every call is another rollback: one that is repeated undoes the first.
    """
    from_body = body if body is not None else RollbackIn()
    epoch = None if from_body.to_epoch is None else Epoch(from_body.to_epoch)
    plan_id = from_body.plan_id
    if plan_id is None and idempotency_key is not None:
        plan_id = _rollback_id(caller, idempotency_key)
    chosen = None if plan_id is None else PlanId(plan_id)
    return _accepted(await operations.rollback(deployment, epoch, caller, chosen), response)


def _rollback_id(caller: str, key: str) -> str:
    """One id for one caller's key: neither another caller's rollback has it, nor a plan of the key's own name."""
    return f"rollback-{hashlib.sha256(f'{caller} {key}'.encode()).hexdigest()[:24]}"
