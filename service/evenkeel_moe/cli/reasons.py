"""Explains each reason of the control loop in one sentence, for tables on the terminal."""

from collections.abc import Iterable

from evenkeel_moe.errors import Reason

WORDS: dict[str, str] = {
    Reason.PLAN_STARTED: "the copies of a plan have begun",
    Reason.PLAN_PROPOSED: "the plan pays, and waits for `evenkeel plan approve`",
    Reason.MANUAL_REQUEST: "an operator asked for the plan",
    Reason.BALANCE_BELOW_THRESHOLD: "balance fell below the threshold plan_below",
    Reason.LOAD_CHANGED: "traffic changed, and the change cost balance",
    Reason.SEPARATE_APPROVAL: "another person than the maker must approve the plan",
    Reason.OBSERVE_MODE: "a plan would pay, but mode observe starts no plan",
    Reason.PLAN_IN_PROGRESS: "another plan is running",
    Reason.FROZEN: "an operator froze the deployment for some time",
    Reason.OUTSIDE_SCHEDULE: "the schedule allows no plan now",
    Reason.HELD_AFTER_ROLLBACK: "automatic plans wait for `evenkeel resume` after a rollback",
    Reason.HELD_AFTER_DATA_LOSS: "automatic plans wait for `evenkeel resume`, because the store"
    " lost the operators' settings",
    Reason.GAINS_NOT_DELIVERED: "automatic plans wait for `evenkeel resume`, because the last ones"
    " did not deliver their gain",
    Reason.COOLDOWN: "the last plan ended too short a time ago",
    Reason.IMPLAUSIBLE_COUNTS: "the counts of layers or experts contradict each other;"
    " `evenkeel status` says where",
    Reason.INSUFFICIENT_DATA: "too few complete steps are known to plan on",
    Reason.STALE_DATA: "the newest complete step is too old to plan on",
    Reason.OBSERVE_ONLY: "ranks take no plan: one has a fault, or they run with"
    " EVENKEEL_RANK__MODE=observe",
    Reason.GATE_LAYOUT_DISAGREES: "ranks differ in how often they poll, so none takes a plan",
    Reason.RANKS_MISSING: "not all ranks of the EP group are connected and alive",
    Reason.BALANCE_ABOVE_THRESHOLD: "balance is good enough, nothing to do",
    Reason.WAITING_CONSECUTIVE_WINDOWS: "balance is low, and is watched for another cycle",
    Reason.NO_CHANGE: "the best placement found is the present one",
    Reason.GAIN_TOO_SMALL: "the best plan saves less than min_gain",
    Reason.GAIN_UNCERTAIN: "the best plan may not pay: the lower bound of its gain is below"
    " 1.5 times the price of its copies",
    Reason.PAYBACK_TOO_LONG: "the copies of the best plan cost more than it saves in time",
    Reason.PLANNER_STARTING: "the planner process is starting",
    Reason.PLANNER_FAILED: "the planner failed; the log has the error",
    Reason.STORE_UNAVAILABLE: "the store cannot be reached",
    Reason.NOT_LEADER: "another replica leads this deployment",
    Reason.RECOVERING: "the ranks are asked where they stand, after a change of the leader",
    Reason.RECOVERED: "every rank has told where it stands",
    Reason.GROUP_STOPPED: "the engine has stopped as planned",
    Reason.NO_STEPS: "no step has been complete yet",
    Reason.COMMITTED: "every wave of the plan is in place",
    Reason.STALE_BASE: "another plan, or the engine itself, changed the placement after the plan"
    " was made",
    Reason.POLICY_CHANGED: "the policy changed while the plan was waiting",
    Reason.GENERATION_CHANGED: "the EP group restarted",
    Reason.WEIGHTS_VERSION_CHANGED: "the engine loaded other weights",
    Reason.CANCELLED: "an operator cancelled the plan",
    Reason.EXPIRED: "nobody approved the proposal in time",
    Reason.PREPARE_DEADLINE: "the copies of a wave did not end in time",
    Reason.RANK_LOST: "a rank of the plan was lost",
    Reason.RANK_VOTED_NO: "a rank refused a wave",
    Reason.LEASE_LOST: "the leader lost its lease",
    Reason.DEPLOYMENT_FAILED: "the controller failed on this deployment and starts it again",
}
"""Reason -> sentence without its full stop. Reasons that only errors carry explain themselves."""

HELD: dict[str, str] = {
    Reason.HELD_AFTER_ROLLBACK: "after a rollback",
    Reason.HELD_AFTER_DATA_LOSS: "because the store lost the operators' settings",
    Reason.GAINS_NOT_DELIVERED: "because plans did not deliver their gain",
}
"""Reason of a hold -> words after "held"."""

WOULD: dict[str, tuple[str, str]] = {
    Reason.PLAN_STARTED: (
        "would start",
        "the copies would begin in mode auto; in mode propose the plan would wait for approval",
    )
}
"""Reason -> name and sentence for a plan that is only imagined: a recommendation starts none."""


def would(reason: str) -> str:
    """Return the name of a reason for a plan that is only imagined."""
    return WOULD[reason][0] if reason in WOULD else reason


_SUPERSEDED = (
    Reason.STALE_BASE,
    Reason.GENERATION_CHANGED,
    Reason.WEIGHTS_VERSION_CHANGED,
)
"""Reasons for which a plan that has not begun is useless, although nothing is wrong with it."""
SUPERSEDED_WORDS = (
    "superseded: never started, because its placement, group or weights were replaced; nothing is"
    " wrong with the plan"
)


def phase_name(phase: str, reason: str) -> str:
    """Return the phase of a plan as people call it.

    The record has the phase `refused` both for plans that break a rule and for plans that were
    replaced before they began; the reason tells them apart.
    """
    return "superseded" if phase == "refused" and reason in _SUPERSEDED else phase


def plan_phase(phase: str, reason: str) -> str:
    """Return the phase of a plan as people call it, with its reason in brackets."""
    return with_reason(phase_name(phase, reason), reason)


def with_reason(phase: str, reason: str) -> str:
    """Return a phase or state with its reason in brackets, unless the reason repeats it."""
    return phase if phase in reason.split("_") else f"{phase} ({reason})"


def explained(reasons: Iterable[str]) -> list[str]:
    """Return one line for each reason that has an explanation, in order and without repeats."""
    return [f"{reason}: {WORDS[reason]}" for reason in dict.fromkeys(reasons) if reason in WORDS]
