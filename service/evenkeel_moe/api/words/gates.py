"""The gates of a planning cycle as a checklist, from the newest decision and the policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.quantities import bytes_text, counted, duration_text, share
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.ports.status import DeploymentStatus


class GateState(StrEnum):
    """What the newest cycle found at a gate."""

    OPEN = "open"
    CLOSED = "closed"
    LATER = "later"
    """Not reached: an earlier gate was closed."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate and its state; `remedy` says what would open a closed one."""

    title: str
    state: GateState
    detail: str
    remedy: str | None


class _Facts(NamedTuple):
    """What gates compare: figures of the decision, the status, and the thresholds."""

    numbers: Mapping[str, Any]
    status: DeploymentStatus
    needs: GateSettings

    def number(self, name: str) -> float | None:
        """Return a figure of the decision; None if it has none of that name."""
        value = self.numbers.get(name)
        return None if value is None else float(value)


class _Rule(NamedTuple):
    """One gate: the reasons with which it ends a cycle, and what it says."""

    title: str
    closes: tuple[Reason, ...]
    says: Callable[[_Facts], str]
    """Returns what the gate compares, as a sentence."""
    remedy: str


def gates_of(status: DeploymentStatus) -> list[Gate]:
    """Return the gates in the order in which a cycle meets them.

    Gates after the closed one were not reached. Without a decision no state is known.
    """
    decision = status.last_decision or {}
    numbers = decision.get("numbers") or {}
    facts = _Facts(numbers, status, GateSettings.from_thresholds(status.rules.thresholds))
    closed = _closed(decision.get("reason"), numbers)
    return [
        Gate(
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


def _says_times(facts: _Facts) -> str:
    left, until = facts.number("frozen_s"), facts.status.frozen_until_unix
    if left is None and until is not None and until > facts.status.at_unix:
        left = until - facts.status.at_unix
    frozen = "Not frozen" if left is None else f"Frozen for another {duration_text(left)}"
    schedule = facts.status.rules.schedule
    spans = len(schedule.windows) + len(schedule.blackouts)
    times = "plans may start at any time"
    if spans:
        times = f"the schedule has {counted(spans, 'weekly span')}"
    return f"{frozen}; {times}."


def _says_hold(facts: _Facts) -> str:
    if not facts.status.held:
        return "Automatic plans are not held."
    because = facts.status.held_because
    return f"Automatic plans are held ({because}). {hold_words(facts.status.mode)}"


def _says_plan(facts: _Facts) -> str:
    plan = facts.status.active_plan
    return "No plan is running." if plan is None else f"Plan {plan.plan.plan_id} is running."


def _says_proposal(facts: _Facts) -> str:
    left = facts.number("expires_in_s")
    if left is None:
        return "In propose mode, one automatic plan waits at a time."
    return f"The proposal expires in {duration_text(left)}."


def _says_ranks(facts: _Facts) -> str:
    fresh = facts.number("ranks_fresh")
    if fresh is None:
        fresh = sum(rank.fresh for rank in facts.status.ranks)
    return f"{fresh:.0f} of {counted(facts.status.shape.num_ranks, 'rank')}."


def _says_cooldown(facts: _Facts) -> str:
    since, needs = facts.number("since_plan_s"), facts.number("cooldown_s")
    if since is None:
        return f"Needs {duration_text(facts.needs.cooldown_s)} after a plan."
    return f"{duration_text(since)} since the plan, needs {duration_text(needs)}."


def _says_counts(facts: _Facts) -> str:
    wrong = " ".join(each.words for each in doubts(facts.status.findings or ()))
    most = share(facts.needs.max_layer_deviation)
    return wrong or f"Layers of a step may differ by {most}."


def _says_steps(facts: _Facts) -> str:
    steps = facts.number("window_steps")
    known = facts.status.window_steps if steps is None else steps
    return f"{counted(known, 'step')}, needs {facts.needs.min_window_steps:,.0f}."


def _says_age(facts: _Facts) -> str:
    old, most = facts.number("newest_step_age_s"), duration_text(facts.needs.max_data_age_s)
    return f"At most {most}." if old is None else f"{duration_text(old)} old, at most {most}."


def _says_balance(facts: _Facts) -> str:
    status = facts.status
    time, tokens = facts.number("time_balance"), facts.number("balancedness_mean")
    time = status.time_balance if time is None else time
    tokens = status.balancedness_mean if tokens is None else tokens
    shown = "unknown" if tokens is None else f"{tokens:.3f}"
    decides = f"Balancedness {shown}"
    if time is not None:
        decides = f"Time balance {time:.3f} (balancedness {shown})"
    below = facts.number("starts_below")
    below = facts.needs.plan_below if below is None else below
    return f"{decides}; planning starts below {below:.2f}."


def _says_cycles(facts: _Facts) -> str:
    needs, below = f"{facts.needs.consecutive_windows:.0f}", facts.number("windows_below")
    return f"{'Needs' if below is None else f'{below:.0f} of'} {needs} cycles in a row."


def _says_better(facts: _Facts) -> str:
    copies = facts.number("copies")
    return (
        "Not known yet." if copies is None else f"{counted(copies, 'copy', 'copies')} of experts."
    )


def _says_limits(facts: _Facts) -> str:
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


def _says_gain(facts: _Facts) -> str:
    gain, lower = facts.number("gain"), facts.number("gain_lower")
    needs = f"needs {share(facts.needs.min_gain)}, and a lower bound above 1.5 times the price"
    if gain is None:
        return f"{needs[0].upper()}{needs[1:]} of the copies."
    least = "" if lower is None else f", at least {share(lower)}"
    return f"Predicted {share(gain)}{least}; {needs} of the copies."


def _says_payback(facts: _Facts) -> str:
    after, most = facts.number("payback_steps"), f"{facts.needs.max_payback_steps:,.0f} steps"
    return f"At most {most}." if after is None else f"After {after:,.0f} steps, at most {most}."


_RULES = (
    _Rule(
        "This replica leads, and the ranks agree about their state",
        (Reason.NOT_LEADER, Reason.RECOVERING, Reason.STORE_UNAVAILABLE),
        lambda facts: f"State {facts.status.state}.",
        "It ends by itself once the store and all ranks can be reached.",
    ),
    _Rule(
        "Freeze and schedule let plans begin",
        (Reason.FROZEN, Reason.OUTSIDE_SCHEDULE),
        _says_times,
        "End the freeze, change the schedule, or wait.",
    ),
    _Rule(
        "The hold lets plans be made",
        (Reason.HELD_AFTER_ROLLBACK, Reason.HELD_AFTER_DATA_LOSS, Reason.GAINS_NOT_DELIVERED),
        _says_hold,
        "Find out why: the rollback, the lost data or the gain that was missing. Then resume.",
    ),
    _Rule(
        "Earlier plans have ended",
        (Reason.PLAN_IN_PROGRESS,),
        _says_plan,
        "Wait for the plan to end, or cancel it.",
    ),
    _Rule(
        "Earlier proposals have been answered",
        (Reason.PLAN_PROPOSED,),
        _says_proposal,
        "Approve or reject the proposal; it expires by itself otherwise.",
    ),
    _Rule(
        "All ranks are connected",
        (Reason.RANKS_MISSING, Reason.GROUP_STOPPED),
        _says_ranks,
        "Look at the missing ranks: their load is unknown until they are back.",
    ),
    _Rule(
        "The last plan ended long enough ago",
        (Reason.COOLDOWN,),
        _says_cooldown,
        "Wait. A change of traffic that costs balance does not wait.",
    ),
    _Rule(
        "The counts agree with each other",
        (Reason.IMPLAUSIBLE_COUNTS,),
        _says_counts,
        "Correct how the engine counts; or set max_layer_deviation or max_idle_experts.",
    ),
    _Rule(
        "There are enough complete steps",
        (Reason.INSUFFICIENT_DATA, Reason.NO_STEPS),
        _says_steps,
        "Wait for traffic: each step on all ranks counts once.",
    ),
    _Rule(
        "The newest step is recent",
        (Reason.STALE_DATA,),
        _says_age,
        "Find out why steps stopped, or why one rank does not report them.",
    ),
    _Rule(
        "Balance is low, or the traffic changed",
        (Reason.BALANCE_ABOVE_THRESHOLD,),
        _says_balance,
        "A lower balance than that, or a change of traffic.",
    ),
    _Rule(
        "Balance was low for enough cycles",
        (Reason.WAITING_CONSECUTIVE_WINDOWS,),
        _says_cycles,
        "Wait for the next cycle.",
    ),
    _Rule(
        "The planner found a better placement",
        (
            *(Reason.PLANNER_STARTING, Reason.PLANNER_FAILED, Reason.NO_CHANGE),
            *(Reason.POLICY_CHANGED, Reason.STALE_BASE),
        ),
        _says_better,
        "Nothing, if the placement is the best one; else read the controller's log.",
    ),
    _Rule(
        "The plan keeps within the limits",
        (
            *(Reason.LIMIT_EXCEEDED, Reason.MEMORY_EXCEEDED, Reason.POOL_EXCEEDED),
            Reason.STAGING_TOO_SMALL,
        ),
        _says_limits,
        "Raise the limits of the policy (role admin).",
    ),
    _Rule(
        "The gain is large enough and certain",
        (Reason.GAIN_TOO_SMALL, Reason.GAIN_UNCERTAIN),
        _says_gain,
        "More steps make the gain more certain; a larger imbalance makes it larger.",
    ),
    _Rule(
        "The copies pay for themselves soon enough",
        (Reason.PAYBACK_TOO_LONG,),
        _says_payback,
        "A larger gain, or fewer copies.",
    ),
    _Rule(
        "The mode lets plans start",
        (Reason.OBSERVE_MODE,),
        lambda facts: f"Mode {facts.status.mode}.",
        "Set the mode to propose or auto.",
    ),
)
"""In the order in which a cycle meets them."""
