"""The health of a deployment in one word and one sentence."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.api.words.gates import UNABLE
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.quantities import age, counted, duration_text
from evenkeel_moe.ports.operations import LEASE_FREE
from evenkeel_moe.ports.status import DeploymentStatus, HealthBounds
from evenkeel_moe.protocol.transitions import ControlState


class Level(StrEnum):
    """How well a deployment is, from worst to best."""

    BAD = "bad"
    ATTENTION = "attention"
    UNKNOWN = "unknown"
    GOOD = "good"


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a deployment, by the thresholds of the chart's alerts."""

    level: Level
    """From worst to best: bad, attention, unknown, good."""
    text: str
    """The condition that decides, as a sentence."""


def health_elsewhere(leader: str | None) -> Health:
    """Return the health of a deployment that another replica leads; None is nobody."""
    if leader is None:
        return Health(Level.BAD, f"No replica leads it at present: {LEASE_FREE}.")
    return Health(Level.UNKNOWN, f"Replica {leader} leads it; ask that replica.")


def health_of(status: DeploymentStatus, bounds: HealthBounds) -> Health:
    """Return the worst condition; of those with the same level, the first.

    While an alert of the chart about a deployment fires, its level is not `good`, except for alerts
    on what a status does not tell: the past of hours, delays of swaps, refused reports, displaced
    ranks, restarts after an error. A condition holds at once, not only after the time for which the
    alert waits.
    """
    if status.state == ControlState.FOLLOWER:
        return health_elsewhere(status.leader or None)
    if status.reason == Reason.GROUP_STOPPED:
        return Health(Level.UNKNOWN, sentence(status.reason))
    found = [*_of_ranks(status, bounds), *_of_plans(status, bounds), *_of_load(status, bounds)]
    for level in Level:
        for health in found:
            if health.level is level:
                return health
    if status.state == ControlState.MIGRATING:
        return Health(Level.GOOD, sentence(Reason.PLAN_IN_PROGRESS))
    decided = (status.last_decision or {}).get("reason")
    if decided == Reason.PLAN_IN_PROGRESS:
        # The newest cycle still met the plan, which has ended since.
        return Health(Level.GOOD, "A plan has just ended.")
    if decided == Reason.RANKS_MISSING:
        return Health(Level.UNKNOWN, "All ranks are connected again, and no cycle has ended since.")
    if decided in (Reason.INSUFFICIENT_DATA, Reason.NO_STEPS):
        return Health(Level.UNKNOWN, sentence(decided))
    return Health(Level.GOOD, sentence(decided))


def _of_ranks(status: DeploymentStatus, bounds: HealthBounds) -> Iterator[Health]:
    """Yield what is wrong with the ranks and their state."""
    ranks, expected = status.ranks, status.shape.num_ranks
    stopped = sum(rank.stopped for rank in ranks)
    missing = expected - stopped - sum(rank.fresh for rank in ranks)
    silent = sum(rank.fresh and rank.epoch is None for rank in ranks)
    troubled = sum(bool(rank.trouble) for rank in ranks)
    if missing > 0:
        yield Health(Level.BAD, f"{counted(missing, 'rank')} of {expected} not connected.")
    elif troubled:
        takes = counted(troubled, "rank takes", "ranks take")
        yield Health(Level.BAD, f"{takes} no more waves.")
    elif stopped:
        yield Health(Level.ATTENTION, f"{counted(stopped, 'rank')} stopped as planned.")
    elif silent:
        have = counted(silent, "rank has", "ranks have")
        yield Health(Level.UNKNOWN, f"{have} no connection at present, and may be dead.")
    elif status.state == ControlState.WAITING_FOR_RANKS:
        yield Health(Level.BAD, sentence(status.reason))
    epochs = {rank.epoch for rank in ranks if rank.fresh and rank.epoch is not None}
    plan = status.active_plan
    # While a plan runs, one rank tells of its swap before another.
    swaps = plan and status.at_unix - plan.updated_at <= bounds.epoch_mismatch_s
    if len(epochs) > 1 and not swaps:
        named = ", ".join(map(str, sorted(epochs)))
        yield Health(Level.BAD, f"Ranks report different epochs: {named}.")
    if status.state == ControlState.RECOVERING:
        yield Health(Level.ATTENTION, sentence(status.reason))
    if status.reason in UNABLE and status.mode != Mode.OBSERVE:
        yield Health(Level.ATTENTION, sentence(status.reason))


def _of_plans(status: DeploymentStatus, bounds: HealthBounds) -> Iterator[Health]:
    """Yield what is wrong with plans and cycles, or waits for a person."""
    now, plan, decision = status.at_unix, status.active_plan, status.last_decision
    decided = None if decision is None else decision["reason"]
    if plan is not None and plan.phase is PlanPhase.STALLED:
        yield Health(Level.BAD, "The running plan cannot continue.")
    if decided == Reason.STORE_UNAVAILABLE:
        yield Health(Level.BAD, sentence(decided))
    if plan is not None and plan.phase is not PlanPhase.PAUSED:
        unchanged = now - plan.updated_at
        if unchanged > bounds.plan_stuck_s:
            yield Health(
                Level.ATTENTION,
                f"The running plan has made no progress for {duration_text(unchanged, 2)}.",
            )
    if status.held:
        yield Health(Level.ATTENTION, sentence(status.held_because))
    if status.frozen_until_unix is not None:
        yield Health(Level.ATTENTION, sentence(Reason.FROZEN))
    if status.resize is not None:
        yield Health(Level.ATTENTION, status.resize.words)
    if wrong := doubts(status.findings or ()):
        yield Health(Level.ATTENTION, f"The counts are in doubt: {wrong[0].words}")
    if status.dispatch_warning:
        yield Health(Level.ATTENTION, status.dispatch_warning)
    if waiting := len(status.proposals):
        waits = counted(waiting, "proposal waits", "proposals wait")
        yield Health(Level.ATTENTION, f"{waits} for approval.")
    elif decided == Reason.PLAN_PROPOSED and status.state != ControlState.MIGRATING:
        yield Health(Level.ATTENTION, sentence(decided))
    aborted, lost = status.plan_aborted_unix, status.plans_lost_time
    if aborted is not None and now - aborted < bounds.plan_failed_s:
        yield Health(Level.ATTENTION, f"A plan was aborted {age(aborted, now)}.")
    if lost is not None and lost >= bounds.plans_lost_time:
        yield Health(
            Level.ATTENTION, f"The newest {lost} plans that were measured made steps slower."
        )
    if decided in (Reason.PLANNER_FAILED, Reason.STALE_DATA):
        yield Health(Level.ATTENTION, sentence(decided))
    if decision is not None and now - decision["at"] >= bounds.no_decision_s:
        silent = duration_text(now - decision["at"], 2)
        yield Health(Level.ATTENTION, f"No cycle has ended for {silent}.")


def is_stale(status: DeploymentStatus, bounds: HealthBounds) -> bool:
    """Return True if the newest complete step is too old for its load to be that of now."""
    newest = status.newest_step_unix
    return newest is not None and status.at_unix - newest > bounds.data_stale_s


def _of_load(status: DeploymentStatus, bounds: HealthBounds) -> Iterator[Health]:
    """Yield what is wrong with the load: its age and its balance."""
    newest, time_balance = status.newest_step_unix, status.time_balance
    if newest is not None and is_stale(status, bounds):
        old = duration_text(status.at_unix - newest, 2)
        yield Health(Level.ATTENTION, f"The newest complete step is {old} old.")
    slow = [rank for rank in status.ranks if (rank.slowness or 0.0) > bounds.slow_rank_ratio]
    if slow:
        worst = max(slow, key=lambda rank: rank.slowness or 0.0)
        yield Health(
            Level.ATTENTION,
            f"Rank {worst.rank} takes {worst.slowness:.2f} times as long as the median rank for the"
            " same tokens.",
        )
    known = {
        phase: value for phase, value in status.balancedness_by_phase.items() if value is not None
    }
    if time_balance is not None and time_balance < bounds.time_balance_min:
        yield _below("Time balance", time_balance, bounds.time_balance_min)
    elif known and min(known.values()) < bounds.balancedness_min:
        phase, least = min(known.items(), key=lambda one: one[1])
        what = f"Balancedness of {phase}" if len(known) > 1 else "Balancedness"
        yield _below(what, least, bounds.balancedness_min)
    if status.balancedness_mean is None or math.isnan(status.balancedness_mean):
        yield Health(Level.UNKNOWN, "The load is not known yet.")
    if status.last_decision is None:
        yield Health(Level.UNKNOWN, "No cycle has ended yet.")


def _below(what: str, value: float, least: float) -> Health:
    return Health(Level.ATTENTION, f"{what} is {value:.3f}, below {least:.2f}.")
