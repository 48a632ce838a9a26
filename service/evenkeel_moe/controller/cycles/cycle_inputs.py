"""Pure steps from a deployment's windows to the planner's inputs, and from its answer to a plan."""

import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostModel, CostSource
from evenkeel_moe.model.ids import DeploymentId, Epoch, Generation, PlanId
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord, Wave
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.cycle import CycleInputs
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.schedule.width_change import choose_retired, evacuate, holders
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.leader.plan_records import is_failure
from evenkeel_moe.telemetry.swap_stalls import SwapStalls


@dataclass(frozen=True, slots=True)
class CycleSettings:
    """The planner's inputs besides the loads."""

    plan_steps: int
    recent_steps: int
    threads: int
    copy_bytes_per_s: float
    copy_cost_tokens: float
    deadline_s: float
    objective: Objective
    """Without `cost`, `copy_cost`, `limits`, `dispatch` and `fill_slots`: each cycle fills them
    in."""


@dataclass(frozen=True, slots=True)
class PlanBase:
    """The state of the group that a plan starts from."""

    deployment: DeploymentId
    generation: Generation
    weights_version: int
    epoch: Epoch
    placement: Placement

    @classmethod
    def current(cls, control: DeploymentState) -> "PlanBase":
        """Return the present state.

        Raises:
            Unavailable: this replica does not lead, or the ranks have not told their state.
        """
        group, generation = control.group, control.generation
        if control.leader is None:
            raise Unavailable("this replica does not lead the deployment", Reason.NOT_LEADER)
        if group is None or generation is None:
            raise Unavailable(
                "the ranks have not told where they stand", control.state_reason(0.0)[0]
            )
        return cls(
            control.deployment, generation, group.weights_version, group.epoch, group.placement
        )

    def plan(
        self,
        target: Placement,
        waves: tuple[Wave, ...],
        *,
        plan_id: PlanId | None = None,
        kind: PlanKind,
        policy: str,
        reason: Reason,
        created_at: float,
        expires_at: float | None,
        numbers: dict[str, float],
        stalls: SwapStalls,
        cost_source: CostSource | None = None,
    ) -> Plan:
        """Return a plan from this base to a target.

        Args:
            plan_id: None chooses a new id.
            created_at: Unix seconds.
            expires_at: Unix seconds; None if a proposal of this plan never expires.
            numbers: values that are not finite are left out. `expected_stall_s` is added to them,
                unless no swap was measured yet.
            stalls: the measured swaps.
            cost_source: of the cost model that scored the plan; None if none did.
        """
        stall_s = stalls.expected_s(waves, self.placement.slots_per_rank)
        expected = {} if stall_s is None else {"expected_stall_s": stall_s}
        return Plan(
            plan_id=plan_id or new_plan_id(kind, self.epoch),
            deployment=self.deployment,
            kind=kind,
            policy=policy,
            reason=reason,
            generation=self.generation,
            weights_version=self.weights_version,
            base_epoch=self.epoch,
            base=self.placement,
            target=target,
            waves=waves,
            created_at=created_at,
            expires_at=expires_at,
            allow_duplicates=target.first_duplicate() is not None,
            cost_source=cost_source,
            numbers=finite(numbers | expected),
        )


def build_evacuation(
    inputs: CycleInputs, retire: tuple[int, ...], to_ranks: int, whole_nodes: bool
) -> tuple[tuple[int, ...], Placement, tuple[Wave, ...]]:
    """Return the ranks that retire, and target and waves of their evacuation.

    Runs in another process.

    Args:
        inputs: the group; its window may be empty.
        retire: the ranks that retire; empty to choose them.
        to_ranks: ranks that stay, if `retire` is empty.
        whole_nodes: only all ranks of a node may retire.

    Raises:
        InfeasiblePlan: too little room stays, or no order of waves fits.
        ShapeMismatch: the ranks are not whole nodes.
    """
    base, shape, topology = inputs.current, inputs.shape, inputs.topology
    leaving = shape.num_ranks - to_ranks
    retired = choose_retired(holders(base), topology, leaving, retire, whole_nodes=whole_nodes)
    target = evacuate(base, shape, retired)
    return retired, target, schedule_waves(base, target, shape, topology, inputs.staging_bytes)


def new_plan_id(kind: PlanKind, epoch: int) -> PlanId:
    """Return an unused id that names the kind and the epoch of the plan."""
    return PlanId(f"{kind}-{epoch}-{uuid.uuid4().hex[:12]}")


def merge_phases(
    windows: Iterable[LoadWindow], shape: ModelShape, num_steps: int
) -> tuple[NDArray[np.uint32], NDArray[np.float64] | None]:
    """Merge the newest steps of all phases in step order, which weights phases by their tokens.

    Returns:
        (T, L, E) uint32 counts, T at most `num_steps`, and (R, L, E) source-side sums if known.
    """
    chosen = [window for window in windows if len(window)]
    if not chosen:
        return np.zeros((0, shape.num_layers, shape.num_logical_experts), np.uint32), None
    sums = [window.source for window in chosen if window.source is not None]
    source = np.asarray(np.sum(sums, axis=0), np.float64) if sums else None
    if len(chosen) == 1:
        return chosen[0].last(num_steps).counts, source
    parts = [window.last(num_steps) for window in chosen]
    order = np.argsort(np.concatenate([part.steps for part in parts]), kind="stable")[-num_steps:]
    counts = np.empty((len(order), *parts[0].counts.shape[1:]), np.uint32)
    first = 0
    for part in parts:  # Joining all phases first would copy several times what is kept.
        of_part = (order >= first) & (order < first + len(part))
        counts[of_part] = part.counts[order[of_part] - first]
        first += len(part)
    return counts, source


def price(
    cost: CostModel,
    seconds_per_token: NDArray[np.float64],
    bytes_per_expert: int,
    settings: CycleSettings,
) -> float:
    """Return the price of a copy in the unit of the cost model.

    In tokens, a copy costs as many as the mean rank computes in the time of the copy, if the ranks'
    (R,) seconds per token are known.
    """
    copy_s = bytes_per_expert / settings.copy_bytes_per_s
    if cost.in_seconds:
        return copy_s
    if len(seconds_per_token) > 0 and bool(np.isfinite(seconds_per_token).all()):
        return copy_s / float(seconds_per_token.mean())
    return settings.copy_cost_tokens


_RAN = frozenset({PlanPhase.COMMITTED, PlanPhase.ABORTED, PlanPhase.CANCELLED})


def plan_history(records: Iterable[PlanRecord]) -> tuple[int, float | None]:
    """Return what earlier plans tell the gates.

    Returns:
        The number of automatic plans that were refused, rejected or failed since a commit of any
        plan; and the Unix seconds at which the newest plan ended that ran or is one of those,
        None if there is none.
    """
    failed, ended_at, committed = 0, None, False
    for record in sorted(records, key=lambda record: record.updated_at, reverse=True):
        committed |= record.phase is PlanPhase.COMMITTED
        counts = not committed and is_failure(record)
        failed += counts
        if ended_at is None and (counts or record.phase in _RAN):
            ended_at = record.updated_at
    return failed, ended_at


def steps_since_move(windows: Iterable[LoadWindow], epoch: Epoch, num_steps: int) -> int:
    """Count the steps of all phases that ran under an epoch or a later one, at most `num_steps`."""
    return min(num_steps, sum(int((window.epochs >= epoch).sum()) for window in windows))


def finite(numbers: dict[str, float]) -> dict[str, float]:
    """Return the finite numbers: only those can be compared and stored as JSON."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
