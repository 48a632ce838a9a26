"""Whether to plan, and whether to act on a plan: pure decisions, each with a Reason and its numbers.

The gates run in the order written here and the first that closes decides. Nothing is looked up and nothing is
remembered: the caller passes what it knows, and keeps `Decision.memory` for the next cycle. Unknown is NaN
or None and closes a gate that needs it; it is never taken for zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.errors import EvenkeelError, InvalidInput, Reason
from evenkeel.model.placement import Placement
from evenkeel.model.plan import PlanLimits
from evenkeel.model.policy import Mode
from evenkeel.model.topology import ModelShape
from evenkeel.planning.relabel import moves_by_layer

__all__ = [
    "AfterInputs",
    "BeforeInputs",
    "Decision",
    "GateMemory",
    "GateSettings",
    "HeldOut",
    "decide_after",
    "decide_before",
    "load_change",
]


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Thresholds of the gates. All are plain numbers, so that operators can set them by name."""

    cooldown_s: float = 120.0
    """Seconds after the end of a plan before the next; too short plans on loads seen under half-moved maps."""
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
    change_ratio: float = 1.5
    """`load_change` from which the newest steps count as other traffic than the window."""
    min_gain: float = 0.01
    """Least predicted saving of MoE time on later data, as a fraction."""
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
    balancedness_recent: float = math.nan
    """The same on the newest steps alone."""
    change: float = math.nan
    """`load_change` of the window; NaN when it is too short to say."""
    manual: bool = False
    """An operator asks: cooldown, hold and balance do not matter, data and safety do."""
    plan_in_progress: bool = False
    frozen_until_unix: float = 0.0
    held: bool = False
    """Automatic plans wait for `resume` after a rollback."""
    last_plan_ended_unix: float | None = None
    """None when there was none."""
    memory: GateMemory = GateMemory()


def decide_before(inputs: BeforeInputs, settings: GateSettings) -> Decision:
    """Whether a cycle may plan.

    Returns:
        Passed with why to plan: MANUAL_REQUEST, LOAD_CHANGED (plan on the newest steps) or
        BALANCE_BELOW_THRESHOLD. Closed with one of PLAN_IN_PROGRESS, FROZEN, HELD_AFTER_ROLLBACK, COOLDOWN,
        RANKS_MISSING, INSUFFICIENT_DATA, STALE_DATA, WAITING_CONSECUTIVE_WINDOWS, BALANCE_ABOVE_THRESHOLD.
    """
    closed = _why_not_now(inputs, settings) or _why_no_data(inputs, settings)
    if closed is not None:
        return closed
    if inputs.manual:
        return Decision(
            True, Reason.MANUAL_REQUEST, {"balancedness_mean": inputs.balancedness_mean}, inputs.memory
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
        if since_s < settings.cooldown_s:
            numbers = {"since_plan_s": since_s, "cooldown_s": settings.cooldown_s}
            return Decision(False, Reason.COOLDOWN, numbers, inputs.memory)
    return None


def _why_no_data(inputs: BeforeInputs, settings: GateSettings) -> Decision | None:
    """The gates of data. A gap in the data breaks a run of consecutive windows: they were not seen."""
    memory = replace(inputs.memory, windows_below=0)
    if inputs.ranks_fresh < inputs.ranks_expected:
        numbers = {"ranks_fresh": float(inputs.ranks_fresh), "ranks_expected": float(inputs.ranks_expected)}
        return Decision(False, Reason.RANKS_MISSING, numbers, memory)
    numbers = {"window_steps": float(inputs.window_steps), "min_window_steps": settings.min_window_steps}
    if inputs.window_steps < settings.min_window_steps or math.isnan(inputs.balancedness_mean):
        return Decision(False, Reason.INSUFFICIENT_DATA, numbers, memory)
    if not inputs.newest_step_age_s <= settings.max_data_age_s:
        numbers = {"newest_step_age_s": inputs.newest_step_age_s, "max_data_age_s": settings.max_data_age_s}
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
    if inputs.change >= settings.change_ratio and inputs.balancedness_recent < settings.stop_above:
        numbers |= {
            "change": inputs.change,
            "change_ratio": settings.change_ratio,
            "balancedness_recent": inputs.balancedness_recent,
        }
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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How a plan did on steps after those it was planned on."""

    gain: float
    """Mean saving of predicted MoE time, as a fraction of the present placement's."""
    gain_lower: float
    """Lower confidence bound of it."""
    steps: int


@dataclass(frozen=True, eq=False, slots=True)
class AfterInputs:
    """What is known once a policy has answered and the target is relabelled."""

    mode: Mode
    shape: ModelShape
    base: Placement
    target: Placement
    held_out: HeldOut | None
    """None when there was no later data to score on."""
    saved_per_step: float
    """Predicted saving in score units (seconds with cost curves, else tokens) per step, all layers."""
    move_cost: float
    """Price of all the plan's copies in the same unit."""
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
    return Decision(True, Reason.PLAN_STARTED if inputs.mode is Mode.AUTO else Reason.PLAN_PROPOSED, numbers)


def _why_not_worth_it(
    inputs: AfterInputs, settings: GateSettings, numbers: dict[str, float]
) -> Reason | None:
    """The gates of gain and payback. Mutates `numbers`: adds what it compared."""
    if inputs.saved_per_step > 0:
        numbers["payback_steps"] = inputs.move_cost / inputs.saved_per_step
    verdict = inputs.held_out
    if verdict is None or verdict.steps < settings.min_held_out_steps or math.isnan(verdict.gain):
        numbers |= {"held_out_steps": float(verdict.steps if verdict else 0)}
        return Reason.INSUFFICIENT_DATA
    numbers |= {
        "gain": verdict.gain,
        "gain_lower": verdict.gain_lower,
        "held_out_steps": float(verdict.steps),
        "min_gain": settings.min_gain,
    }
    if verdict.gain < settings.min_gain:
        return Reason.GAIN_TOO_SMALL
    if not verdict.gain_lower > 0:
        return Reason.GAIN_UNCERTAIN
    numbers["max_payback_steps"] = settings.max_payback_steps
    if not numbers.get("payback_steps", math.inf) <= settings.max_payback_steps:
        return Reason.PAYBACK_TOO_LONG
    return None


def load_change(load: NDArray[np.generic], recent_steps: int) -> float:
    """How much further the newest steps lie from the window than its own blocks lie from each other.

    The window is cut from its end into blocks of `recent_steps`. A block's distance is the total
    variation between its experts' shares of a layer and those of the other blocks but the newest,
    averaged over layers.

    Args:
        load: (T, L, E) [tokens], oldest first.
        recent_steps: steps per block.

    Returns:
        Distance of the newest block / median distance of the older ones: about 1 when traffic is
        stationary. NaN with fewer than three older blocks, or without load.

    Raises:
        InvalidInput: `recent_steps` below 1.
    """
    if recent_steps < 1:
        raise InvalidInput(f"recent_steps is {recent_steps}, must be at least 1")
    blocks = load.shape[0] // recent_steps
    if blocks < 4:
        return math.nan
    kept = np.asarray(load[load.shape[0] - blocks * recent_steps :], np.float64)
    counts = kept.reshape(blocks, recent_steps, *kept.shape[1:]).sum(axis=1)
    old = counts[:-1].sum(axis=0)
    others = np.concatenate([old - counts[:-1], old[None]])
    totals, other_totals = counts.sum(axis=2, keepdims=True), others.sum(axis=2, keepdims=True)
    known = (totals[:, :, 0] > 0) & (other_totals[:, :, 0] > 0)
    if not known[-1].any() or not known[:-1].any(axis=1).all():
        return math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = 0.5 * np.abs(counts / totals - others / other_totals).sum(axis=2)
    by_block = np.where(known, distance, 0.0).sum(axis=1) / known.sum(axis=1)
    usual = float(np.median(by_block[:-1]))
    if usual > 0:
        return float(by_block[-1] / usual)
    return math.inf if by_block[-1] > 0 else 1.0
