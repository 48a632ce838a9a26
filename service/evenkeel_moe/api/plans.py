"""Routes of plans: create, read, approve, cancel, roll back."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Response

from evenkeel_moe.api.context import (
    PLAN_ID_PATTERN,
    About,
    Paging,
    PlanPath,
    page_token_of,
    tags_wanted,
)
from evenkeel_moe.api.convert import plan_out, plan_request, plan_summary
from evenkeel_moe.api.large_bodies import LargeBodyRoute
from evenkeel_moe.api.problems import CONFLICT, STALE
from evenkeel_moe.api.schema_base import shown
from evenkeel_moe.api.schemas import (
    EpochsOut,
    PlanIn,
    PlanOut,
    PlanPage,
    RollbackIn,
    RollbackPreviewOut,
    RollbackQuery,
    StoryOut,
)
from evenkeel_moe.api.words.gates import hold_words
from evenkeel_moe.api.words.plan_figures import preview_figures
from evenkeel_moe.api.words.plans import plan_between, story_rows
from evenkeel_moe.errors import NotFound, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.ports.operations import RollbackRequest

router = APIRouter(tags=["plans"], route_class=LargeBodyRoute)

_LOOKED_AT = 100
"""Newest plans among which a rollback looks for the one that it takes back."""


_DRY_RUN = {"model": PlanOut, "description": "A dry run: nothing is kept"}
_PROPOSED = {"model": PlanOut, "description": "Proposed: it starts when approved"}


async def _accepted(about: About, record: PlanRecord, response: Response) -> PlanOut:
    plan = record.plan
    response.headers["Location"] = f"/v1/deployments/{plan.deployment}/plans/{plan.plan_id}"
    return await _plan_of(about, record)


async def _plan_of(about: About, record: PlanRecord) -> PlanOut:
    """Return a plan; any replica can, also one that does not know its deployment's state."""
    status = None
    with suppress(NotFound, Unavailable):
        status = await about.status()
    return plan_out(record, status)


@router.post(
    "/deployments/{deployment}/plans",
    status_code=202,
    responses={200: _DRY_RUN, 201: _PROPOSED, **CONFLICT},
)
async def create_plan(
    about: About,
    body: PlanIn,
    response: Response,
    idempotency_key: Annotated[
        str | None,
        Header(pattern=PLAN_ID_PATTERN, description="The plan_id, if the body has none."),
    ] = None,
) -> PlanOut:
    """Create a manual plan: 201 if it waits for approval, 202 if it runs. Location is the plan.

    The same plan_id with the same body gives the same plan; with another body it gives 409
    `id_reused`.
    """
    asked = body.model_dump(mode="json", exclude_defaults=True, exclude={"plan_id", "target"})
    plan_id = body.plan_id or idempotency_key
    wanted = plan_request(body, plan_id, await about.status(), about.caller)
    if wanted.target is not None:
        asked["target"] = wanted.target.digest
    _keep(about, asked, plan_id)
    record = await about.operations.create_plan(about.deployment, wanted)
    _keep(about, asked, record.plan.plan_id)
    if body.dry_run:
        response.status_code = 200
        return await _plan_of(about, record)
    if record.phase is PlanPhase.PROPOSED:
        response.status_code = 201
    return await _accepted(about, record, response)


@router.get("/deployments/{deployment}/plans")
async def list_plans(about: About, paging: Paging) -> PlanPage:
    """List plans, newest first, without their maps."""
    after = None if paging.after is None else PlanId(paging.after)
    records, more = await about.operations.plans(about.deployment, paging.page_size, after)
    following = page_token_of(records[-1].plan.plan_id) if more and records else None
    return PlanPage(items=[plan_summary(record) for record in records], next_page_token=following)


@router.get("/deployments/{deployment}/plans/{plan_id}")
async def get_plan(about: About, plan_id: PlanPath) -> PlanOut:
    """Return a plan with its target, waves and story."""
    return await _plan_of(about, await about.operations.plan(about.deployment, plan_id))


@router.get("/deployments/{deployment}/plans/{plan_id}/story")
async def get_story(about: About, plan_id: PlanPath) -> StoryOut:
    """Return the events of a plan and their reasons, in order."""
    record = await about.operations.plan(about.deployment, plan_id)
    rows = story_rows(record)
    return StoryOut(plan_id=plan_id, phase=record.phase, reason=record.reason, rows=rows)


@router.post(
    "/deployments/{deployment}/plans/{plan_id}/approve",
    status_code=202,
    responses=CONFLICT | STALE,
)
async def approve_plan(
    about: About,
    plan_id: PlanPath,
    response: Response,
    if_match: Annotated[
        str | None,
        Header(description="The `target.digest` that was looked at, in quotes; or `*`."),
    ] = None,
) -> PlanOut:
    """Start a proposed plan.

    It is 409 `stale_base` if the placement has changed since the plan was made, and 409
    `weights_version_changed` if the weights have. Beyond the limits of the policy, which may be
    lower than when the plan was made, this needs role admin, and is 409 `limit_exceeded` for
    others. With `If-Match` only the plan with this target is started; another one is 412.
    """
    if tags := tags_wanted(if_match):
        digest = (await about.operations.plan(about.deployment, plan_id)).plan.target.digest
        if f'"{digest}"' not in tags:
            raise HTTPException(
                412, f"the target of plan {plan_id} has digest {digest}, not {if_match:.80}"
            )
    approved = await about.operations.approve(
        about.deployment, plan_id, about.caller, bounded=not about.is_admin
    )
    return await _accepted(about, approved, response)


@router.post(
    "/deployments/{deployment}/plans/{plan_id}/cancel", status_code=202, responses=CONFLICT
)
async def cancel_plan(about: About, plan_id: PlanPath, response: Response) -> PlanOut:
    """Stop a plan. A wave that all ranks have voted for still commits; later waves do not start."""
    cancelled = await about.operations.cancel(about.deployment, plan_id, about.caller)
    return await _accepted(about, cancelled, response)


@router.get("/deployments/{deployment}/epochs")
async def get_epochs(about: About) -> EpochsOut:
    """Return the recorded placements: the group's history, newest first, then replaced ones."""
    return EpochsOut.model_validate({"items": await about.operations.epochs(about.deployment)})


@router.get("/deployments/{deployment}/rollback", responses=CONFLICT)
async def preview_rollback(
    about: About, wanted: Annotated[RollbackQuery, Query()]
) -> RollbackPreviewOut:
    """Return what a rollback would move and cost. Nothing is started or stored."""
    operations, name = about.operations, about.deployment
    plan = await operations.rollback_plan(name, RollbackRequest(**wanted.model_dump()))
    to_epoch = int(plan.numbers["to_epoch"])
    newest, _ = await operations.plans(name, _LOOKED_AT)
    undone = None if wanted.to_placement else plan_between(newest, to_epoch, plan.base_epoch)
    status = await about.status()
    return shown(
        RollbackPreviewOut,
        plan,
        to_epoch=to_epoch,
        waves=len(plan.waves),
        expected_stall_s=plan.numbers.get("expected_stall_s"),
        undoes=None if undone is None else plan_summary(undone),
        figures=preview_figures(plan, status),
        hold_text=hold_words(status.mode),
    )


@router.post("/deployments/{deployment}/rollback", status_code=202, responses=CONFLICT)
async def rollback(
    about: About,
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
    wanted = RollbackIn() if body is None else body
    asked = wanted.model_dump(exclude={"plan_id"}, exclude_none=True)
    plan_id = wanted.plan_id
    if plan_id is None and idempotency_key is not None:
        plan_id = _rollback_id(about.caller, idempotency_key)
    _keep(about, asked, plan_id)
    record = await about.operations.rollback(
        about.deployment,
        RollbackRequest(
            plan_id=None if plan_id is None else PlanId(plan_id),
            bounded=not about.is_admin,
            requested_by=about.caller,
            **asked,
        ),
    )
    _keep(about, asked, record.plan.plan_id)
    return await _accepted(about, record, response)


def _keep(about: About, asked: Mapping[str, Any], plan_id: str | None) -> None:
    """Keep what was asked for, and the id of the plan if it is known."""
    about.keep_for_audit(({} if plan_id is None else {"plan_id": plan_id}) | dict(asked))


def _rollback_id(caller: str, key: str) -> str:
    """Return an id that neither another caller's rollback has nor a plan named like the key."""
    return f"rollback-{hashlib.sha256(f'{caller} {key}'.encode()).hexdigest()[:24]}"
