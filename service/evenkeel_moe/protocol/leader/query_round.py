"""One question to all ranks and the comparison of their answers (R12, R15)."""

from dataclasses import dataclass, field, replace

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import RankState, WaveOutcome


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
    """The answers of all R ranks to one query.

    One rank, the witness, tells the whole placement and all checksums. The others name the
    placement by its digest, and had their checksums compared by digest at their Hello. A thousand
    whole answers would be gigabytes.
    """

    query: int
    """Answers to earlier queries do not count."""
    ranks: frozenset[EpRank]
    all_checksums: bool = False
    """All ranks tell their checksums: their weights may be others than those of their Hellos."""
    answers: dict[EpRank, RankState] = field(default_factory=dict)
    """The answers without placements and checksums."""
    placement: Placement | None = None
    """As the witness told it."""
    checksums: set[tuple[int, ...]] = field(default_factory=set)
    """The different ones of all answers."""
    witness: EpRank | None = field(init=False)
    resend_at: float = 0.0
    repeat_at: float | None = None
    """Time of the next round; set after a disagreement."""

    def __post_init__(self) -> None:
        self.witness = min(self.ranks, default=None)

    def take(self, state: RankState) -> None:
        """Add a rank's answer if it is complete and answers this query."""
        rank, placement = state.identity.rank, state.placement
        if state.query < self.query:
            return
        if rank == self.witness:
            # The others name this placement by its digest, so its own digest has to be right.
            if placement is None or placement.digest != state.placement_digest:
                return
            self.placement = placement
        if self.all_checksums and state.checksums is None and state.query != self.query:
            return  # It answers a later question, which did not ask for them.
        if rank == self.witness or self.all_checksums:
            self.checksums.add(state.checksums or ())
        self.answers[rank] = replace(state, placement=None, checksums=None)

    @property
    def complete(self) -> bool:
        """True once all ranks have answered."""
        return len(self.answers) >= len(self.ranks) > 0 and self.ranks <= self.answers.keys()

    @property
    def missing(self) -> tuple[EpRank, ...]:
        """The ranks that have not answered."""
        return tuple(sorted(self.ranks - self.answers.keys()))

    def held_wave(self) -> WaveKey | None:
        """Return a wave that some rank still holds, or None."""
        return next((a.wave for _, a in sorted(self.answers.items()) if a.wave is not None), None)

    def may_follow(self, wave: WaveKey) -> bool:
        """Return False if the ranks know that this wave did not lead to their epoch (R12).

        A rank names the wave that ended last on it. A wave that it has dropped since hides the one
        that it swapped; then the epoch and the map have to do.
        """
        answers = self.answers.values()
        swapped = {a.last_wave for a in answers if a.last_outcome is WaveOutcome.SWAPPED}
        if swapped:
            return wave in swapped
        return all(answer.last_wave not in (None, wave) for answer in answers)

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
        if len(self.checksums) > 1:
            detail = f"ranks {list(states)} registered other weights"
            return Disagreement(Reason.CHECKSUM_MISMATCH, detail)
        first = next(iter(states.values()))
        assert self.placement is not None
        (checksums,) = self.checksums
        return GroupState(first.epoch, self.placement, first.weights_version, checksums)
