"""Measures what each committed plan delivered, once enough steps have run under it."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.cost import CostModel, CostSource
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import MAX_STEP, LoadWindow, Phase
from evenkeel_moe.model.plan import Plan, PlanPhase, PlanRecord
from evenkeel_moe.planning.decision.calibration import Calibration, GainPair, calibrate
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.telemetry.delivered_gain import (
    ENOUGH_STEPS,
    PhaseSteps,
    measure_gain,
    timed_steps,
)
from evenkeel_moe.telemetry.windows import in_chunks, join_windows, newest_parts

_log = structlog.get_logger(__name__)
_MOST_STEPS = 4 * ENOUGH_STEPS
"""Steps of a phase after a plan that are waited for, where few have a partner before it."""
_AGAIN_AFTER = 16
"""New steps after which a plan is measured again that had too few steps alike."""
_REMEMBERED = 32
"""Plans whose beginning is kept."""

Windows = Mapping[Phase, Sequence[LoadWindow]]


@dataclass(frozen=True, slots=True)
class PlanSteps:
    """The steps of the windows that belong to a plan."""

    before: Mapping[Phase, LoadWindow]
    """The newest steps under its base before its first wave went out: copies may slow steps."""
    after: Mapping[Phase, LoadWindow]
    """The first steps under its target, up to the first wave of the next plan."""

    @property
    def most_after(self) -> int:
        """The number of steps after the plan in the phase that has most."""
        return max(map(len, self.after.values()), default=0)


def steps_around(windows: Windows, plan: Plan, began: int, until: int | None) -> PlanSteps:
    """Return the steps around a plan.

    Args:
        windows: each in parts, oldest first.
        plan: all its waves are committed.
        began: newest complete step when the first wave went out.
        until: the same of the next plan; None if there is none.
    """
    sizes = (plan.target.num_layers, plan.target.num_logical_experts)
    final, last = plan.base_epoch + len(plan.waves), MAX_STEP if until is None else until
    before: dict[Phase, LoadWindow] = {}
    after: dict[Phase, LoadWindow] = {}
    for phase, parts in windows.items():
        fitting = [part for part in parts if part.counts.shape[1:] == sizes]
        old = [(part.epochs == plan.base_epoch) & (part.steps <= began) for part in fitting]
        new = [(part.epochs == final) & (part.steps <= last) for part in fitting]
        earlier = newest_parts(_chosen(fitting, old), most=ENOUGH_STEPS)
        later = next(in_chunks(_chosen(fitting, new), _MOST_STEPS), [])
        if earlier and later:
            before[phase], after[phase] = join_windows(earlier), join_windows(later)
    return PlanSteps(before, after)


def _chosen(parts: Sequence[LoadWindow], masks: Sequence[NDArray[np.bool_]]) -> list[LoadWindow]:
    """Return the steps of each part that its mask chooses."""
    pairs = zip(parts, masks, strict=True)
    return [part if mask.all() else part.slice(mask) for part, mask in pairs if mask.any()]


def measure_plan(
    steps: PlanSteps, plan: Plan, cost: CostModel, split: SplitModel, at: float
) -> tuple[DeliveredGain, bool]:
    """Return what a plan delivered, or why that is unknown; and whether more steps add little.

    `cost_source` is left empty.
    """
    try:
        phases = [
            PhaseSteps(
                timed_steps(steps.before[phase], plan.base, cost, split),
                timed_steps(after, plan.target, cost, split),
                timed_steps(after, plan.base, cost, split),
            )
            for phase, after in steps.after.items()
        ]
    except EvenkeelError as error:  # The cost model is of a group of another size.
        return DeliveredGain(at, unknown_because=str(error)), False
    return measure_gain(phases, at)


def calibration_of(records: Iterable[PlanRecord], source: CostSource) -> Calibration:
    """Return the calibration of the next verdict by the measured plans that had a verdict.

    Args:
        records: in any order.
        source: of the cost model of the verdict; plans measured under another one do not count.
    """
    found: list[tuple[float, GainPair]] = []
    for record in records:
        delivered, numbers = record.delivered, record.plan.numbers
        modelled = numbers.get("gain_modelled", numbers.get("gain"))
        if delivered is None or delivered.gain is None or delivered.error is None:
            continue
        if modelled is not None and delivered.cost_source == source.value:
            found.append((delivered.at, GainPair(modelled, delivered.gain, delivered.error)))
    found.sort(key=lambda one: one[0])
    return calibrate([pair for _, pair in found])


@dataclass(eq=False, repr=False)
class PlanGains:
    """The measurements of one deployment.

    A plan that was committed before this replica led, or whose ranks have restarted since, is not
    measured: which steps ran before its first wave is not known then.
    """

    control: DeploymentState
    loads: GroupLoads
    inbox: MachineInbox
    clock: Clock
    _began: dict[PlanId, tuple[int, CostSource]] = field(default_factory=dict, init=False)
    """Newest complete step, and source of the cost model, when the first wave of a plan went out;
    oldest plan first."""
    _tried: dict[PlanId, int] = field(default_factory=dict, init=False)
    """Steps after a plan with which it could not be measured yet."""

    def forget(self) -> None:
        """Start again: step numbers begin again with another generation."""
        self._began.clear()
        self._tried.clear()

    def plan_begins(self, plan_id: PlanId, source: CostSource) -> None:
        """Note that the first wave of a plan goes out.

        Args:
            source: of the cost model of the newest cycle.
        """
        newest = self.loads.ingest.newest_step
        if newest is not None:
            self._began.setdefault(plan_id, (newest, source))
        for old in list(self._began)[:-_REMEMBERED]:
            del self._began[old]
            self._tried.pop(old, None)

    async def measure(self, cost: CostModel) -> None:
        """Measure the plans for which enough steps are known.

        Args:
            cost: the cost model that plans are scored by now.
        """
        for record, until in self._unmeasured():
            plan, split = record.plan, self.loads.split()
            began, source = self._began[plan.plan_id]
            steps = steps_around(self.loads.ingest.parts(), plan, began, until)
            over = until is not None or steps.most_after >= _MOST_STEPS
            wanted = max(ENOUGH_STEPS, self._tried.get(plan.plan_id, 0) + _AGAIN_AFTER)
            if not over and steps.most_after < wanted:
                continue
            self._tried[plan.plan_id] = steps.most_after
            # In a thread: for a large model it takes a tenth of a second.
            at = self.clock.unix()
            found, enough = await asyncio.to_thread(measure_plan, steps, plan, cost, split, at)
            if over or enough:
                self._tell(record, replace(found, cost_source=source.value))

    def _unmeasured(self) -> list[tuple[PlanRecord, int | None]]:
        """Return the plans to measure, each with the step at which the next plan began."""
        ids = list(self._began)
        nexts = dict(zip(ids, ids[1:], strict=False))
        found = []
        for plan_id in ids:
            record = self.control.records.by_id.get(plan_id)
            if record is None or record.phase is not PlanPhase.COMMITTED or record.delivered:
                continue
            following = nexts.get(plan_id)
            found.append((record, None if following is None else self._began[following][0]))
        return found

    def _tell(self, record: PlanRecord, found: DeliveredGain) -> None:
        _log.info(
            "plan_measured",
            deployment=self.control.deployment,
            plan_id=record.plan.plan_id,
            promised=record.plan.numbers.get("gain"),
            delivered=found.gain,
            error=found.error,
            steps=found.steps,
            unknown_because=found.unknown_because or None,
        )
        self.inbox.post(ctl.PlanMeasured(record.plan.plan_id, found))
