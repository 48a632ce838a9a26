"""The KV caches that the ranks of a deployment tell, and what the store keeps of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.planning.decision.kv_promise import KvHistory, KvPromise, KvReport
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState

_DOCUMENT = "kv_cache"


@dataclass(eq=False, repr=False)
class KvCaches:
    """The KV caches of one deployment's ranks.

    Args:
        control: the machine; only read.
        shared: its store keeps the history, which outlives the group and the controller.
    """

    control: DeploymentState
    ranks: RankSessions
    shared: SharedServices
    _history: KvHistory = field(default=KvHistory(), init=False)
    _stored: KvHistory = field(default=KvHistory(), init=False)
    """As the store has it, as far as is known."""

    def smallest(self) -> KvMemory | None:
        """Return the smallest KV cache of the ranks; None unless every rank told its own."""
        membership, told = self.control.membership, []
        shape = membership.shape
        for member in membership.members.values():
            session = self.ranks.by_stream.get(member.stream)
            # While a group restarts, some members may be of the next generation.
            if session is None or session.kv_cache is None or session.hello.shape != shape:
                continue
            told.append(KvMemory(session.kv_cache.bytes_per_token, session.kv_cache.free_bytes))
        complete = shape is not None and len(told) == shape.num_ranks
        return min(told, key=KvMemory.tokens) if complete else None

    def promise(self) -> KvPromise | None:
        """Return the KV tokens that the present slots were to leave; None if none were promised."""
        shape = self.control.membership.shape
        return None if shape is None else self._history.promise(shape, self.smallest())

    async def restore(self) -> None:
        """Load the stored history; one that cannot be read is not used.

        Raises:
            Unavailable: the store is out of reach.
        """
        deployment = self.control.deployment
        body = await self.shared.store.fetch_document(deployment, _DOCUMENT)
        found = None if body is None else KvHistory.of_document(body)
        if found is not None:
            self._history = found
        elif body is not None:
            where = f"{deployment} {_DOCUMENT}"
            self.shared.health.unreadable("document", where, "it is no history of KV caches")
        self._stored = found or KvHistory()

    async def store_told(self, term: Callable[[], int]) -> None:
        """Note what the ranks tell, and store it if it is new.

        Raises:
            Unavailable: the store is out of reach; a later call stores it.
            Conflict: another replica leads.
        """
        shape, smallest = self.control.membership.shape, self.smallest()
        if shape is not None and smallest is not None:
            self._history = self._history.with_report(KvReport(shape, smallest))
        history = self._history
        if history != self._stored:
            body = history.document()
            await self.shared.store.store_document(self.control.deployment, _DOCUMENT, body, term())
            self._stored = history
