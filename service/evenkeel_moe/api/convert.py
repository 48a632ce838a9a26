"""Model values to answer bodies, and request bodies to model values."""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from evenkeel_moe.api.schemas import (
    DeploymentOut,
    PhaseLoad,
    PlacementOut,
    PlanIn,
    PlanOut,
    PlanSummary,
    PolicyScoreOut,
    RankOut,
    RecommendationOut,
    RedundancyOut,
    ReplicaLevelOut,
    ShapeOut,
    VerdictOut,
    WaveOut,
)
from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanLimits, PlanRecord
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.recommendation import PolicyScore, Redundancy
from evenkeel_moe.planning.decision.verdict import Verdict
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.ports import Advice, DeploymentStatus, LedElsewhere, PlanRequest
from evenkeel_moe.protocol.transitions import ControlState

__all__ = [
    "deployment_out",
    "phase_load",
    "placement_out",
    "plain",
    "plan_out",
    "plan_request",
    "plan_summary",
    "recommendation_out",
]


def plain(value: Any) -> Any:
    """A value as JSON has it: numpy scalars unwrapped, numbers that are not finite null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def _plan_fields(record: PlanRecord) -> dict[str, Any]:
    plan = record.plan
    return {
        "plan_id": plan.plan_id,
        "deployment": plan.deployment,
        "kind": plan.kind.value,
        "policy": plan.policy,
        "phase": record.phase.value,
        "reason": record.reason.value,
        "planned_because": plan.reason.value,
        "error": record.error,
        "base_epoch": plan.base_epoch,
        "waves": len(plan.waves),
        "waves_committed": record.waves_committed,
        "moves": plan.moves,
        "nbytes": plan.nbytes,
        "created_at": plan.created_at,
        "updated_at": record.updated_at,
        "expires_at": plan.expires_at,
        "approved_by": record.approved_by,
        "numbers": plain(plan.numbers),
    }


def plan_summary(record: PlanRecord) -> PlanSummary:
    """A plan without its maps."""
    return PlanSummary(**_plan_fields(record))


def plan_out(record: PlanRecord) -> PlanOut:
    """A plan with its target, waves and story."""
    plan = record.plan
    return PlanOut(
        **_plan_fields(record),
        generation=plan.generation,
        weights_version=plan.weights_version,
        target=placement_out(plan.target, None),
        wave_list=_waves(plan),
        story=plain(record.story),
    )


def _waves(plan: Plan) -> list[WaveOut]:
    per_rank = plan.target.slots_per_rank
    return [
        WaveOut(
            index=wave.index,
            layers=list(wave.layers),
            moves=sum(t.src_slot // per_rank != t.dst_slot // per_rank for t in wave.transfers),
            nbytes=wave.nbytes(per_rank),
        )
        for wave in plan.waves
    ]


def placement_out(placement: Placement, epoch: int | None) -> PlacementOut:
    """A placement with its derived maps."""
    return PlacementOut(
        epoch=epoch,
        digest=placement.digest,
        num_ranks=placement.num_ranks,
        slots_per_rank=placement.slots_per_rank,
        physical_to_logical=placement.phy2log.tolist(),
        logical_to_physical=[
            [[slot for slot in slots if slot >= 0] for slots in layer]
            for layer in placement.log2phy.tolist()
        ],
        replica_count=placement.logcnt.tolist(),
    )


def deployment_out(status: DeploymentStatus) -> DeploymentOut:
    """A deployment as operators see it; without a leader nobody knows the ranks and where they stand."""
    led = status.state is not ControlState.FOLLOWER
    return DeploymentOut(
        deployment=status.deployment,
        state=str(status.state),
        reason=str(status.reason),
        mode=str(status.mode),
        policy=status.policy,
        leader=status.leader or None,
        leader_address=status.leader_address,
        term=status.term if led else None,
        generation=status.generation if led else None,
        epoch=status.epoch,
        shape=ShapeOut.model_validate(status.shape),
        ranks=[RankOut.model_validate(rank) for rank in status.ranks] if led else None,
        step=status.step,
        window_steps=status.window_steps,
        balancedness_mean=plain(status.balancedness_mean),
        balancedness_worst=plain(status.balancedness_worst),
        active_plan=None if status.active_plan is None else plan_summary(status.active_plan),
        staging_bytes_done=status.staging_bytes_done,
        staging_bytes_total=status.staging_bytes_total,
        last_decision=plain(status.last_decision),
        frozen_until_unix=status.frozen_until_unix,
        held=status.held,
    )


def elsewhere_out(led: LedElsewhere) -> DeploymentOut:
    """A deployment that this replica does not lead: nothing is known here but who does."""
    unknown = dict.fromkeys(DeploymentOut.model_fields)
    known = {
        "deployment": led.deployment,
        "state": ControlState.FOLLOWER.value,
        "reason": Reason.NOT_LEADER.value,
        "leader": led.leader,
        "leader_address": led.address,
    }
    return DeploymentOut.model_validate(unknown | known)


def phase_load(window: LoadWindow | None, placement: Placement | None) -> PhaseLoad | None:
    """Mean load per step of one window; None where there is no step."""
    if window is None or not len(window):
        return None
    per_rank: list[list[float]] | None = None
    by_layer: list[float | None] | None = None
    if placement is not None:
        carried = metrics.rank_load(window.counts, placement)
        per_rank = carried.mean(axis=0).tolist()
        by_layer = plain(metrics.balancedness_by_layer(carried))
    return PhaseLoad(
        steps=len(window),
        first_step=int(window.steps[0]),
        newest_step=int(window.steps[-1]),
        tokens_per_expert=window.counts.mean(axis=0).tolist(),
        tokens_per_rank=per_rank,
        balancedness_by_layer=by_layer,
    )


def recommendation_out(advice: Advice) -> RecommendationOut:
    """An advice as operators see it; what is not known is null."""
    found = advice.recommendation
    scores = [_score_out(score) for score in found.policies]
    return RecommendationOut(
        deployment=advice.deployment,
        at=advice.at_unix,
        generation=advice.generation,
        epoch=advice.epoch,
        policy=advice.policy,
        call=found.call.value,
        reason=found.reason.value,
        words=list(found.words),
        newest_step=advice.newest_step,
        window_steps=found.window_steps,
        planned_on_steps=found.planned_on_steps,
        scored_on_steps=found.scored_on_steps,
        steps_since_change=found.steps_since_change,
        verdict=scores[0].verdict if scores else None,
        policies=scores,
        redundancy=None if found.redundancy is None else _redundancy_out(found.redundancy),
        free_bytes=advice.free_bytes,
        shadow=plain(advice.shadow),
    )


def _score_out(score: PolicyScore) -> PolicyScoreOut:
    return PolicyScoreOut(
        policy=score.policy,
        reason=score.reason.value,
        copies=score.copies,
        nbytes=score.nbytes,
        balancedness_expected=plain(score.balancedness_expected),
        verdict=None if score.verdict is None else _verdict_out(score.verdict),
        detail=score.detail or None,
    )


def _verdict_out(verdict: Verdict) -> VerdictOut:
    return VerdictOut(
        call=verdict.call.value,
        steps=verdict.steps,
        gain=plain(verdict.gain),
        gain_lower=plain(verdict.gain_lower),
        gain_upper=plain(verdict.gain_upper),
        copy_cost_share=plain(verdict.cost),
        net_gain=plain(verdict.net_gain),
        saved_per_step=plain(verdict.saved_per_step),
        copy_cost=verdict.copy_cost,
        lifetime_steps=verdict.lifetime_steps,
        payback_steps=plain(verdict.payback_steps),
        payback_s=plain(verdict.payback_s),
    )


def _redundancy_out(redundancy: Redundancy) -> RedundancyOut:
    return RedundancyOut(
        present=redundancy.present,
        advised=redundancy.advised,
        levels=[
            ReplicaLevelOut(
                replicas_per_layer=level.replicas_per_layer,
                gain=plain(level.gain),
                gain_lower=plain(level.gain_lower),
                gain_upper=plain(level.gain_upper),
                marginal_gain=plain(level.marginal_gain),
                extra_bytes_per_rank=level.extra_bytes_per_rank,
                fits=level.fits,
            )
            for level in redundancy.levels
        ],
    )


def plan_request(
    body: PlanIn, plan_id: str | None, status: DeploymentStatus, by: str
) -> PlanRequest:
    """What the controller is asked for.

    Raises:
        ShapeMismatch: the explicit target has another shape than the deployment.
        InvalidInput: an expert in it that is none.
        Unavailable: one or the other, as far as is known here while another replica leads or ranks are missing: that may
            be one rank's word, and of another group.
    """
    target: Placement | None = None
    if body.target is not None:
        rows = body.target.physical_to_logical
        if len({len(row) for row in rows}) > 1:
            raise ShapeMismatch(
                f"target has rows of {sorted({len(row) for row in rows})} slots, all must have as many"
            )
        try:
            target = _target(rows, status.shape)
        except InvalidInput as error:
            if status.generation and status.state != ControlState.FOLLOWER:
                raise
            raise Unavailable(
                f"the ranks have not told where they stand; {error}", Reason(status.reason)
            ) from None
    return PlanRequest(
        plan_id=None if plan_id is None else PlanId(plan_id),
        policy=body.policy,
        limits=PlanLimits(body.limits.max_moves, body.limits.max_bytes, body.limits.max_layers),
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
