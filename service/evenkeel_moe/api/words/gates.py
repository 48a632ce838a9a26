"""The gates of a planning cycle as a checklist, from the newest decision and the policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.quantities import bytes_text, counted, duration_text, numbered, share
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.problem.objective import PRICE_MARGIN
from evenkeel_moe.ports.status import DeploymentStatus


class GateState(StrEnum):
    """What the newest cycle found at a gate."""

    OPEN = "open"
    CLOSED = "closed"
    LATER = "later"
    """Not reached: an earlier gate was closed."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PlanningGate:
    """One gate of a planning cycle."""

    title: str
    """What holds while the gate is open."""
    state: GateState
    """later: not reached, because an earlier gate was closed."""
    detail: str
    """What the gate compares, as a sentence."""
    remedy: str | None
    """What would open it; null unless it is closed."""


class _Compared(NamedTuple):
    """What gates compare: figures of the decision, the status, and the thresholds."""

    numbers: Mapping[str, Any]
    status: DeploymentStatus
    needs: GateSettings

    def number(self, name: str, otherwise: float | None = None) -> float | None:
        """Return a figure of the decision, or another value if it has none of that name."""
        value = self.numbers.get(name)
        return otherwise if value is None else float(value)


class _Rule(NamedTuple):
    """One gate: the reasons with which it ends a cycle, and what it says."""

    title: str
    closes: tuple[Reason, ...]
    says: Callable[[_Compared], str]
    remedy: str


_RULES: list[_Rule] = []
"""In the order in which a cycle meets them, which is the order below."""


def _gate(
    title: str, remedy: str, *closes: Reason
) -> Callable[[Callable[[_Compared], str]], Callable[[_Compared], str]]:
    """Make a function the next gate; it returns what the gate compares, as a sentence."""

    def added(says: Callable[[_Compared], str]) -> Callable[[_Compared], str]:
        _RULES.append(_Rule(title, closes, says, remedy))
        return says

    return added


def gates_of(status: DeploymentStatus) -> list[PlanningGate]:
    """Return the gates in the order in which a cycle meets them.

    Gates after the closed one were not reached. Without a decision no state is known.
    """
    decision = status.last_decision or {}
    numbers = decision.get("numbers") or {}
    facts = _Compared(numbers, status, GateSettings.from_thresholds(status.rules.thresholds))
    closed = _closed(decision.get("reason"), numbers)
    return [
        PlanningGate(
            rule.title,
            _state(index, closed),
            rule.says(facts),
            rule.remedy if index == closed else None,
        )
        for index, rule in enumerate(_RULES)
    ]


def _closed(reason: str | None, numbers: Mapping[str, Any]) -> int | None:
    """Return the index of the gate that closed; the number of gates if all were open."""
    if reason == Reason.PLAN_STARTED:
        return len(_RULES)
    if reason == Reason.INSUFFICIENT_DATA and "held_out_steps" in numbers:
        # After planning there were too few later steps to score the plan on.
        reason = Reason.GAIN_UNCERTAIN
    return next((i for i, rule in enumerate(_RULES) if reason in rule.closes), None)


def _state(index: int, closed: int | None) -> GateState:
    if closed is None:
        return GateState.UNKNOWN
    if index < closed:
        return GateState.OPEN
    return GateState.CLOSED if index == closed else GateState.LATER


def hold_words(mode: str) -> str:
    """Return what a hold on automatic plans stops in a mode."""
    if mode == "auto":
        return "In mode auto no plan is made until somebody resumes automatic plans."
    others = (
        "In mode propose proposals are still made, and each waits for approval."
        if mode == "propose"
        else "In mode observe the controller starts nothing."
    )
    return f"The hold stops plans in mode auto only. {others}"


@_gate(
    "This replica leads, and the ranks agree about their state",
    "It ends by itself once the store and all ranks can be reached.",
    Reason.NOT_LEADER,
    Reason.RECOVERING,
    Reason.STORE_UNAVAILABLE,
)
def _says_state(facts: _Compared) -> str:
    return f"State {facts.status.state}."


@_gate(
    "Pause, schedule and retiring ranks let plans begin",
    "Resume, change the schedule, or wait.",
    Reason.FROZEN,
    Reason.OUTSIDE_SCHEDULE,
    Reason.RESIZING,
)
def _says_times(facts: _Compared) -> str:
    now, left = facts.status.at_unix, facts.number("frozen_s")
    until, schedule = facts.status.frozen_until_unix, facts.status.rules.schedule
    if left is None and until is not None and until > now:
        left = until - now
    closes = [] if left is None else [f"paused for another {duration_text(left)}"]
    if not schedule.is_open(now):
        opens_at = schedule.opens_at(now)
        assert opens_at is not None
        closes.append(f"the schedule opens in {duration_text(opens_at - now)}")
    if facts.status.resize is not None:
        closes.append(f"ranks {list(facts.status.resize.retire)} retire")
    if closes:
        words = "; ".join(closes)
        return f"{words[0].upper()}{words[1:]}."
    spans = len(schedule.windows) + len(schedule.blackouts)
    times = f"the schedule has {counted(spans, 'weekly span')}" if spans else "no schedule"
    return f"Not paused; {times}."


@_gate(
    "The hold lets plans be made",
    "Find out why: the rollback, the lost data or the gain that was missing. Then resume.",
    Reason.HELD_AFTER_ROLLBACK,
    Reason.HELD_AFTER_DATA_LOSS,
    Reason.GAINS_NOT_DELIVERED,
)
def _says_hold(facts: _Compared) -> str:
    if not facts.status.held:
        return "Automatic plans are not held."
    because = facts.status.held_because
    return f"Automatic plans are held ({because}). {hold_words(facts.status.mode)}"


@_gate(
    "Earlier plans have ended",
    "Wait for the plan to end, or cancel it.",
    Reason.PLAN_IN_PROGRESS,
)
def _says_plan(facts: _Compared) -> str:
    plan = facts.status.active_plan
    return "No plan is running." if plan is None else f"Plan {plan.plan.plan_id} is running."


@_gate(
    "Earlier proposals have been answered",
    "Approve or reject the proposal; it expires by itself otherwise.",
    Reason.PLAN_PROPOSED,
)
def _says_proposal(facts: _Compared) -> str:
    left = facts.number("expires_in_s")
    if left is None:
        return "In propose mode, one automatic plan waits at a time."
    return f"The proposal expires in {duration_text(left)}."


@_gate(
    "All ranks are connected",
    "Look at the missing ranks: their load is unknown until they are back.",
    Reason.RANKS_MISSING,
    Reason.GROUP_STOPPED,
)
def _says_ranks(facts: _Compared) -> str:
    fresh = facts.number("ranks_fresh", sum(rank.fresh for rank in facts.status.ranks))
    return f"{fresh:.0f} of {counted(facts.status.shape.num_ranks, 'rank')}."


UNABLE = (Reason.OBSERVE_ONLY, Reason.WEIGHTS_VERSION_CHANGED, Reason.GATE_LAYOUT_DISAGREES)
"""Reasons for which ranks that are all connected refuse every plan."""


@_gate(
    "All ranks can carry plans out, with the same weights",
    "End the fault that a rank reports, or set EVENKEEL_RANK__MODE=place; then restart the group.",
    *UNABLE,
)
def _says_able(facts: _Compared) -> str:
    troubled = [rank.rank for rank in facts.status.ranks if rank.trouble]
    if troubled:
        return f"Ranks with a fault: {numbered(troubled)}."
    if facts.status.reason in UNABLE:
        return sentence(facts.status.reason)
    return "No rank reports a fault."


@_gate(
    "The last plan ended long enough ago",
    "Wait. A change of traffic that costs balance does not wait.",
    Reason.COOLDOWN,
)
def _says_cooldown(facts: _Compared) -> str:
    since, needs = facts.number("since_plan_s"), facts.number("cooldown_s")
    if since is None:
        return f"Needs {duration_text(facts.needs.cooldown_s)} after a plan."
    return f"{duration_text(since)} since the plan, needs {duration_text(needs)}."


@_gate(
    "The counts agree with each other",
    "Correct how the engine counts; or set max_layer_deviation or max_idle_experts.",
    Reason.IMPLAUSIBLE_COUNTS,
)
def _says_counts(facts: _Compared) -> str:
    wrong = " ".join(each.words for each in doubts(facts.status.findings or ()))
    most = share(facts.needs.max_layer_deviation)
    return wrong or f"Layers of a step may differ by {most}."


@_gate(
    "There are enough complete steps",
    "Wait for traffic: each step on all ranks counts once.",
    Reason.INSUFFICIENT_DATA,
    Reason.NO_STEPS,
)
def _says_steps(facts: _Compared) -> str:
    steps = facts.numbers.get("window_steps", facts.status.window_steps)
    return f"{counted(steps, 'step')}, needs {facts.needs.min_window_steps:,.0f}."


@_gate(
    "The newest step is recent",
    "Find out why steps stopped, or why one rank does not report them.",
    Reason.STALE_DATA,
)
def _says_age(facts: _Compared) -> str:
    old, most = facts.number("newest_step_age_s"), duration_text(facts.needs.max_data_age_s)
    return f"At most {most}." if old is None else f"{duration_text(old)} old, at most {most}."


@_gate(
    "Balance is low, or the traffic changed",
    "A lower balance than that, or a change of traffic.",
    Reason.BALANCE_ABOVE_THRESHOLD,
)
def _says_balance(facts: _Compared) -> str:
    time = facts.number("time_balance", facts.status.time_balance)
    tokens = facts.number("balancedness_mean", facts.status.balancedness_mean)
    shown = "unknown" if tokens is None else f"{tokens:.3f}"
    decides = f"Balancedness {shown}"
    if time is not None:
        decides = f"Time balance {time:.3f} (balancedness {shown})"
    below = facts.number("starts_below", facts.needs.plan_below)
    return f"{decides}; planning starts below {below:.2f}."


@_gate(
    "Balance was low for enough cycles",
    "Wait for the next cycle.",
    Reason.WAITING_CONSECUTIVE_WINDOWS,
)
def _says_cycles(facts: _Compared) -> str:
    needs, below = f"{facts.needs.consecutive_windows:.0f}", facts.number("windows_below")
    return f"{'Needs' if below is None else f'{below:.0f} of'} {needs} cycles in a row."


@_gate(
    "The planner found a better placement",
    "Nothing, if the placement is the best one; else read the controller's log.",
    Reason.PLANNER_STARTING,
    Reason.PLANNER_FAILED,
    Reason.UNKNOWN_POLICY,
    Reason.WRONG_SHAPE,
    Reason.EXPERT_WITHOUT_REPLICA,
    Reason.DUPLICATE_ON_RANK,
    Reason.EMPTY_SLOTS,
    Reason.NO_CHANGE,
    Reason.POLICY_CHANGED,
    Reason.STALE_BASE,
)
def _says_better(facts: _Compared) -> str:
    copies = facts.number("copies")
    return (
        "Not known yet." if copies is None else f"{counted(copies, 'copy', 'copies')} of experts."
    )


@_gate(
    "The plan keeps within the limits",
    "Raise the limits of the policy, or lower its replica_budget (role admin).",
    Reason.STAGING_TOO_SMALL,
    Reason.LIMIT_EXCEEDED,
    Reason.MEMORY_EXCEEDED,
    Reason.POOL_EXCEEDED,
)
def _says_limits(facts: _Compared) -> str:
    parts = []
    limits, count = facts.status.rules.limits, "{:,.0f}".format
    for name, most, text in (
        ("copies", limits.max_moves, count),
        ("bytes", limits.max_bytes, bytes_text),
        ("layers", limits.max_layers, count),
    ):
        value = facts.number(name)
        known = "" if value is None else f"{text(value)}, "
        parts.append(f"{name}: {known}{'no limit' if most is None else f'at most {text(most)}'}")
    return f"{'; '.join(parts)}."


@_gate(
    "The gain is large enough and certain",
    "More steps make the gain more certain; a larger imbalance makes it larger.",
    Reason.GAIN_TOO_SMALL,
    Reason.GAIN_UNCERTAIN,
)
def _says_gain(facts: _Compared) -> str:
    gain, lower = facts.number("gain"), facts.number("gain_lower")
    margin = f"a lower bound above {PRICE_MARGIN:g} times the price"
    needs = f"needs {share(facts.needs.min_gain)}, and {margin}"
    if gain is None:
        return f"{needs[0].upper()}{needs[1:]} of the copies."
    least = "" if lower is None else f", at least {share(lower)}"
    return f"Predicted {share(gain)}{least}; {needs} of the copies."


@_gate(
    "The copies pay for themselves soon enough",
    "A larger gain, or fewer copies.",
    Reason.PAYBACK_TOO_LONG,
)
def _says_payback(facts: _Compared) -> str:
    after, most = facts.number("payback_steps"), f"{facts.needs.max_payback_steps:,.0f} steps"
    return (
        f"At most {most}." if after is None else f"After {counted(after, 'step')}, at most {most}."
    )


@_gate(
    "The mode lets plans start",
    "Set the mode to propose or auto.",
    Reason.OBSERVE_MODE,
)
def _says_mode(facts: _Compared) -> str:
    return f"Mode {facts.status.mode}."
