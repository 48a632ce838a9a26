"""One question to all ranks and the comparison of their answers (R12, R15)."""

from dataclasses import dataclass, field

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import RankState


@dataclass(frozen=True, eq=False, slots=True)
class GroupState:
    """The state of the EP group, equal on all ranks."""

    epoch: Epoch
    placement: Placement
    weights_version: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The reason why there is no common state of the ranks."""

    reason: Reason
    detail: str


@dataclass(slots=True)
class QueryRound:
    """The answers of all R ranks to one query."""

    query: int
    """Answers to earlier queries do not count."""
    ranks: frozenset[EpRank]
    answers: dict[EpRank, RankState] = field(default_factory=dict)
    resend_at: float = 0.0
    repeat_at: float | None = None
    """Time of the next round; set after a disagreement."""

    def take(self, state: RankState) -> None:
        """Add a rank's answer if it is complete and answers this query."""
        if state.query >= self.query and state.placement is not None:
            self.answers[state.identity.rank] = state

    @property
    def missing(self) -> tuple[EpRank, ...]:
        """The ranks that have not answered."""
        return tuple(sorted(self.ranks - self.answers.keys()))

    def held_wave(self) -> WaveKey | None:
        """Return a wave that some rank still holds, or None."""
        return next((a.wave for _, a in sorted(self.answers.items()) if a.wave is not None), None)

    def group_state(self) -> GroupState | Disagreement:
        """Return the state all answers agree on, or how they differ."""
        states = dict(sorted(self.answers.items()))
        weights, epoch = Reason.WEIGHTS_VERSION_CHANGED, Reason.EPOCH_DISAGREES
        for reason, name, values in (
            (weights, "weights version", [a.weights_version for a in states.values()]),
            (epoch, "epoch", [a.epoch for a in states.values()]),
            (epoch, "placement digest", [a.placement_digest for a in states.values()]),
        ):
            if len(set(values)) > 1:
                return Disagreement(reason, f"{name} of ranks {list(states)}: {values}")
        if len({a.checksums for a in states.values()}) > 1:
            detail = f"ranks {list(states)} registered other weights"
            return Disagreement(Reason.CHECKSUM_MISMATCH, detail)
        first = states[min(states)]
        assert first.placement is not None
        return GroupState(
            first.epoch, first.placement, first.weights_version, first.checksums or ()
        )
