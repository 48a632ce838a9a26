"""How long machines wait, and for what."""

from dataclasses import dataclass, field

__all__ = ["ControlTiming", "WaveTiming"]


@dataclass(frozen=True, slots=True)
class WaveTiming:
    """Deadlines and resends of a wave. Steps are step_boundary calls, dummy steps included."""

    resend_s: float = 0.5
    """First wait for an answer; doubles up to `resend_max_s`."""
    resend_max_s: float = 5.0
    prepare_deadline_s: float = 120.0
    """From Prepare to the last vote; then the wave is aborted. Shorter than the copies take aborts every wave."""
    commit_deadline_s: float = 30.0
    commit_deadline_steps: int = 256
    """Both must pass from Commit to the first Ack before the wave is aborted; at least 2 K + D."""
    stall_after_s: float = 30.0
    stall_after_steps: int = 256
    """Both must pass without the missing answers before the wave is called stalled."""
    idle_after_s: float = 10.0
    """A fleet that took no step for this long is idle: waiting for it is `paused`, not `stalled`."""


@dataclass(frozen=True, slots=True)
class ControlTiming:
    """Seconds between things, and deadlines."""

    heartbeat_s: float = 2.5
    """Every rank is asked for its state this often, half as often at rest; it also keeps the ranks' lease on us alive."""
    ask_again_s: float = 1.0
    """After ranks disagreed in a recovery."""
    rank_lease_s: float = 10.0
    """A rank not heard for this long is lost; at least three heartbeats."""
    recovery_deadline_s: float = 30.0
    """A recovery that lasts longer alerts."""
    cycle_deadline_s: float = 300.0
    """A RunCycle not answered by then counts as a failed planner."""
    batch_deadline_s: float = 10.0
    """One batch of copies; then its communicator is aborted (R10)."""
    max_bytes_per_s: float = 0.0
    """Throttle of copies per rank; 0 is none."""
    wave: WaveTiming = field(default_factory=WaveTiming)

    def question_s(self, *, at_rest: bool) -> float:
        """Between two questions: a heartbeat; at rest two, unless that were more than half of a rank's lease."""
        longest = min(2 * self.heartbeat_s, self.rank_lease_s / 2) if at_rest else self.heartbeat_s
        return max(self.heartbeat_s, longest)
