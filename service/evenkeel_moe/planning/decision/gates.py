"""Whether to plan, and whether to act on a plan: pure decisions, each with a Reason and its numbers.

The gates run in the order written here and the first that closes decides. Nothing is looked up and nothing is
remembered: the caller passes what it knows, and keeps `Decision.memory` for the next cycle. Unknown is NaN
or None and closes a gate that needs it; it is never taken for zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from evenkeel_moe.errors import EvenkeelError, InvalidInput, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.verdict import Call, Verdict
from evenkeel_moe.planning.schedule.relabel import moves_by_layer

__all__ = [
    "AfterInputs",
    "BeforeInputs",
    "Decision",
    "GateMemory",
    "GateSettings",
    "decide_after",
    "decide_before",
]


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Thresholds of the gates. All are plain numbers, so that operators can set them by name."""

    cooldown_s: float = 120.0
    """Seconds after the end of a plan before the next; too short plans on loads seen under half-moved maps."""
    retry_s: float = 30.0
    """Seconds to wait after a plan that was refused or failed, if that is more than `cooldown_s`. Doubles with
    every further failure: a fleet that cannot carry plans out must not be asked every cycle."""
    max_retry_s: float = 1800.0
    """What that wait grows to at most; under `cooldown_s` it does not count."""
    min_window_steps: float = 64
    """Complete steps needed to plan; fewer judge a placement by noise."""
    max_data_age_s: float = 30.0
    """Age of the newest complete step beyond which the window says nothing about now."""
    plan_below: float = 0.90
    """Balancedness (mean over layers) under which windows count towards planning."""
    stop_above: float = 0.93
    """Balancedness at which planning stops again, >= plan_below; the gap keeps it from flapping."""
    consecutive_windows: float = 3
    """Cycles in a row under `plan_below` before planning starts; 1 reacts to a single odd window."""
    change_ratio: float = 6.0
    """How many times more than neighbouring blocks of the window the loads around a split must differ for the steps
    after it to count as other traffic (`change.ChangeRules.threshold`); lower takes noise for change."""
    min_gain: float = 0.002
    """Least predicted saving of MoE time on later data, as a fraction. The verdict already counts the copies; this is
    what is not worth the trouble. Set too high, small savings that would add up are all left lying."""
    min_held_out_steps: float = 16
    """Later steps a plan must have been scored on."""
    max_payback_steps: float = 20_000
    """Steps after which the saving must have paid for the copies."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"{setting.name} is {value}, must be finite and not negative")
        if not self.plan_below <= self.stop_above <= 1.0:
            raise InvalidInput(
                f"plan_below {self.plan_below} <= stop_above {self.stop_above} <= 1 does not hold"
            )

    @classmethod
    def from_thresholds(cls, thresholds: Mapping[str, float]) -> "GateSettings":
        """Settings by name, defaults for the rest.

        Raises:
            InvalidInput: an unknown name or a value out of range.
        """
        known = {setting.name for setting in fields(cls)}
        unknown = sorted(set(thresholds) - known)
        if unknown:
            raise InvalidInput(
                f"unknown gate settings {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**{name: float(value) for name, value in thresholds.items()})


@dataclass(frozen=True, slots=True)
class GateMemory:
    """What one cycle tells the next."""

    windows_below: int = 0
    """Cycles in a row with balancedness under `plan_below`."""
    planning: bool = False
    """Whether planning was switched on and balance has not yet risen to `stop_above`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer. `passed` False: the cycle ends here, for `reason`."""

    passed: bool
    reason: Reason
    numbers: dict[str, float] = field(default_factory=dict)
    """What the gate compared, also when it passed."""
    memory: GateMemory = GateMemory()
    """To be handed to the next cycle; only `decide_before` changes it."""


@dataclass(frozen=True, slots=True)
class BeforeInputs:
    """What the control loop knows before it plans."""

    now_unix: float
    mode: Mode
    ranks_expected: int
    ranks_fresh: int
    """Ranks whose lease holds; a dead rank makes the load unknown, not smaller."""
    window_steps: int
    newest_step_age_s: float
    """NaN when no step was ever complete."""
    balancedness_mean: float
    """Of the present placement on the window; NaN without load."""
    change_strength: float = math.nan
    """`change.Change.strength` of the window; NaN when it is too short to say."""
    changed_steps: int = 0
    """Newest steps since traffic changed; 0 when it did not, or when a plan has already answered the change."""
    enough_changed_steps: int = 0
    """Steps after a change that can be planned on."""
    balancedness_changed: float = math.nan
    """Of the present placement on the steps since the change; NaN where there are none."""
    manual: bool = False
    """An operator asks: cooldown, hold and balance do not matter, data and safety do."""
    plan_in_progress: bool = False
    frozen_until_unix: float = 0.0
    held: bool = False
    """Automatic plans wait for `resume` after a rollback."""
    last_plan_ended_unix: float | None = None
    """None when there was none."""
    failed_plans: int = 0
    """Automatic plans in a row, up to the last one, that were refused or failed."""
    memory: GateMemory = GateMemory()


def decide_before(inputs: BeforeInputs, settings: GateSettings) -> Decision:
    """Whether a cycle may plan.

    Returns:
        Passed with why to plan: MANUAL_REQUEST, LOAD_CHANGED or BALANCE_BELOW_THRESHOLD. Closed with one of
        PLAN_IN_PROGRESS, FROZEN, HELD_AFTER_ROLLBACK, COOLDOWN, RANKS_MISSING, INSUFFICIENT_DATA, STALE_DATA,
        WAITING_CONSECUTIVE_WINDOWS, BALANCE_ABOVE_THRESHOLD.
    """
    closed = _why_not_now(inputs, settings) or _why_no_data(inputs, settings)
    if closed is not None:
        return closed
    if inputs.manual:
        return Decision(
            True,
            Reason.MANUAL_REQUEST,
            {"balancedness_mean": inputs.balancedness_mean},
            inputs.memory,
        )
    return _decide_on_balance(inputs, settings)


def _why_not_now(inputs: BeforeInputs, settings: GateSettings) -> Decision | None:
    """The gates of time and permission."""
    if inputs.plan_in_progress:
        return Decision(False, Reason.PLAN_IN_PROGRESS, {}, inputs.memory)
    frozen_s = inputs.frozen_until_unix - inputs.now_unix
    if frozen_s > 0:
        return Decision(False, Reason.FROZEN, {"frozen_s": frozen_s}, inputs.memory)
    if inputs.manual:
        return None
    if inputs.held and inputs.mode is Mode.AUTO:
        return Decision(False, Reason.HELD_AFTER_ROLLBACK, {}, inputs.memory)
    if inputs.last_plan_ended_unix is not None:
        since_s = inputs.now_unix - inputs.last_plan_ended_unix
        wait_s = _wait_s(inputs.failed_plans, settings)
        if since_s < wait_s:
            numbers = {"since_plan_s": since_s, "cooldown_s": wait_s}
            if inputs.failed_plans:
                numbers["failed_plans"] = float(inputs.failed_plans)
            return Decision(False, Reason.COOLDOWN, numbers, inputs.memory)
    return None


def _wait_s(failed_plans: int, settings: GateSettings) -> float:
    """Seconds from the end of the last plan to the next: the cooldown, doubled for each failure in a row."""
    if failed_plans == 0:
        return settings.cooldown_s
    grown = max(settings.cooldown_s, settings.retry_s) * 2.0 ** min(failed_plans - 1, 60)
    return max(settings.cooldown_s, min(grown, settings.max_retry_s))


def _why_no_data(inputs: BeforeInputs, settings: GateSettings) -> Decision | None:
    """The gates of data. A gap in the data breaks a run of consecutive windows: they were not seen."""
    memory = replace(inputs.memory, windows_below=0)
    if inputs.ranks_fresh < inputs.ranks_expected:
        numbers = {
            "ranks_fresh": float(inputs.ranks_fresh),
            "ranks_expected": float(inputs.ranks_expected),
        }
        return Decision(False, Reason.RANKS_MISSING, numbers, memory)
    numbers = {
        "window_steps": float(inputs.window_steps),
        "min_window_steps": settings.min_window_steps,
    }
    if inputs.window_steps < settings.min_window_steps or math.isnan(inputs.balancedness_mean):
        return Decision(False, Reason.INSUFFICIENT_DATA, numbers, memory)
    if not inputs.newest_step_age_s <= settings.max_data_age_s:
        numbers = {
            "newest_step_age_s": inputs.newest_step_age_s,
            "max_data_age_s": settings.max_data_age_s,
        }
        return Decision(False, Reason.STALE_DATA, numbers, memory)
    return None


def _decide_on_balance(inputs: BeforeInputs, settings: GateSettings) -> Decision:
    """Change, threshold with hysteresis, and consecutive windows."""
    numbers = {"balancedness_mean": inputs.balancedness_mean}
    below = inputs.balancedness_mean < settings.plan_below
    windows_below = inputs.memory.windows_below + 1 if below else 0
    planning = windows_below >= settings.consecutive_windows or (
        inputs.memory.planning and inputs.balancedness_mean < settings.stop_above
    )
    memory = GateMemory(windows_below, planning)
    if inputs.changed_steps > 0 and inputs.balancedness_changed < settings.stop_above:
        numbers |= {
            "change_strength": inputs.change_strength,
            "change_ratio": settings.change_ratio,
            "changed_steps": float(inputs.changed_steps),
            "balancedness_changed": inputs.balancedness_changed,
        }
        if inputs.changed_steps < inputs.enough_changed_steps:
            # A plan on what was before, or on a handful of steps, would only be in the way of the right one.
            numbers["enough_changed_steps"] = float(inputs.enough_changed_steps)
            return Decision(False, Reason.INSUFFICIENT_DATA, numbers, memory)
        return Decision(True, Reason.LOAD_CHANGED, numbers, memory)
    if planning:
        numbers |= {"plan_below": settings.plan_below, "stop_above": settings.stop_above}
        return Decision(True, Reason.BALANCE_BELOW_THRESHOLD, numbers, memory)
    if below:
        numbers |= {
            "windows_below": float(windows_below),
            "consecutive_windows": settings.consecutive_windows,
        }
        return Decision(False, Reason.WAITING_CONSECUTIVE_WINDOWS, numbers, memory)
    return Decision(
        False, Reason.BALANCE_ABOVE_THRESHOLD, numbers | {"plan_below": settings.plan_below}, memory
    )


@dataclass(frozen=True, eq=False, slots=True)
class AfterInputs:
    """What is known once a policy has answered and the target is relabelled."""

    mode: Mode
    shape: ModelShape
    base: Placement
    target: Placement
    verdict: Verdict | None
    """What the later steps say; None when there were none to score on."""
    limits: PlanLimits = PlanLimits()
    allow_duplicates: bool = False
    manual: bool = False
    """An operator asks: gain and payback are reported, not required."""


def decide_after(inputs: AfterInputs, settings: GateSettings) -> Decision:
    """Whether a plan may go on to where the mode sends it.

    Returns:
        Passed with PLAN_STARTED (auto) or PLAN_PROPOSED (propose, and manual requests in observe mode).
        Closed with the invariant or limit it breaks, NO_CHANGE, INSUFFICIENT_DATA, GAIN_TOO_SMALL,
        GAIN_UNCERTAIN, PAYBACK_TOO_LONG; with OBSERVE_MODE when all gates are open but nothing may move.
    """
    moves = moves_by_layer(inputs.base, inputs.target)
    copies = float(moves.sum())
    numbers = {"copies": copies, "bytes": copies * inputs.shape.bytes_per_expert}
    try:
        inputs.target.check(inputs.shape, allow_duplicates=inputs.allow_duplicates)
    except EvenkeelError as broken:
        return Decision(False, broken.reason, numbers)
    changed = int((inputs.base.phy2log != inputs.target.phy2log).any(axis=1).sum())
    numbers["layers"] = float(changed)
    if changed == 0:
        return Decision(False, Reason.NO_CHANGE, numbers)
    for name, bound in (
        ("copies", inputs.limits.max_moves),
        ("bytes", inputs.limits.max_bytes),
        ("layers", inputs.limits.max_layers),
    ):
        if bound is not None and numbers[name] > bound:
            return Decision(False, Reason.LIMIT_EXCEEDED, numbers | {f"max_{name}": float(bound)})
    reason = _why_not_worth_it(inputs, settings, numbers)
    if reason is not None and not inputs.manual:
        return Decision(False, reason, numbers)
    if inputs.mode is Mode.OBSERVE and not inputs.manual:
        return Decision(False, Reason.OBSERVE_MODE, numbers)
    return Decision(
        True, Reason.PLAN_STARTED if inputs.mode is Mode.AUTO else Reason.PLAN_PROPOSED, numbers
    )


def _why_not_worth_it(
    inputs: AfterInputs, settings: GateSettings, numbers: dict[str, float]
) -> Reason | None:
    """The gates of gain and payback. Mutates `numbers`: adds what it compared."""
    verdict = inputs.verdict
    if verdict is None or verdict.steps < settings.min_held_out_steps or math.isnan(verdict.gain):
        numbers |= {"held_out_steps": float(verdict.steps if verdict else 0)}
        return Reason.INSUFFICIENT_DATA
    numbers |= verdict.numbers() | {"min_gain": settings.min_gain}
    if verdict.gain < settings.min_gain:
        return Reason.GAIN_TOO_SMALL
    if not verdict.gain_lower > 0:
        return Reason.GAIN_UNCERTAIN
    numbers["max_payback_steps"] = settings.max_payback_steps
    if not verdict.payback_steps <= settings.max_payback_steps or verdict.call is Call.NOT_NOW:
        return Reason.PAYBACK_TOO_LONG
    return None if verdict.call is Call.RECOMMEND else Reason.GAIN_UNCERTAIN
