"""The gates before and after planning: may a cycle plan, and may its plan go ahead.

Each decision is pure and carries a Reason and its numbers. The gates run in the order written here,
and the first that closes decides. The caller passes all it knows and keeps `Decision.memory` for
the next cycle. An unknown value is NaN or None; it closes the gate that needs it and is never taken
for zero.

The thresholds of balance apply to one of two measures: to balancedness if the cost model is by
tokens, else to time balance. Balancedness is then only reported. It must not decide too, for two
reasons. A slow rank has to get fewer tokens, so balancedness stays low under the best placement.
And where reading weights dominates, tokens say nothing about time.

Noise of traffic lowers both measures about equally. If time balance is lower than balancedness by
more than `stop_above - plan_below`, noise is not the cause: planning starts below `stop_above`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.finding import Finding, doubts
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.verdict import Call, Verdict
from evenkeel_moe.planning.decision.window_balance import WindowBalance
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import moves_by_layer
from evenkeel_moe.planning.signals.load_findings import MOST_DEVIATION


@dataclass(frozen=True, slots=True)
class GateSettings:
    """The thresholds of the gates, set by name."""

    cooldown_s: float = 8.0
    """Seconds between the end of a plan and the next. A change of traffic that cost balance does
    not wait for it."""
    retry_s: float = 30.0
    """Seconds to wait after a plan that was refused, failed or rejected by an operator, if above
    `cooldown_s`. Doubles with every further one."""
    max_retry_s: float = 1800.0
    """Upper bound of that wait; has no effect below `cooldown_s`."""
    min_window_steps: float = 64
    """Complete steps needed to plan; with fewer, noise would decide."""
    max_data_age_s: float = 15.0
    """Age of the newest complete step beyond which no plan is made."""
    max_layer_deviation: float = MOST_DEVIATION
    """Share of its choices by which a layer may differ from the others in the newest steps. At 1 or
    more, layers may be idle."""
    max_idle_experts: float = 0
    """Share of the experts that may be idle in every layer, as where their number was rounded up.
    Too high, a rank whose counts are lost is not noticed."""
    plan_below: float = 0.90
    """Balance below which windows count towards planning: mean balancedness of the layers, or time
    balance where the cost model is not by tokens."""
    stop_above: float = 0.93
    """Balance at which planning stops again, >= plan_below; the distance prevents flapping."""
    consecutive_windows: float = 2
    """Cycles in a row below `plan_below` before planning starts; 1 reacts to a single odd
    window."""
    change_ratio: float = 6.0
    """A split of the window counts as a change if the loads around it differ this many times more
    than neighbouring blocks do; for one layer alone twice as much. Lower takes noise for change."""
    min_changed_steps: float = 4
    """Fewest complete steps since a change of traffic, at least 2. The gain of a plan on few steps
    must be more certain."""
    min_gain: float = 0.002
    """Least predicted saving of MoE time on later data, as a fraction. Too high, many small savings
    are lost."""
    min_held_out_steps: float = 16
    """Later steps on which a plan must have been scored."""
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
        """Return the settings given by name, with defaults for the rest.

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
    """State that one cycle hands to the next."""

    windows_below: int = 0
    """Cycles in a row with balance below `plan_below`."""
    planning: bool = False
    """True from the start of planning until balance has risen to `stop_above`."""
    change_steps: int | None = None
    """Steps since the newest change of traffic when the last plan was made; 0 if it knew of no
    change, None if there was no plan. After a plan on few steps the next one may come as soon as
    there are twice as many."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of the gates. If `passed` is False, the cycle ends here for `reason`."""

    passed: bool
    reason: Reason
    numbers: dict[str, float] = field(default_factory=dict)
    """The values that the gates compared, also if they passed; a cycle adds the balance of the
    window."""
    memory: GateMemory = GateMemory()
    """State for the next cycle; only `decide_before` changes it."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class GateInputs:
    """All that the gates look at, besides the balance of the window and the plan itself."""

    settings: GateSettings
    shape: ModelShape
    current: Placement
    """The present placement."""
    objective: Objective = Objective()
    """The gates after planning look at its limits, and the slots it allows."""
    now_unix: float
    mode: Mode
    ranks_fresh: int
    """Ranks with a valid lease; a dead rank makes the load unknown, not smaller."""
    newest_step_age_s: float
    """NaN if no step was ever complete."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with the counts of the newest steps."""
    memory: GateMemory = GateMemory()
    manual: bool = False
    """True if an operator asks: cooldown and balance do not matter; data and safety do. Gain and
    payback are reported, but not required."""
    closed_by: Reason | None = None
    """Why no plan may be made now, as the deployment's machine decided: another one runs, plans are
    frozen or held, ... The cycle then only measures the balance of the window."""
    last_plan_ended_unix: float | None = None
    """None if there was none."""
    failed_plans: int = 0
    """Automatic plans in a row, up to the newest, that were refused or failed."""
    steps_since_move: int | None = None
    """Newest steps of the window that ran under the present placement; a plan has already answered
    a change of traffic before them. None if unknown: any change then counts."""
    recent_steps: int = 32
    """Steps since a change of traffic that are enough for a final plan. A plan on fewer is refined
    when there are twice as many."""


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The balance of the present placement on a window, and the newest change of its traffic."""

    steps: int
    tokens: WindowBalance
    """Balancedness."""
    time: WindowBalance | None = None
    """Time balance. None if the cost model is by tokens: balancedness then decides."""
    change_strength: float = math.nan
    """`change_detection.Change.strength` of the window; NaN if the window is too short."""
    changed_steps: int = 0
    """Newest steps since traffic changed; 0 if it did not."""

    @property
    def deciding(self) -> WindowBalance:
        """The balance that the thresholds apply to."""
        return self.tokens if self.time is None else self.time


def change_is_open(inputs: GateInputs, window: MeasuredWindow) -> bool:
    """Return True if balance is low since a change of traffic and no plan answered that.

    A plan that knew nothing of the change, or only of an older one, is no answer. A plan on few
    steps is a first answer, so the old placement need not serve the new traffic for long.
    """
    steps = window.changed_steps
    if steps == 0 or not window.deciding.changed < inputs.settings.stop_above:
        return False
    moved, planned = inputs.steps_since_move, inputs.memory.change_steps
    if moved is None or steps <= moved or planned == 0:
        return True
    # The change that the last plan knew of is at least `planned + moved` steps old by now; half of
    # the first allows for another estimate of where it began.
    newer = planned is not None and steps < moved + planned / 2
    return newer or _may_refine(inputs, window)


def _may_refine(inputs: GateInputs, window: MeasuredWindow) -> bool:
    """Return True if the last plan was made on few steps, and now twice as many are known.

    The number of such plans stays small, as each needs twice the steps of the one before.
    """
    planned, steps = inputs.memory.change_steps, window.changed_steps
    return planned is not None and 0 < planned < inputs.recent_steps and 2 * planned <= steps


def change_is_urgent(inputs: GateInputs, window: MeasuredWindow) -> bool:
    """Return True if the answer to a change of traffic need not wait for the cooldown.

    The change must have cost the placement more of its balance than lies between `plan_below` and
    `stop_above`. A plan on few steps is refined without that.
    """
    lost = window.deciding.before - window.deciding.changed
    costly = lost > inputs.settings.stop_above - inputs.settings.plan_below
    return change_is_open(inputs, window) and (costly or _may_refine(inputs, window))


def decide_before(inputs: GateInputs, window: MeasuredWindow) -> Decision:
    """Decide whether a cycle may plan.

    Returns:
        Passed, with the cause to plan: MANUAL_REQUEST, LOAD_CHANGED or BALANCE_BELOW_THRESHOLD.
        Closed, with `closed_by` or one of COOLDOWN, RANKS_MISSING, IMPLAUSIBLE_COUNTS,
        INSUFFICIENT_DATA, STALE_DATA, WAITING_CONSECUTIVE_WINDOWS, BALANCE_ABOVE_THRESHOLD.
    """
    closed = _closed_by_time(inputs, window) or _closed_by_data(inputs, window)
    if closed is not None:
        return closed
    if inputs.manual:
        return Decision(True, Reason.MANUAL_REQUEST, {}, inputs.memory)
    return _decide_on_balance(inputs, window)


def _closed_by_time(inputs: GateInputs, window: MeasuredWindow) -> Decision | None:
    """Apply the gates of time and permission; None if all are open."""
    if inputs.closed_by is not None:
        return Decision(False, inputs.closed_by, {}, inputs.memory)
    if inputs.manual:
        return None
    urgent = inputs.failed_plans == 0 and change_is_urgent(inputs, window)
    if inputs.last_plan_ended_unix is not None and not urgent:
        since_s = inputs.now_unix - inputs.last_plan_ended_unix
        wait_s = _wait_s(inputs.failed_plans, inputs.settings)
        if since_s < wait_s:
            numbers = {"since_plan_s": since_s, "cooldown_s": wait_s}
            if inputs.failed_plans:
                numbers["failed_plans"] = float(inputs.failed_plans)
            return Decision(False, Reason.COOLDOWN, numbers, inputs.memory)
    return None


def _wait_s(failed_plans: int, settings: GateSettings) -> float:
    """Return the seconds between the end of the last plan and the next, longer after failures."""
    if failed_plans == 0:
        return settings.cooldown_s
    grown = max(settings.cooldown_s, settings.retry_s) * 2.0 ** min(failed_plans - 1, 60)
    return max(settings.cooldown_s, min(grown, settings.max_retry_s))


def _closed_by_data(inputs: GateInputs, window: MeasuredWindow) -> Decision | None:
    """Apply the gates of data; None if all are open.

    Missing data ends a run of consecutive windows, because the windows in between were not seen.
    """
    settings, memory = inputs.settings, replace(inputs.memory, windows_below=0)
    if inputs.ranks_fresh < inputs.shape.num_ranks:
        numbers = {
            "ranks_fresh": float(inputs.ranks_fresh),
            "ranks_expected": float(inputs.shape.num_ranks),
        }
        return Decision(False, Reason.RANKS_MISSING, numbers, memory)
    # Before the number of steps: if no step adds up, there are none.
    if wrong := doubts(inputs.findings):
        numbers = {
            "max_layer_deviation": settings.max_layer_deviation,
            "max_idle_experts": settings.max_idle_experts,
        }
        numbers |= {each.code: each.share for each in wrong if each.share is not None}
        return Decision(False, Reason.IMPLAUSIBLE_COUNTS, numbers, memory)
    numbers = {
        "window_steps": float(window.steps),
        "min_window_steps": settings.min_window_steps,
    }
    if window.steps < settings.min_window_steps or math.isnan(window.deciding.window):
        return Decision(False, Reason.INSUFFICIENT_DATA, numbers, memory)
    if not inputs.newest_step_age_s <= settings.max_data_age_s:
        numbers = {
            "newest_step_age_s": inputs.newest_step_age_s,
            "max_data_age_s": settings.max_data_age_s,
        }
        return Decision(False, Reason.STALE_DATA, numbers, memory)
    return None


def _decide_on_balance(inputs: GateInputs, window: MeasuredWindow) -> Decision:
    """Apply the gates of change, of the threshold with hysteresis, and of consecutive windows."""
    numbers: dict[str, float] = {}
    settings, starts_below = inputs.settings, _starts_below(window, inputs.settings)
    if starts_below > settings.plan_below:
        numbers["starts_below"] = starts_below
    below = window.deciding.window < starts_below
    windows_below = inputs.memory.windows_below + 1 if below else 0
    planning = (below and windows_below >= settings.consecutive_windows) or (
        inputs.memory.planning and window.deciding.window < settings.stop_above
    )
    memory = replace(inputs.memory, windows_below=windows_below, planning=planning)
    if change_is_open(inputs, window):
        numbers |= {
            "change_strength": window.change_strength,
            "change_ratio": settings.change_ratio,
            "changed_steps": float(window.changed_steps),
            "balancedness_changed": window.tokens.changed,
        }
        if window.time is not None:
            numbers["time_balance_changed"] = window.time.changed
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


def _starts_below(window: MeasuredWindow, settings: GateSettings) -> float:
    """Return the balance below which planning starts, `plan_below` or `stop_above`."""
    if window.time is None:
        return settings.plan_below
    apart = window.tokens.window - window.time.window
    by_time_alone = apart > settings.stop_above - settings.plan_below
    return settings.stop_above if by_time_alone else settings.plan_below


def decide_after(inputs: GateInputs, target: Placement, verdict: Verdict | None) -> Decision:
    """Decide whether a plan may be started or proposed, as the mode says.

    Args:
        inputs: of the cycle.
        target: the relabelled placement; it breaks no invariant.
        verdict: that of the later steps; None if there were none.

    Returns:
        Passed, with PLAN_STARTED (auto) or PLAN_PROPOSED (propose, and manual requests in observe
        mode). Closed, with LIMIT_EXCEEDED, NO_CHANGE, INSUFFICIENT_DATA, GAIN_TOO_SMALL,
        GAIN_UNCERTAIN or PAYBACK_TOO_LONG; with OBSERVE_MODE if all gates are open but nothing may
        move.
    """
    moves = moves_by_layer(inputs.current, target)
    objective, copies = inputs.objective, int(moves.sum())
    numbers = {"copies": float(copies)}
    if (nbytes := inputs.shape.bytes_of(copies)) is not None:
        numbers["bytes"] = float(nbytes)
    changed = int((inputs.current.phy2log != target.phy2log).any(axis=1).sum())
    numbers["layers"] = float(changed)
    if changed == 0:
        return Decision(False, Reason.NO_CHANGE, numbers)
    for name, bound in (
        ("copies", objective.limits.max_moves),
        ("bytes", objective.limits.max_bytes),
        ("layers", objective.limits.max_layers),
    ):
        if bound is not None and numbers.get(name, math.inf) > bound:
            return Decision(False, Reason.LIMIT_EXCEEDED, numbers | {f"max_{name}": float(bound)})
    reason = _closed_by_gain(verdict, inputs.settings, numbers)
    if reason is not None and not inputs.manual:
        return Decision(False, reason, numbers)
    if inputs.mode is Mode.OBSERVE and not inputs.manual:
        return Decision(False, Reason.OBSERVE_MODE, numbers)
    return Decision(
        True, Reason.PLAN_STARTED if inputs.mode is Mode.AUTO else Reason.PLAN_PROPOSED, numbers
    )


def _closed_by_gain(
    verdict: Verdict | None, settings: GateSettings, numbers: dict[str, float]
) -> Reason | None:
    """Apply the gates of gain and payback; None if all are open.

    Mutates: `numbers`, to which it adds the values compared.
    """
    if verdict is None or verdict.steps < settings.min_held_out_steps or math.isnan(verdict.gain):
        numbers["held_out_steps"] = float(verdict.steps if verdict else 0)
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
