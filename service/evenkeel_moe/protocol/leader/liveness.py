"""Regular questions to all ranks, and the ranks that were lost or came back between them."""

from collections.abc import Sequence

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol.control_messages import RankConnected, RankLost, SendToRank
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.messages import QueryState


class Liveness:
    """The ranks of one deployment that are not heard, under one term."""

    def __init__(self, recovery: Recovery) -> None:
        self._membership = recovery.executor.membership
        self._recovery = recovery
        self._timing = recovery.timing
        self._asked_at = float("-inf")
        self._lost: set[EpRank] = set()

    def begin_generation(self) -> None:
        """Forget the lost ranks: all ranks of a new generation have just connected."""
        self._lost.clear()

    def connected(self, rank: EpRank) -> None:
        """Note that a rank has said hello."""
        self._lost.discard(rank)

    def changes(self, now: float) -> Sequence[RankConnected | RankLost]:
        """Return an event for each rank that was lost or came back since the last call."""
        events: list[RankConnected | RankLost] = []
        generation = self._membership.generation
        for rank, member in self._membership.members.items():
            identity = member.hello.identity
            present = self._membership.is_fresh(member, now) and identity.generation == generation
            if present and rank in self._lost:
                self._lost.discard(rank)
                events.append(RankConnected(rank, identity.incarnation, member.stream))
            elif not present and rank not in self._lost:
                self._lost.add(rank)
                events.append(RankLost(rank))
        return events

    def questions(self, now: float, *, at_rest: bool) -> Sequence[SendToRank]:
        """Return a question to every rank if it is time; `at_rest`: no plan is under way."""
        if now < self._asked_at + self._timing.question_s(at_rest=at_rest):
            return []
        self._asked_at = now
        self._recovery.query += 1
        query = QueryState(self._recovery.executor.leader, query=self._recovery.query)
        everyone = self._membership.everyone
        return [SendToRank(rank, member.stream, query) for rank, member in everyone.items()]
