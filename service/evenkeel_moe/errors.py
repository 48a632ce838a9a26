"""Every error Evenkeel raises, and the closed list of reasons it gives.

::

    EvenkeelError
    ├── InvalidInput          the caller's fault: fix the input and call again
    │   └── ShapeMismatch     an array or a deployment has another shape than declared
    ├── NotFound              the named deployment, plan or epoch is not known
    ├── Conflict              right input, wrong moment: the state moved (carries a Reason)
    ├── InfeasiblePlan        no placement satisfies the limits (carries a Reason)
    ├── PeerViolation         a remote party broke the protocol (carries a Reason)
    ├── Unavailable           retry later: store, leader or rank out of reach (carries a Reason)
    └── IllegalEvent          our own bug: a machine got an event its table forbids

"No plan", "not enough data" and "gate closed" are outcomes, not errors: they are
return values with a Reason.
"""

from enum import StrEnum

__all__ = [
    "Conflict",
    "EvenkeelError",
    "IllegalEvent",
    "InfeasiblePlan",
    "InvalidInput",
    "NotFound",
    "PeerViolation",
    "Reason",
    "ShapeMismatch",
    "Unavailable",
]


class Reason(StrEnum):
    """Why something was, or was not, done. Also the metric label and the REST code."""

    # Decisions of a cycle.
    PLAN_STARTED = "plan_started"
    PLAN_PROPOSED = "plan_proposed"
    MANUAL_REQUEST = "manual_request"
    BALANCE_BELOW_THRESHOLD = "balance_below_threshold"
    LOAD_CHANGED = "load_changed"
    OBSERVE_MODE = "observe_mode"
    PLAN_IN_PROGRESS = "plan_in_progress"
    FROZEN = "frozen"
    OUTSIDE_SCHEDULE = "outside_schedule"
    HELD_AFTER_ROLLBACK = "held_after_rollback"
    COOLDOWN = "cooldown"
    INSUFFICIENT_DATA = "insufficient_data"
    STALE_DATA = "stale_data"
    RANKS_MISSING = "ranks_missing"
    BALANCE_ABOVE_THRESHOLD = "balance_above_threshold"
    WAITING_CONSECUTIVE_WINDOWS = "waiting_consecutive_windows"
    NO_CHANGE = "no_change"
    GAIN_TOO_SMALL = "gain_too_small"
    GAIN_UNCERTAIN = "gain_uncertain"
    PAYBACK_TOO_LONG = "payback_too_long"
    PLANNER_FAILED = "planner_failed"
    STORE_UNAVAILABLE = "store_unavailable"
    NOT_LEADER = "not_leader"
    RECOVERING = "recovering"
    NO_STEPS = "no_steps"

    # Why a plan is refused, ended, stalled.
    COMMITTED = "committed"
    STALE_BASE = "stale_base"
    POLICY_CHANGED = "policy_changed"
    GENERATION_CHANGED = "generation_changed"
    WEIGHTS_VERSION_CHANGED = "weights_version_changed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PREPARE_DEADLINE = "prepare_deadline"
    GATE_DEADLINE = "gate_deadline"
    ABORT_DEADLINE = "abort_deadline"
    RECOVERY_DEADLINE = "recovery_deadline"
    RANK_LOST = "rank_lost"
    RANK_VOTED_NO = "rank_voted_no"
    WAVE_DROPPED = "wave_dropped"
    LEASE_LOST = "lease_lost"
    RECOVERED = "recovered"
    OBSERVE_ONLY = "observe_only"

    # Why a rank votes no.
    CHECKSUM_MISMATCH = "checksum_mismatch"
    STAGING_TOO_SMALL = "staging_too_small"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_FAILED = "transfer_failed"
    TRANSPORT_NOT_DRAINED = "transport_not_drained"
    BUSY = "busy"
    TERM_TOO_OLD = "term_too_old"

    # Invariants of a placement (R17).
    EXPERT_WITHOUT_REPLICA = "expert_without_replica"
    EXPERT_OUT_OF_RANGE = "expert_out_of_range"
    DUPLICATE_ON_RANK = "duplicate_on_rank"
    WRONG_SHAPE = "wrong_shape"
    POOL_EXCEEDED = "pool_exceeded"
    MEMORY_EXCEEDED = "memory_exceeded"
    NO_SOURCE = "no_source"
    LIMIT_EXCEEDED = "limit_exceeded"

    # Why a report is quarantined.
    BAD_LENGTH = "bad_length"
    NEGATIVE_COUNT = "negative_count"
    NOT_FINITE = "not_finite"
    SUM_MISMATCH = "sum_mismatch"
    UNKNOWN_EPOCH = "unknown_epoch"
    UNKNOWN_DEPLOYMENT = "unknown_deployment"
    UNKNOWN_GENERATION = "unknown_generation"
    STALE_INCARNATION = "stale_incarnation"
    DUPLICATE_STEP = "duplicate_step"
    LATE_STEP = "late_step"
    INCOMPLETE_STEP = "incomplete_step"
    EPOCH_DISAGREES = "epoch_disagrees"
    SHAPE_DISAGREES = "shape_disagrees"
    MALFORMED = "malformed"

    # The agent and the gate.
    GATE_FAILED = "gate_failed"
    GATE_LAYOUT_DISAGREES = "gate_layout_disagrees"
    EPOCH_MISMATCH = "epoch_mismatch"
    UNSUPPORTED = "unsupported"
    IDENTITY_REFUSED = "identity_refused"

    # The caller.
    UNKNOWN_POLICY = "unknown_policy"
    INVALID_INPUT = "invalid_input"
    NOT_FOUND = "not_found"
    ID_REUSED = "id_reused"
    WRONG_PHASE = "wrong_phase"


class EvenkeelError(Exception):
    """Base of every error raised on purpose; `reason` is from the closed list."""

    default_reason = Reason.INVALID_INPUT

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.reason = reason if reason is not None else self.default_reason


class InvalidInput(EvenkeelError):
    """The caller passed something that can never be right."""


class ShapeMismatch(InvalidInput):
    """An array or a declaration has another shape than the deployment."""

    default_reason = Reason.WRONG_SHAPE


class NotFound(EvenkeelError):
    """No such deployment, plan, epoch or route."""

    default_reason = Reason.NOT_FOUND


class Conflict(EvenkeelError):
    """The request was right for a state that has since changed."""

    default_reason = Reason.WRONG_PHASE


class InfeasiblePlan(EvenkeelError):
    """No placement can satisfy the invariants or the limits given."""


class PeerViolation(EvenkeelError):
    """A remote party sent what the protocol forbids; its stream is closed, the state kept."""

    default_reason = Reason.MALFORMED


class Unavailable(EvenkeelError):
    """Something needed is out of reach for now; calling again later may succeed."""

    default_reason = Reason.STORE_UNAVAILABLE


class IllegalEvent(EvenkeelError):
    """A machine received an event its table forbids: a bug of ours, with its history."""

    def __init__(
        self, machine: str, state: str, event: object, story: tuple[str, ...] = ()
    ) -> None:
        history = " <- ".join(reversed(story[-8:]))
        super().__init__(
            f"{machine} in state {state} cannot take {event!r}; history: {history or 'none'}"
        )
        self.machine = machine
        self.state = state
        self.event = event
        self.story = story
