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
from evenkeel_moe.model.delivered import DeliveredGain, GainPair, ServingSpeed
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import MAX_STEP, LoadWindow, Phase
from evenkeel_moe.model.plan import Plan, PlanPhase, PlanRecord
from evenkeel_moe.planning.decision.calibration import Calibration, calibrate
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.telemetry.delivered_gain import (
    ENOUGH_STEPS,
    MOST_PAIRS,
    PhaseSteps,
    measure_gain,
    timed_steps,
)
from evenkeel_moe.telemetry.step_kernels import NO_STEP
from evenkeel_moe.telemetry.step_times import serving_speed
from evenkeel_moe.telemetry.windows import in_chunks, join_windows, newest_parts

_log = structlog.get_logger(__name__)
_MOST_STEPS = 8 * ENOUGH_STEPS
"""Steps of a phase after a plan that are waited for, where few have seconds, or a partner before
it: 64 are measured where one in eight is. A smaller window ends the wait when it is full."""
_AGAIN_AFTER = 64
"""New steps after which a plan is measured again that had too few steps alike, or that were too
unsteady."""
_REMEMBERED = 32
"""Plans whose beginning is kept."""
_BEFORE_UNKNOWN = "a restart or a change of leader has lost the steps before it"

Windows = Mapping[Phase, Sequence[LoadWindow]]


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The state of a deployment when the first wave of a plan went out."""

    newest: int
    """The newest complete step; NO_STEP if none was complete."""
    before: Mapping[Phase, LoadWindow]
    """See `steps_before`. Later steps push them out of the window."""
    speed: ServingSpeed | None


@dataclass(frozen=True, slots=True)
class StepsAfter:
    """The first steps under the target of a plan, up to the first wave of the next plan."""

    timed: Mapping[Phase, LoadWindow]
    """Those with seconds."""
    passed: int
    """With and without seconds, in the phase that has most."""

    @property
    def most_timed(self) -> int:
        """The number of steps with seconds, in the phase that has most."""
        return max(map(len, self.timed.values()), default=0)


def steps_before(windows: Windows, plan: Plan, began: int) -> dict[Phase, LoadWindow]:
    """Return the newest steps with seconds under the base of a plan.

    Args:
        windows: of the experts of the plan, each in parts, oldest first.
        plan: whose first wave goes out: copies may slow later steps.
        began: newest complete step.
    """
    found = {}
    for phase, parts in windows.items():
        old = [(part.epochs == plan.base_epoch) & (part.steps <= began) for part in parts]
        if earlier := newest_parts(_chosen_timed(parts, old), most=MOST_PAIRS):
            found[phase] = join_windows(earlier)
    return found


def steps_after(windows: Windows, plan: Plan, until: int | None) -> StepsAfter:
    """Return the steps after a plan.

    Args:
        windows: of the experts of the plan, each in parts, oldest first.
        plan: all its waves are committed.
        until: newest complete step when the first wave of the next plan went out; None if there is
            none.
    """
    final, last = plan.base_epoch + len(plan.waves), MAX_STEP if until is None else until
    timed, passed = {}, 0
    for phase, parts in windows.items():
        new = [(part.epochs == final) & (part.steps <= last) for part in parts]
        passed = max(passed, sum(int(mask.sum()) for mask in new))
        if later := next(in_chunks(_chosen_timed(parts, new), _MOST_STEPS), []):
            timed[phase] = join_windows(later)
    return StepsAfter(timed, passed)


def _chosen_timed(
    parts: Sequence[LoadWindow], masks: Sequence[NDArray[np.bool_]]
) -> list[LoadWindow]:
    """Return the steps of each part that its mask chooses, and that some rank measured."""
    found = []
    for part, mask in zip(parts, masks, strict=True):
        use = mask & np.isfinite(part.compute_s).any(axis=1)  # Engines may measure one in some.
        if use.any():
            found.append(part if use.all() else part.slice(use))
    return found


def measure_plan(
    before: Mapping[Phase, LoadWindow],
    after: Mapping[Phase, LoadWindow],
    plan: Plan,
    cost: CostModel,
    split: SplitModel,
    at: float,
) -> tuple[DeliveredGain, bool]:
    """Return what a plan delivered, or why that is unknown; and whether more steps add little.

    Args:
        before, after: steps with seconds.
        plan: the plan between them.
        cost: divides the seconds over the layers.
        split: of tokens over replicas.
        at: Unix seconds now.

    Returns:
        The gain without speeds.
    """
    try:
        phases = [
            PhaseSteps(
                timed_steps(before[phase], plan.base, cost, split),
                timed_steps(steps, plan.target, cost, split),
                timed_steps(steps, plan.base, cost, split),
            )
            for phase, steps in after.items()
            if phase in before
        ]
    except EvenkeelError as error:  # The cost model is of a group of another size.
        return DeliveredGain(at, unknown_because=str(error)), False
    if after and not phases:
        return DeliveredGain(at, unknown_because="no step before the plan has seconds"), False
    return measure_gain(phases, at, plan.numbers.get("gain"))


def calibration_of(records: Iterable[PlanRecord], source: CostSource) -> Calibration:
    """Return the calibration of the next verdict by the measured plans that had a verdict.

    Args:
        records: in any order.
        source: of the cost model of the verdict; plans scored by another one do not count.
    """
    found: list[tuple[float, GainPair]] = []
    for record in records:
        delivered, pair = record.delivered, record.gain_pair
        if delivered and pair and record.plan.cost_source is source:
            found.append((delivered.at, pair))
    found.sort(key=lambda one: one[0])
    return calibrate([pair for _, pair in found])


@dataclass(eq=False, repr=False)
class PlanGains:
    """The measurements of one deployment.

    What a plan delivered is unknown if it began before this replica led, or if the ranks have
    restarted since: the steps before its first wave are not known then.
    """

    control: DeploymentState
    loads: GroupLoads
    inbox: MachineInbox
    clock: Clock
    _began: dict[PlanId, _Beginning] = field(default_factory=dict, init=False)
    """Oldest plan first."""
    _tried: dict[PlanId, int] = field(default_factory=dict, init=False)
    """Steps after a plan with which it could not be measured yet."""
    _told: dict[PlanId, DeliveredGain] = field(default_factory=dict, init=False)
    """Results that the machine may not have taken yet: it waits while the store does not answer."""

    def forget(self) -> None:
        """Start again: step numbers begin again with another generation."""
        self._began.clear()
        self._tried.clear()
        self._told.clear()

    def plan_begins(self, plan_id: PlanId) -> None:
        """Note that the first wave of a plan goes out."""
        newest, record = self.loads.ingest.newest_step, self.control.records.by_id.get(plan_id)
        if record is not None and plan_id not in self._began:
            newest = NO_STEP if newest is None else newest
            speed = self._speed(record.plan.base_epoch, newest, newest=True)
            before = steps_before(self.loads.windows_of(record.plan.base), record.plan, newest)
            self._began[plan_id] = _Beginning(newest, before, speed)
        for old in list(self._began)[:-_REMEMBERED]:
            del self._began[old]
            self._tried.pop(old, None)

    async def measure(self, cost: CostModel) -> None:
        """Measure the plans for which enough steps are known.

        Args:
            cost: the cost model that plans are scored by now.
        """
        committed = [
            record
            for record in self.control.records.by_id.values()
            if record.phase is PlanPhase.COMMITTED and record.delivered is None
        ]
        waiting = {record.plan.plan_id for record in committed}
        self._told = {plan: found for plan, found in self._told.items() if plan in waiting}
        for record in committed:
            plan, split = record.plan, self.loads.split()
            if found_before := self._told.get(plan.plan_id):
                self.inbox.post(ctl.PlanMeasured(plan.plan_id, found_before))
                continue
            began = self._began.get(plan.plan_id)
            if began is None:
                at = self.clock.unix()
                self._tell(record, DeliveredGain(at, unknown_because=_BEFORE_UNKNOWN))
                continue
            until = self._next_began(plan.plan_id)
            steps = steps_after(self.loads.windows_of(plan.target), plan, until)
            over = until is not None or steps.passed >= self._most_steps()
            wanted = max(ENOUGH_STEPS, self._tried.get(plan.plan_id, 0) + _AGAIN_AFTER)
            if not over and steps.most_timed < wanted:
                continue
            self._tried[plan.plan_id] = steps.most_timed
            # In a thread: for a large model it takes a tenth of a second.
            at = self.clock.unix()
            found, enough = await asyncio.to_thread(
                measure_plan, began.before, steps.timed, plan, cost, split, at
            )
            if over or enough:
                final = plan.base_epoch + len(plan.waves)
                after = self._speed(final, MAX_STEP if until is None else until, newest=False)
                told = replace(found, before=began.speed, after=after)
                self._began[plan.plan_id] = replace(began, before={})
                self._tell(record, told)

    def _most_steps(self) -> int:
        """Return the steps after a plan that are waited for."""
        rings = self.loads.ingest.rings.values()
        return min(_MOST_STEPS, max((ring.capacity for ring in rings), default=_MOST_STEPS))

    def _speed(self, epoch: int, until: int, *, newest: bool) -> ServingSpeed | None:
        """Return how fast steps under a placement were served; see `serving_speed`."""
        ingest = self.loads.ingest
        parts = [part for phase in ingest.parts().values() for part in phase]
        return serving_speed(ingest.step_times, parts, epoch, until, _MOST_STEPS, newest=newest)

    def _next_began(self, plan_id: PlanId) -> int | None:
        """Return the newest step when the plan after a plan began; None if there is none."""
        ids = list(self._began)
        following = ids[ids.index(plan_id) + 1 :]
        return self._began[following[0]].newest if following else None

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
        self._told[record.plan.plan_id] = found
        self.inbox.post(ctl.PlanMeasured(record.plan.plan_id, found))
