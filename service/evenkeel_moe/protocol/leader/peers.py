"""The ranks of one wave as its leader sees them: who was asked, who answered, who is lost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.control_messages import FromRank, SendToRank
from evenkeel_moe.protocol.messages import ControllerMessage, RankState
from evenkeel_moe.protocol.timing import WaveTiming


@dataclass(slots=True)
class Peer:
    """One rank. `answered` and `times_asked` refer to the question of the wave's current state."""

    incarnation: int
    stream: int
    asked_on: int = -1
    """The stream the current question was sent on; -1 before it was sent."""
    times_asked: int = 0
    answered: bool = False
    lost: bool = False
    resend_at: float = 0.0
    wait_s: float = 0.0
    """Time between the last two sends of the question; it doubles."""
    state: RankState | None = None
    """The answer to the query of a recovery."""


class Peers:
    """All R ranks of a wave.

    Args:
        peers: (incarnation, stream) of each rank.
    """

    def __init__(
        self, wave: WaveKey, peers: Mapping[EpRank, tuple[int, int]], timing: WaveTiming
    ) -> None:
        self._wave = wave
        self._timing = timing
        self.by_rank = {rank: Peer(*peers[rank]) for rank in sorted(peers)}

    def __getitem__(self, rank: EpRank) -> Peer:
        return self.by_rank[rank]

    @property
    def pending(self) -> tuple[EpRank, ...]:
        """The ranks that have not answered the current question."""
        return tuple(rank for rank, peer in self.by_rank.items() if not peer.answered)

    @property
    def any_answered(self) -> bool:
        """True if a rank has answered the current question."""
        return any(peer.answered for peer in self.by_rank.values())

    @property
    def states(self) -> list[RankState]:
        """The answers to the query of a recovery."""
        return [peer.state for peer in self.by_rank.values() if peer.state is not None]

    def counts(self, event: FromRank) -> bool:
        """R1: an answer counts only from the process and the stream that got the question."""
        peer = self.by_rank.get(event.rank)
        if peer is None or peer.incarnation != event.incarnation or peer.asked_on != event.stream:
            return False
        wave = getattr(event.message, "wave", None)
        return isinstance(event.message, RankState) or wave == self._wave

    def is_unsent(self) -> bool:
        """R14: the question has not gone out to some rank, so the wave waits for the store."""
        return any(not peer.answered and not peer.times_asked for peer in self.by_rank.values())

    def ask_all(self, question: ControllerMessage, now: float) -> list[SendToRank]:
        """Begin a new question: forget all answers and ask every rank."""
        for peer in self.by_rank.values():
            peer.answered, peer.wait_s, peer.times_asked = False, 0.0, 0
        return [self.ask(rank, question, now) for rank in self.by_rank]

    def ask_again(self, question: ControllerMessage, now: float) -> list[SendToRank]:
        """Ask every rank whose answer is overdue."""
        return [
            self.ask(rank, question, now)
            for rank, peer in self.by_rank.items()
            if not peer.answered and now >= peer.resend_at
        ]

    def ask(self, rank: EpRank, question: ControllerMessage, now: float) -> SendToRank:
        """Ask one rank, on its newest stream."""
        peer, timing = self.by_rank[rank], self._timing
        peer.wait_s = min(max(2 * peer.wait_s, timing.resend_s), timing.resend_max_s)
        peer.resend_at = now + peer.wait_s
        peer.asked_on = peer.stream
        peer.times_asked += 1
        return SendToRank(rank, peer.stream, question)

    def not_sent(self, messages: Iterable[SendToRank]) -> None:
        """Note that the shell skipped these sends; the next tick asks again."""
        for action in messages:
            if getattr(action.message, "wave", None) == self._wave:
                peer = self.by_rank[action.rank]
                peer.times_asked = max(0, peer.times_asked - 1)
                if not peer.times_asked:
                    peer.wait_s = peer.resend_at = 0.0
