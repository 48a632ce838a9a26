"""What keeps plans from beginning until an operator's `resume`: a hold, and ranks that retire."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import EpRank

_LATEST = 1e15
"""Unix seconds beyond which a stored time is no time."""

REASONS = (Reason.HELD_AFTER_ROLLBACK, Reason.HELD_AFTER_DATA_LOSS, Reason.GAINS_NOT_DELIVERED)
"""A hold has one of these reasons. An unknown stored reason is read as the first one."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """Ranks that leave a group. It ends when the group has another number of ranks."""

    ranks: tuple[EpRank, ...]
    """In rising order."""
    num_ranks: int
    """R, ranks of the group that they leave."""

    @classmethod
    def of_document(cls, body: object) -> "Retirement":
        """Read a stored one.

        Raises:
            InvalidInput: it names no ranks of a group.
        """
        ranks, num_ranks = (
            (body.get("ranks"), body.get("num_ranks")) if isinstance(body, Mapping) else (None, 0)
        )
        if (
            type(num_ranks) is not int
            or not isinstance(ranks, list | tuple)
            or not all(type(rank) is int and 0 <= rank < num_ranks for rank in ranks)
            or not 0 < len(set(ranks)) < num_ranks
        ):
            raise InvalidInput(f"the stored retirement of ranks is {body!r:.200}")
        return cls(tuple(sorted({EpRank(rank) for rank in ranks})), num_ranks)


@dataclass(frozen=True, slots=True)
class Hold:
    """The hold on plans, as it is kept over restarts."""

    because: Reason | None = None
    """One of `REASONS`; None if automatic plans are not held."""
    judged_from: float = 0.0
    """Unix seconds of the newest `resume` after GAINS_NOT_DELIVERED: plans measured earlier do not
    stop `auto` again."""
    retiring: Retirement | None = None
    """While ranks retire, only evacuations and rollbacks begin, in every mode."""

    def document(self) -> dict[str, Any]:
        """Return the hold as it is stored; what has its default value is left out."""
        body: dict[str, Any] = {"held": self.because is not None}
        if self.because not in (None, Reason.HELD_AFTER_ROLLBACK):
            body["held_because"] = self.because.value
        if self.retiring is not None:
            body["retiring"] = asdict(self.retiring)
        return body | ({"judged_from": self.judged_from} if self.judged_from else {})

    @classmethod
    def of_document(cls, body: Mapping[str, Any]) -> "Hold":
        """Read a stored hold. Values that cannot be read have their default; `held` counts.

        Raises:
            InvalidInput: ranks retire, and which ones cannot be read.
        """
        because = None
        if body.get("held"):
            told = (reason for reason in REASONS if reason.value == body.get("held_because"))
            because = next(told, Reason.HELD_AFTER_ROLLBACK)
        since = body.get("judged_from", 0.0)
        known = isinstance(since, int | float) and -_LATEST <= since <= _LATEST
        stored = body.get("retiring")
        retiring = None if stored is None else Retirement.of_document(stored)
        return cls(because, float(since) if known else 0.0, retiring)
