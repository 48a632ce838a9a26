"""Remembers deployments whose parts failed on this replica, and when each may start again."""

from dataclasses import dataclass

from evenkeel_moe.model.ids import DeploymentId

_LONGEST_PAUSE_S = 300.0
_SOUND_AFTER_S = 600.0
"""Seconds without a failure after which the next one counts as the first."""
_MOST_NAMES = 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """The newest failure of a deployment."""

    detail: str
    """The error, for logs and answers."""
    pause_s: float
    """Seconds for which the deployment does not start again."""
    at: float
    """Monotonic seconds."""

    def left_s(self, now: float) -> float:
        """Return the seconds until the deployment may start again; at least 0."""
        return max(0.0, self.at + self.pause_s - now)


class DeploymentFailures:
    """The failures of this replica's deployments. The pause doubles with each failure in a row.

    Args:
        first_pause_s: pause after the first failure.
    """

    def __init__(self, first_pause_s: float = 5.0) -> None:
        self._first_pause_s = first_pause_s
        self._newest: dict[DeploymentId, Failure] = {}

    def note(self, name: DeploymentId, error: BaseException, now: float) -> Failure:
        """Remember a failure and return it with its pause."""
        before = self._newest.pop(name, None)
        pause_s = self._first_pause_s
        if before is not None and now - before.at < before.pause_s + _SOUND_AFTER_S:
            pause_s = min(2 * before.pause_s, _LONGEST_PAUSE_S)
        failure = Failure(f"{type(error).__name__}: {error}"[:300], pause_s, now)
        self._newest[name] = failure
        while len(self._newest) > _MOST_NAMES:
            del self._newest[next(iter(self._newest))]
        return failure

    def waiting(self, name: DeploymentId, now: float) -> Failure | None:
        """Return the failure for which a deployment must still wait; None if it may start."""
        failure = self._newest.get(name)
        return failure if failure is not None and failure.left_s(now) > 0 else None
