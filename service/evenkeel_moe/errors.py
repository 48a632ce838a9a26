"""The errors that Evenkeel raises, and the closed list of reasons.

::

    EvenkeelError
    ├── InvalidInput          the caller must correct the input
    │   └── ShapeMismatch     an array or a deployment has another shape than declared
    ├── NotFound              unknown deployment, plan or epoch
    ├── Conflict              valid input that does not fit the current state
    ├── InfeasiblePlan        no placement satisfies the limits
    ├── PeerViolation         a remote party violated the protocol
    ├── Unavailable           store, leader or rank not reachable: retry later
    └── IllegalEvent          a bug of ours: a machine got an event that its table forbids

"No plan", "not enough data" and "gate closed" are results, not errors: return values with a Reason.
"""

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reasons; also the metric labels and REST codes."""

    # Decisions of a cycle.
    PLAN_STARTED = "plan_started"
    PLAN_PROPOSED = "plan_proposed"
    MANUAL_REQUEST = "manual_request"
    BALANCE_BELOW_THRESHOLD = "balance_below_threshold"
    LOAD_CHANGED = "load_changed"
    OBSERVE_MODE = "observe_mode"
    SEPARATE_APPROVAL = "separate_approval"
    PLAN_IN_PROGRESS = "plan_in_progress"
    FROZEN = "frozen"
    OUTSIDE_SCHEDULE = "outside_schedule"
    RESIZING = "resizing"
    HELD_AFTER_ROLLBACK = "held_after_rollback"
    HELD_AFTER_DATA_LOSS = "held_after_data_loss"
    GAINS_NOT_DELIVERED = "gains_not_delivered"
    COOLDOWN = "cooldown"
    IMPLAUSIBLE_COUNTS = "implausible_counts"
    INSUFFICIENT_DATA = "insufficient_data"
    STALE_DATA = "stale_data"
    RANKS_MISSING = "ranks_missing"
    GROUP_STOPPED = "group_stopped"
    BALANCE_ABOVE_THRESHOLD = "balance_above_threshold"
    WAITING_CONSECUTIVE_WINDOWS = "waiting_consecutive_windows"
    NO_CHANGE = "no_change"
    GAIN_TOO_SMALL = "gain_too_small"
    GAIN_UNCERTAIN = "gain_uncertain"
    PAYBACK_TOO_LONG = "payback_too_long"
    PLANNER_STARTING = "planner_starting"
    PLANNER_FAILED = "planner_failed"
    STORE_UNAVAILABLE = "store_unavailable"
    NOT_LEADER = "not_leader"
    RECOVERING = "recovering"
    NO_STEPS = "no_steps"

    # Refused, ended and stalled plans.
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
    DEPLOYMENT_FAILED = "deployment_failed"
    DEPLOYMENT_IN_USE = "deployment_in_use"
    DISPLACED = "displaced"

    # Votes against a wave.
    CHECKSUM_MISMATCH = "checksum_mismatch"
    STAGING_TOO_SMALL = "staging_too_small"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_FAILED = "transfer_failed"
    TRANSPORT_NOT_DRAINED = "transport_not_drained"
    BUSY = "busy"

    # Invariants of a placement (R17).
    EXPERT_WITHOUT_REPLICA = "expert_without_replica"
    EXPERT_OUT_OF_RANGE = "expert_out_of_range"
    DUPLICATE_ON_RANK = "duplicate_on_rank"
    EMPTY_SLOTS = "empty_slots"
    WRONG_SHAPE = "wrong_shape"
    POOL_EXCEEDED = "pool_exceeded"
    MEMORY_EXCEEDED = "memory_exceeded"
    NO_SOURCE = "no_source"
    LIMIT_EXCEEDED = "limit_exceeded"

    # Quarantined reports.
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
    """Base class of the errors; `reason` is one of the closed list."""

    default_reason = Reason.INVALID_INPUT

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.reason = reason if reason is not None else self.default_reason


class InvalidInput(EvenkeelError):
    """The caller passed invalid input."""


class ShapeMismatch(InvalidInput):
    """An array or a declaration has another shape than the deployment."""

    default_reason = Reason.WRONG_SHAPE


class NotFound(EvenkeelError):
    """Unknown deployment, plan, epoch or route."""

    default_reason = Reason.NOT_FOUND


class Conflict(EvenkeelError):
    """Valid input that does not fit the current state."""

    default_reason = Reason.WRONG_PHASE


class InfeasiblePlan(EvenkeelError):
    """No placement satisfies the invariants and the limits."""


class PeerViolation(EvenkeelError):
    """A remote party violated the protocol. Its stream is closed; our state does not change."""

    default_reason = Reason.MALFORMED


class Unavailable(EvenkeelError):
    """Something needed is temporarily unavailable; a later call may succeed."""

    default_reason = Reason.STORE_UNAVAILABLE


class IllegalEvent(EvenkeelError):
    """A machine received an event that its table forbids: a bug of ours. Carries the history."""

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
