"""Each reason of the closed list as a sentence, for the API's clients to show unchanged."""

from evenkeel_moe.errors import Reason

_SENTENCES: dict[str, str] = {
    Reason.PLAN_STARTED: "A plan was started.",
    Reason.PLAN_PROPOSED: "A plan waits for approval.",
    Reason.MANUAL_REQUEST: "An operator asked for this plan.",
    Reason.BALANCE_BELOW_THRESHOLD: "Balance fell below the threshold plan_below, so a plan was"
    " made.",
    Reason.LOAD_CHANGED: "The traffic changed, and the change cost balance, so a plan was made.",
    Reason.SEPARATE_APPROVAL: "Another person than the maker must approve the plan.",
    Reason.OBSERVE_MODE: "Every gate but the mode was open: in observe mode the controller starts"
    " nothing.",
    Reason.PLAN_IN_PROGRESS: "A plan is being carried out.",
    Reason.FROZEN: "An operator paused this deployment: no new plan may start.",
    Reason.RESIZING: "Ranks retire: no other plan starts until the group has its new size.",
    Reason.OUTSIDE_SCHEDULE: "The schedule lets no plan start now.",
    Reason.HELD_AFTER_ROLLBACK: "Automatic plans are held after a rollback, until an operator"
    " resumes them.",
    Reason.HELD_AFTER_DATA_LOSS: "Automatic plans are held until an operator resumes them, because"
    " the store lost the settings of operators.",
    Reason.GAINS_NOT_DELIVERED: "Automatic plans are held until an operator resumes them, because"
    " earlier plans did not deliver their gain.",
    Reason.COOLDOWN: "The last plan ended a moment ago; the controller waits before the next.",
    Reason.IMPLAUSIBLE_COUNTS: "The counts of layers or experts contradict each other; the"
    " deployment's findings say where.",
    Reason.INSUFFICIENT_DATA: "There are too few complete steps to plan or to judge on.",
    Reason.STALE_DATA: "The newest complete step is too old to plan on.",
    Reason.RANKS_MISSING: "Not all ranks are connected, so the present load is unknown.",
    Reason.BALANCE_ABOVE_THRESHOLD: "Balance is good enough: nothing has to move.",
    Reason.WAITING_CONSECUTIVE_WINDOWS: "Balance is low, but not for enough cycles in a row.",
    Reason.NO_CHANGE: "The best placement found is the present one.",
    Reason.GAIN_TOO_SMALL: "The predicted gain is too small to act on: it is below min_gain.",
    Reason.GAIN_UNCERTAIN: "The predicted gain is not certain to pay: its lower bound is below 1.5"
    " times the price of the copies.",
    Reason.PAYBACK_TOO_LONG: "The copies would cost more than the plan saves in time.",
    Reason.PLANNER_STARTING: "The planner is compiling its kernels.",
    Reason.PLANNER_FAILED: "The planner failed; the controller's log says why.",
    Reason.STORE_UNAVAILABLE: "The store cannot be reached.",
    Reason.NOT_LEADER: "This controller does not hold the lease of the deployment.",
    Reason.GROUP_STOPPED: "The engine stopped as planned.",
    Reason.RECOVERING: "The controller asks all ranks for their state, after a change of the"
    " leader.",
    Reason.NO_STEPS: "The ranks run no steps.",
    Reason.COMMITTED: "All waves were carried out.",
    Reason.STALE_BASE: "Another plan, or the engine itself, has changed the placement since the"
    " plan was made.",
    Reason.POLICY_CHANGED: "The policy changed while the plan was made.",
    Reason.GENERATION_CHANGED: "The ranks started again as a new group.",
    Reason.WEIGHTS_VERSION_CHANGED: "The weights of the model changed.",
    Reason.CANCELLED: "An operator cancelled it.",
    Reason.EXPIRED: "Nobody approved it in time.",
    Reason.PREPARE_DEADLINE: "The copies were not ready in time.",
    Reason.GATE_DEADLINE: "The ranks did not swap, or did not confirm the swap, in time.",
    Reason.ABORT_DEADLINE: "The ranks did not confirm the abort in time.",
    Reason.RECOVERY_DEADLINE: "The ranks did not tell their state in time.",
    Reason.RANK_LOST: "A rank was lost.",
    Reason.RANK_VOTED_NO: "A rank refused the wave.",
    Reason.WAVE_DROPPED: "The ranks dropped the wave together.",
    Reason.LEASE_LOST: "The controller lost the lease of the deployment.",
    Reason.RECOVERED: "A new leader took over, and every rank has told its state.",
    Reason.OBSERVE_ONLY: "The ranks can be observed only: one has a fault, or they run with"
    " EVENKEEL_RANK__MODE=observe.",
    Reason.DEPLOYMENT_FAILED: "The deployment failed on this replica and starts again.",
    Reason.DEPLOYMENT_IN_USE: "Another group of ranks runs under this name; this one waits.",
    Reason.DISPLACED: "Another process took the place of this rank.",
    Reason.CHECKSUM_MISMATCH: "Copied weights have the wrong checksum.",
    Reason.STAGING_TOO_SMALL: "A rank has too little staging memory.",
    Reason.TRANSFER_TIMEOUT: "A copy took too long.",
    Reason.TRANSFER_FAILED: "A copy failed.",
    Reason.TRANSPORT_NOT_DRAINED: "Copies of an earlier wave are still under way.",
    Reason.BUSY: "A rank or an earlier request is busy.",
    Reason.EXPERT_WITHOUT_REPLICA: "An expert would have no replica.",
    Reason.EXPERT_OUT_OF_RANGE: "The placement names an expert that does not exist.",
    Reason.DUPLICATE_ON_RANK: "A rank would hold the same expert twice.",
    Reason.EMPTY_SLOTS: "The engine allows no empty slots.",
    Reason.WRONG_SHAPE: "The placement has another shape than the deployment.",
    Reason.POOL_EXCEEDED: "A rank would hold more experts than its pool allows.",
    Reason.MEMORY_EXCEEDED: "A rank would need more memory than it has.",
    Reason.NO_SOURCE: "No rank holds the weights to copy.",
    Reason.LIMIT_EXCEEDED: "The plan is larger than the policy's limits allow.",
    Reason.BAD_LENGTH: "A report has the wrong length.",
    Reason.NEGATIVE_COUNT: "A report has a negative count.",
    Reason.NOT_FINITE: "A report has a number that is not finite.",
    Reason.SUM_MISMATCH: "The counts of a report do not add up.",
    Reason.UNKNOWN_EPOCH: "A report names an epoch that the controller does not know.",
    Reason.UNKNOWN_DEPLOYMENT: "A report names an unknown deployment.",
    Reason.UNKNOWN_GENERATION: "A report is from another start of the group.",
    Reason.STALE_INCARNATION: "A report is from an earlier process of the rank.",
    Reason.DUPLICATE_STEP: "A step was reported twice.",
    Reason.LATE_STEP: "A report came too late.",
    Reason.INCOMPLETE_STEP: "Some ranks did not report a step.",
    Reason.EPOCH_DISAGREES: "The ranks disagree about the epoch.",
    Reason.SHAPE_DISAGREES: "The ranks disagree about the model's shape.",
    Reason.MALFORMED: "A message cannot be parsed.",
    Reason.GATE_FAILED: "The ranks' vote failed.",
    Reason.GATE_LAYOUT_DISAGREES: "The ranks differ in how often they poll for the vote, so none"
    " takes a plan.",
    Reason.EPOCH_MISMATCH: "A peer of a rank had another epoch.",
    Reason.UNSUPPORTED: "This is not supported.",
    Reason.IDENTITY_REFUSED: "The certificate of a rank does not name this rank.",
    Reason.UNKNOWN_POLICY: "There is no such planning algorithm.",
    Reason.INVALID_INPUT: "The input is invalid.",
    Reason.NOT_FOUND: "It does not exist.",
    Reason.ID_REUSED: "This id was used for another request.",
    Reason.WRONG_PHASE: "The plan is not in a phase that allows this.",
}


def sentence(reason: str | None) -> str:
    """Return the words of a reason; one that is not known here is shown as it is."""
    if not reason:
        return "The reason is unknown."
    return _SENTENCES.get(reason, f"{reason}.")
