"""Intervals and deadlines of the leader's machines."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WaveTiming:
    """Deadlines of a wave. Steps count `step_boundary` calls, including dummy steps."""

    resend_s: float = 0.5
    """Time until a question is first sent again; it doubles up to `resend_max_s`."""
    resend_max_s: float = 5.0
    prepare_deadline_s: float = 120.0
    """Longest time from Prepare to the last vote, else the wave is aborted.

    If it is shorter than the copies take, every wave is aborted.
    """
    commit_deadline_s: float = 30.0
    commit_deadline_steps: int = 256
    """The wave is aborted when this many seconds and steps have passed after Commit without an Ack.

    The steps must be at least 2 K + D of the gate.
    """
    stall_after_s: float = 30.0
    stall_after_steps: int = 256
    """The wave is reported as stalled after this many seconds and steps without all answers."""
    idle_after_s: float = 10.0
    """Time without a step after which the group is idle, and its wave `paused`, not `stalled`."""


@dataclass(frozen=True, slots=True)
class ControlTiming:
    """Intervals and deadlines of a deployment, in seconds."""

    heartbeat_s: float = 2.5
    """Time between two questions to every rank; the questions also show the ranks a live leader."""
    ask_again_s: float = 1.0
    """Time until all ranks are asked again after their answers disagreed."""
    rank_lease_s: float = 10.0
    """A rank that was not heard for this long is lost; at least three heartbeats."""
    recovery_deadline_s: float = 30.0
    """A recovery that lasts longer raises an alert."""
    cycle_deadline_s: float = 120.0
    """A planner that has not answered after this time counts as failed."""
    batch_deadline_s: float = 10.0
    """Longest time for one batch of copies; after it the communicator is aborted (R10)."""
    max_bytes_per_s: float = 0.0
    """Limit on a rank's copies; 0 means no limit."""
    wave: WaveTiming = field(default_factory=WaveTiming)

    def question_s(self, *, at_rest: bool) -> float:
        """Return the time between two questions.

        At rest it is two heartbeats, but at most half of a rank's lease; otherwise one heartbeat.
        """
        if not at_rest:
            return self.heartbeat_s
        return max(self.heartbeat_s, min(2 * self.heartbeat_s, self.rank_lease_s / 2))
