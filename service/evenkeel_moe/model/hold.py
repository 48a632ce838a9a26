"""The hold on automatic plans: they wait for an operator's `resume`, for a reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenkeel_moe.errors import Reason

_LATEST = 1e15
"""Unix seconds beyond which a stored time is no time."""

REASONS = (Reason.HELD_AFTER_ROLLBACK, Reason.HELD_AFTER_DATA_LOSS, Reason.GAINS_NOT_DELIVERED)
"""A hold has one of these reasons. An unknown stored reason is read as the first one."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The hold on automatic plans, as it is kept over restarts."""

    because: Reason | None = None
    """One of `REASONS`; None if automatic plans are not held."""
    judged_from: float = 0.0
    """Unix seconds of the newest `resume` after GAINS_NOT_DELIVERED: plans measured earlier do not
    stop `auto` again."""

    def document(self) -> dict[str, Any]:
        """Return the hold as it is stored; what has its default value is left out."""
        body: dict[str, Any] = {"held": self.because is not None}
        if self.because not in (None, Reason.HELD_AFTER_ROLLBACK):
            body["held_because"] = self.because.value
        return body | ({"judged_from": self.judged_from} if self.judged_from else {})

    @classmethod
    def of_document(cls, body: Mapping[str, Any]) -> "Hold":
        """Read a stored hold. Values that cannot be read have their default; `held` counts."""
        because = None
        if body.get("held"):
            told = (reason for reason in REASONS if reason.value == body.get("held_because"))
            because = next(told, Reason.HELD_AFTER_ROLLBACK)
        since = body.get("judged_from", 0.0)
        known = isinstance(since, int | float) and -_LATEST <= since <= _LATEST
        return cls(because, float(since) if known else 0.0)
