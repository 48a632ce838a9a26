"""Turns values of the controller into response bodies, and request bodies into its requests.

A response body takes fields of the same name from the value; here is only what has to be computed.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from evenkeel_moe.api.schema_base import shown
from evenkeel_moe.api.schemas import (
    CapacityOut,
    DeliveredOut,
    DeploymentOut,
    PhaseLoad,
    PlacementOut,
    PlanIn,
    PlanOut,
    PlanSummary,
    PolicyScoreOut,
    RecommendationOut,
    WaveOut,
)
from evenkeel_moe.api.words.advice import CALLS, advice_text, outcome_text
from evenkeel_moe.api.words.gates import hold_words
from evenkeel_moe.api.words.health import health_elsewhere, health_of
from evenkeel_moe.api.words.plan_figures import details, figures, is_by_tokens
from evenkeel_moe.api.words.plans import MAY_COST, plan_text, story_rows
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanLimits, PlanRecord
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.kv_tradeoff import kv_tradeoff
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.ports.operations import Advice, CapacityAdvice, LedElsewhere, PlanRequest
from evenkeel_moe.ports.status import DELIVERED_BOUNDS, DeploymentStatus, HealthBounds
from evenkeel_moe.protocol.transitions import ControlState

P = TypeVar("P", bound=PlanSummary)


def plan_summary(record: PlanRecord) -> PlanSummary:
    """Return a plan without its maps."""
    return _plan(PlanSummary, record)


def _plan(body: type[P], record: PlanRecord, **more: Any) -> P:
    plan, delivered, promised = record.plan, record.delivered, record.plan.numbers.get("gain")
    if delivered is not None:
        more["delivered"] = shown(
            DeliveredOut,
            plan,
            delivered,
            promised=promised,
            promised_lower=plan.numbers.get("gain_lower"),
            over_promised=delivered.over(promised),
        )
    return shown(
        body,
        plan,
        record,
        phase_text=record.phase_text,
        ended=record.phase.terminal,
        text=plan_text(record),
        planned_because=plan.reason,
        may_cost_text=MAY_COST.get(plan.kind),
        waves=len(plan.waves),
        **more,
    )


def plan_out(record: PlanRecord, status: DeploymentStatus | None) -> PlanOut:
    """Return a plan with its target, waves and story.

    Args:
        record: the plan.
        status: of its deployment now; None if it is not known.
    """
    return _plan(
        PlanOut,
        record,
        target=placement_out(record.plan.target, None),
        wave_list=_waves(record.plan),
        story=story_rows(record),
        gain_by_tokens=is_by_tokens(record.plan),
        figures=figures(record, status),
        details=details(record.plan.numbers),
    )


def _waves(plan: Plan) -> list[WaveOut]:
    per_rank = plan.target.slots_per_rank
    return [
        WaveOut(
            index=wave.index,
            layers=list(wave.layers),
            moves=wave.moves(per_rank),
            nbytes=wave.nbytes(per_rank),
        )
        for wave in plan.waves
    ]


def placement_out(placement: Placement, epoch: int | None) -> PlacementOut:
    """Return a placement with its derived maps."""
    return PlacementOut(
        **_head(placement, epoch),
        physical_to_logical=placement.phy2log.tolist(),
        logical_to_physical=placement.slots_by_expert(),
        replica_count=placement.logcnt.tolist(),
    )


def _head(placement: Placement, epoch: int | None) -> dict[str, Any]:
    """Return the fields of a placement beside its maps."""
    names = ("digest", "num_ranks", "slots_per_rank")
    return {"epoch": epoch} | {name: getattr(placement, name) for name in names}


def placement_json(placement: Placement, epoch: int | None) -> str:
    """Return `placement_out` as JSON, written layer by layer.

    In a thread this leaves the event loop its turns: one call for a whole map of millions of slots
    would hold the interpreter's lock for seconds.
    """
    maps: dict[str, Iterable[list[Any]]] = {
        "physical_to_logical": (row.tolist() for row in placement.phy2log),
        "logical_to_physical": placement.slots_by_expert(),
        "replica_count": (row.tolist() for row in placement.logcnt),
    }
    head = _head(placement, epoch).items()
    members = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in head]
    for name, rows in maps.items():
        written = ",".join(json.dumps(row, separators=(",", ":")) for row in rows)
        members.append(f"{json.dumps(name)}:[{written}]")
    return f"{{{','.join(members)}}}"


def decision_out(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the decision log with its reason in words."""
    return {**row, "reason_text": sentence(row["reason"])}


def deployment_out(
    status: DeploymentStatus, bounds: HealthBounds = DELIVERED_BOUNDS
) -> DeploymentOut:
    """Return the state of a deployment. Without a leader the state of its ranks is unknown."""
    more: dict[str, Any] = {"held_text": None}
    if status.held:
        more["held_text"] = f"{sentence(status.held_because)} {hold_words(status.mode)}"
    if status.last_decision is not None:
        more["last_decision"] = decision_out(status.last_decision)
    if status.active_plan is not None:
        more["active_plan"] = plan_summary(status.active_plan)
    if status.state == ControlState.FOLLOWER:
        more |= {"term": None, "generation": None, "ranks": None}
    return shown(
        DeploymentOut,
        status,
        health=health_of(status, bounds),
        proposals=[plan_summary(record) for record in status.proposals],
        **more,
    )


def elsewhere_out(led: LedElsewhere) -> DeploymentOut:
    """Return what is known of a deployment that this replica does not lead: who leads it."""
    known = {
        "deployment": led.deployment,
        "state": ControlState.FOLLOWER,
        "reason": Reason.NOT_LEADER,
        "leader": led.leader,
        "leader_address": led.address,
        "health": health_elsewhere(led.leader),
    }
    return shown(DeploymentOut, **dict.fromkeys(DeploymentOut.model_fields) | known)


def phase_load(window: LoadWindow | None, placement: Placement | None) -> PhaseLoad | None:
    """Return the mean load per step of one window; None without steps."""
    if window is None or not len(window):
        return None
    per_rank: list[list[float]] | None = None
    by_layer: Any = None
    if placement is not None:
        carried = metrics.rank_load(window.counts, placement)
        per_rank = carried.mean(axis=0).tolist()
        by_layer = metrics.balancedness_by_layer(carried)
    return PhaseLoad(
        steps=len(window),
        first_step=int(window.steps[0]),
        newest_step=int(window.steps[-1]),
        tokens_per_expert=window.counts.mean(axis=0).tolist(),
        tokens_per_rank=per_rank,
        balancedness_by_layer=by_layer,
    )


def recommendation_out(
    advice: Advice, tokens_per_sequence: int | None, mode: str
) -> RecommendationOut:
    """Return a recommendation; what is unknown is null."""
    found = advice.recommendation
    tradeoff = None
    if found.redundancy is not None:
        tradeoff = kv_tradeoff(found.redundancy, advice.kv, tokens_per_sequence)
    promised = [] if advice.kv_promise is None else [advice.kv_promise.words]
    return shown(
        RecommendationOut,
        found,
        advice,
        at=advice.at_unix,
        call_text=CALLS[found.call],
        words=[*found.words, *promised],
        reason_text=advice_text(found.reason, mode),
        policies=[
            shown(PolicyScoreOut, row, reason_text=outcome_text(row.reason, mode))
            for row in found.policies
        ],
        verdict=found.policies[0].verdict if found.policies else None,
        replica_tradeoff=tradeoff,
    )


def capacity_out(advice: CapacityAdvice) -> CapacityOut:
    """Return a comparison of widths; what is unknown is null."""
    return shown(CapacityOut, advice.capacity, advice, at=advice.at_unix)


def plan_request(
    body: PlanIn, plan_id: str | None, status: DeploymentStatus, by: str
) -> PlanRequest:
    """Return the controller's request for a manual plan.

    Raises:
        ShapeMismatch: the explicit target has another shape than the deployment.
        InvalidInput: the explicit target has an unknown expert.
        Unavailable: the same, while another replica leads or ranks are missing: the shape known
            here may then be one rank's claim, and that rank may belong to another group.
    """
    target: Placement | None = None
    if body.target is not None:
        rows = body.target.physical_to_logical
        widths = sorted({len(row) for row in rows})
        if len(widths) > 1:
            raise ShapeMismatch(f"target has rows of {widths} slots, all must have as many")
        try:
            target = _target(rows, status.shape)
        except InvalidInput as error:
            if status.generation and status.state != ControlState.FOLLOWER:
                raise
            raise Unavailable(
                f"the ranks have not reported their state; {error}", Reason(status.reason)
            ) from None
    return PlanRequest(
        plan_id=None if plan_id is None else PlanId(plan_id),
        policy=body.policy,
        limits=PlanLimits(**body.limits.model_dump()),
        changes=body.model_dump(
            include={"policy_options", "replica_budget"}, exclude_defaults=True
        ),
        phases=tuple(dict.fromkeys(body.phases)),
        dry_run=body.dry_run,
        target=target,
        approve=body.approve,
        requested_by=by,
    )


def _target(rows: list[list[int]], shape: ModelShape) -> Placement:
    if len(rows) != shape.num_layers or {len(row) for row in rows} != {shape.num_slots}:
        raise ShapeMismatch(
            f"target has {len(rows)} rows of {len(rows[0])} slots,"
            f" the deployment has {shape.num_layers} layers of {shape.num_slots} slots"
        )
    return Placement(np.array(rows, np.int32), shape.num_ranks, shape.num_logical_experts)
