"""Asking all ranks where they stand: what a leader must know before it plans (R12, R15)."""

from dataclasses import dataclass, field

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import RankState

__all__ = ["Disagreement", "GroupState", "QueryRound"]


@dataclass(frozen=True, eq=False, slots=True)
class GroupState:
    """What all ranks agree on."""

    epoch: Epoch
    placement: Placement
    weights_version: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why the ranks' answers do not make one group."""

    reason: Reason
    detail: str


@dataclass(slots=True)
class QueryRound:
    """Answers to one query, asked of all R ranks."""

    query: int
    """Answers to earlier queries do not count."""
    ranks: frozenset[EpRank]
    answers: dict[EpRank, RankState] = field(default_factory=dict)
    resend_at: float = 0.0
    again_at: float | None = None
    """When to ask anew; set after a disagreement."""

    def take(self, state: RankState) -> None:
        """Note one rank's answer, if it answers this query in full."""
        if state.query >= self.query and state.placement is not None:
            self.answers[state.identity.rank] = state

    @property
    def missing(self) -> tuple[EpRank, ...]:
        """Ranks that have not answered."""
        return tuple(sorted(self.ranks - self.answers.keys()))

    def held_wave(self) -> WaveKey | None:
        """A wave some rank still holds."""
        return next((a.wave for _, a in sorted(self.answers.items()) if a.wave is not None), None)

    def group(self) -> GroupState | Disagreement:
        """What the answers say together."""
        states = dict(sorted(self.answers.items()))
        for reason, what, values in (
            (
                Reason.WEIGHTS_VERSION_CHANGED,
                "weights version",
                [a.weights_version for a in states.values()],
            ),
            (Reason.EPOCH_DISAGREES, "epoch", [a.epoch for a in states.values()]),
            (
                Reason.EPOCH_DISAGREES,
                "placement digest",
                [a.placement_digest for a in states.values()],
            ),
        ):
            if len(set(values)) > 1:
                return Disagreement(reason, f"{what} of ranks {list(states)}: {values}")
        if len({a.checksums for a in states.values()}) > 1:
            return Disagreement(
                Reason.CHECKSUM_MISMATCH, f"ranks {list(states)} registered other weights"
            )
        first = states[min(states)]
        assert first.placement is not None
        return GroupState(
            first.epoch, first.placement, first.weights_version, first.checksums or ()
        )
