"""Works out the gauges that a deployment's status does not hold.

These are the replicas on live ranks, the worst layers, and the effect of the last plan.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.adapters.prometheus.metric_families import Series
from evenkeel_moe.controller.cycles.planner import DeploymentPlanner
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.cost import TOKENS, CostModel, CostSource
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import EpRank, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanPhase, PlanRecord
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.telemetry.step_kernels import sum_counts
from evenkeel_moe.telemetry.windows import new_steps, steps_at_once


@dataclass(frozen=True, slots=True)
class GaugeLimits:
    """Limits on the number of layers with series of their own."""

    worst_layers: int
    """Layers, worst balancedness first, that have a series each."""
    layer_rank_series: int
    """Most series by layer and rank of a deployment, given to as many of the worst layers as fit
    whole. 0: none."""

    def layers_by_rank(self, num_ranks: int) -> int:
        """Return the number of layers that get a series for each rank."""
        return self.layer_rank_series // num_ranks


class RealisedGain:
    """The measured effect of the newest committed plan, updated step by step.

    The gain is saved MoE time as the cost model gives it, under the plan's target against its base,
    on the same counted steps. Each step is evaluated once. When the source or the unit of the model
    changes, the steps of the windows are counted again: times of two models cannot be added.
    """

    def __init__(self) -> None:
        self._plan: PlanId | None = None
        self._model: tuple[CostSource, str] | None = None
        self._seen: dict[Phase, int] = {}
        self._base_time = self._target_time = 0.0
        self._balance = self._balanced_steps = 0.0

    def update(
        self,
        record: PlanRecord,
        windows: Mapping[Phase, Sequence[LoadWindow]],
        split: SplitModel,
        cost: CostModel = TOKENS,
    ) -> None:
        """Add the new steps that ran under the plan's last epoch, the oldest first.

        Args:
            record: of the plan.
            windows: of the experts of the plan, each in parts, oldest first. Of a large shape, some
                steps wait for later calls.
            split: how tokens split over replicas now.
            cost: the cost model that plans are scored by now.
        """
        plan = record.plan
        model = (cost.source, cost.unit)
        if (plan.plan_id, model) != (self._plan, self._model):
            self._plan, self._model, self._seen = plan.plan_id, model, {}
            self._base_time = self._target_time = self._balance = self._balanced_steps = 0.0
        final = plan.base_epoch + len(plan.waves)
        most = steps_at_once(plan.target.num_layers, plan.target.num_slots)
        new = (part for _, parts in new_steps(windows, self._seen, most) for part in parts)
        for part in new:
            counts = part.counts[part.epochs == final]
            if not len(counts):
                continue
            self._target_time += moe_time.predicted_time(counts, plan.target, cost, split)
            self._base_time += moe_time.predicted_time(counts, plan.base, cost, split)
            balance = metrics.balancedness(metrics.rank_load(counts, plan.target, split))
            known = ~np.isnan(balance)
            self._balance += float(balance[known].sum())
            self._balanced_steps += int(known.sum())

    @property
    def gain(self) -> float | None:
        """1 - time under the target / time under the base; None before the first step."""
        return 1.0 - self._target_time / self._base_time if self._base_time > 0 else None

    @property
    def balancedness(self) -> float | None:
        """Mean over steps and layers under the target; None before the first step."""
        return self._balance / self._balanced_steps if self._balanced_steps else None


@lru_cache(maxsize=64)
def live_replicas(placement: Placement, live: tuple[bool, ...]) -> tuple[tuple[int, int, int], int]:
    """Count how well live ranks cover the experts; this takes milliseconds.

    Args:
        placement: (L, S) slots on R ranks.
        live: for each rank, True if it is heard.

    Returns:
        The (layer, expert) pairs with a copy on no, one, and more live ranks; and, of the pairs
        with one, those that the placement has on several ranks.
    """
    layers, _, ranks, experts = placement.sizes
    held = np.sort(placement.phy2log.reshape(layers, ranks, -1), axis=2)
    # Two replicas on one rank count as one.
    counts = held >= 0
    counts[:, :, 1:] &= held[:, :, 1:] != held[:, :, :-1]
    layer, rank, _ = np.nonzero(counts)
    pair = layer * experts + held[counts]
    placed = np.bincount(pair, minlength=layers * experts)
    alive = np.bincount(pair[np.array(live)[rank]], minlength=layers * experts)
    none, one, more = np.bincount(np.minimum(alive, 2), minlength=3).tolist()
    return (none, one, more), int(((alive == 1) & (placed > 1)).sum())


def _measured(records: Iterable[PlanRecord]) -> list[tuple[DeliveredGain, Plan]]:
    """Return the plans whose gain was measured, newest measurement first."""
    found = [
        (record.delivered, record.plan)
        for record in records
        if record.delivered is not None and record.delivered.gain is not None
    ]
    return sorted(found, key=lambda one: one[0].at, reverse=True)


def measured_gauges(records: Iterable[PlanRecord]) -> Iterator[Series]:
    """Yield promise and delivery of the newest measured plan, if any was measured."""
    for delivered, plan in _measured(records)[:1]:
        yield "evenkeel_plan_promised_gain_ratio", (), plan.numbers.get("gain")
        interval = {"estimate": delivered.gain, "lower": delivered.lower, "upper": delivered.upper}
        for bound, gain in interval.items():
            yield "evenkeel_plan_delivered_gain_ratio", (bound,), gain


def losses_in_a_row(records: Iterable[PlanRecord]) -> int | None:
    """Count plans that cost time, newest first, back to one that saved some.

    None if no plan was measured.
    A rollback or an evacuation may cost time as intended. A plan whose interval reaches above 0 is
    no evidence.
    """
    measured, lost = _measured(records), 0
    for delivered, plan in measured:
        assert delivered.gain is not None and delivered.upper is not None
        if not plan.kind.seeks_gain:
            continue
        if delivered.gain >= 0:
            break
        lost += delivered.upper < 0
    return lost if measured else None


@dataclass(eq=False, repr=False)
class GaugeReader:
    """Reads the gauges of one deployment that its status does not hold."""

    planner: DeploymentPlanner
    limits: GaugeLimits
    _realised: RealisedGain = field(default_factory=RealisedGain, init=False)

    def __post_init__(self) -> None:
        self.control, self.loads = self.planner.control, self.planner.loads

    def read(self) -> Iterator[Series]:
        """Yield the present values; the balance of the loads must be up to date."""
        failed = self.control.records.newest(PlanPhase.ABORTED)
        if failed is not None:
            name = "evenkeel_last_plan_failed_timestamp_seconds"
            yield name, (failed.reason,), failed.updated_at
        placement, membership = self.control.placement, self.control.membership
        if placement is None:
            return
        now = self.planner.shared.clock.monotonic()
        live = tuple(membership.fresh(EpRank(rank), now) for rank in range(placement.num_ranks))
        redundant = (placement.phy2log >= 0).sum(axis=1) - placement.num_logical_experts
        if any(live):
            counts, down = live_replicas(placement, live)
            for label, count in zip(("none", "one", "more"), counts, strict=True):
                yield "evenkeel_experts", (label,), count
            yield "evenkeel_experts_down_to_one_replica", (), down
            yield from self._layers(placement, redundant)
        for label, value in zip(
            ("min", "mean", "max"),
            (redundant.min(), redundant.mean(), redundant.max()),
            strict=True,
        ):
            yield "evenkeel_redundant_replicas_per_layer", (label,), float(value)
        yield "evenkeel_group_steps", (), membership.step() or None
        yield from self._last_plan()
        yield from measured_gauges(self.control.records.by_id.values())
        yield "evenkeel_gain_calibration_ratio", (), self.planner.builder.calibration.factor
        yield from self._waiting()

    def _layers(self, placement: Placement, redundant: NDArray[np.int64]) -> Iterator[Series]:
        by_layer = self.loads.balance.by_layer()
        if by_layer is None:
            return
        by_rank = self.limits.layers_by_rank(placement.num_ranks)
        # NaN sorts last: a layer without tokens is not the worst.
        worst = np.argsort(by_layer, kind="stable")[: max(self.limits.worst_layers, by_rank)]
        loads = self._layer_loads(placement) if by_rank else None
        for position, layer in enumerate(worst.tolist()):
            known = float(by_layer[layer]) if math.isfinite(by_layer[layer]) else None
            yield "evenkeel_layer_balancedness_ratio", (layer,), known
            yield "evenkeel_layer_redundant_replicas", (layer,), int(redundant[layer])
            if loads is not None and position < by_rank and loads[layer].sum() > 0:
                for rank, ratio in enumerate(loads[layer] / loads[layer].mean()):
                    yield "evenkeel_layer_rank_load_ratio", (layer, rank), float(ratio)

    def _layer_loads(self, placement: Placement) -> NDArray[np.float64] | None:
        """Return the (L, R) [tokens] of all windows; None without load."""
        sums = [
            sum_counts(part.counts)[1]
            for parts in self.loads.windows_of(placement).values()
            for part in parts
        ]
        if not sums:
            return None
        load = np.sum(sums, axis=0).astype(np.float64)
        by_rank = metrics.rank_load(load[None], placement, self.loads.split())[0]
        return np.asarray(by_rank, np.float64)

    def _last_plan(self) -> Iterator[Series]:
        record = self.control.records.newest(PlanPhase.COMMITTED)
        if record is None:
            return
        yield "evenkeel_last_plan_committed_timestamp_seconds", (), record.updated_at
        try:
            cost = self.planner.builder.cost or TOKENS
            windows = self.loads.windows_of(record.plan.target)
            self._realised.update(record, windows, self.loads.split(), cost)
        except EvenkeelError:
            return  # The plan is of a group of another shape: its effect cannot be measured here.
        numbers, gain = record.plan.numbers, "evenkeel_last_plan_gain_ratio"
        yield gain, ("predicted",), numbers.get("gain")
        yield gain, ("realised",), self._realised.gain
        balancedness = "evenkeel_last_plan_balancedness_ratio"
        yield balancedness, ("predicted",), numbers.get("balancedness_expected")
        yield balancedness, ("realised",), self._realised.balancedness

    def _waiting(self) -> Iterator[Series]:
        """Yield when the oldest plan that waits for approval was made, and the next one expires."""
        plans = [record.plan for record in self.control.records.proposals]
        for oldest in plans[:1]:
            yield "evenkeel_proposal_created_timestamp_seconds", (), oldest.created_at
        ends = [plan.expires_at for plan in plans if plan.expires_at is not None]
        yield "evenkeel_proposal_expires_timestamp_seconds", (), min(ends, default=None)
