"""Leads one deployment: takes the lease, loads the records, and lets the control machine lead."""

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import structlog

from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.leadership.leases import LeaseKeeper
from evenkeel_moe.controller.leadership.operator_state import OperatorState, OperatorStateRecovery
from evenkeel_moe.controller.leadership.takeover import Takeover, take_over
from evenkeel_moe.controller.machine_inbox import MachineInbox
from evenkeel_moe.controller.ranks.kv_caches import KvCaches
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.ports.stores import Lease
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.messages import Leader
from evenkeel_moe.protocol.terms import is_credible_term
from evenkeel_moe.settings import LeaderSettings
from evenkeel_moe.wire.link import NotLeader

_log = structlog.get_logger(__name__)
_DECISIONS = 100
"""Stored decision rows that a new leader loads."""


@dataclass(eq=False, repr=False)
class Leadership:
    """The leadership of one deployment on this replica.

    Args:
        advertise: host:port by which ranks reach this replica.
        decisions: rows of the decision log in memory, newest last; replaced when rows are loaded.
        lasting: the store has records of the deployment, as far as is known.
    """

    control: DeploymentState
    shared: SharedServices
    settings: LeaderSettings
    advertise: str
    inbox: MachineInbox
    loads: GroupLoads
    ranks: RankSessions
    kv: KvCaches
    decisions: deque[dict[str, Any]]
    lasting: InitVar[bool] = True
    term: int = field(default=0, init=False)
    """The term to write under; without a lease the last one we held."""
    keeper: LeaseKeeper = field(init=False)
    _restored: bool = field(default=False, init=False)
    _late: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False)
    """Documents that are stored once the deployment is claimed."""

    def __post_init__(self, lasting: bool) -> None:
        settings, control = self.settings, self.control
        self.keeper = LeaseKeeper(
            control.deployment,
            settings.replica_id,
            self.shared.store,
            self.shared.clock,
            lease_s=settings.lease_s,
            renew_s=settings.renew_s,
            alone=settings.replicas == 1,
            won=self._won,
            lost=lambda: self.inbox.post(ctl.LeaseLost()),
            outrun=self._outrun,
            lasting=lasting,
        )
        self._recovery = OperatorStateRecovery(settings.replica_id, control.policy)

    @property
    def machine_term(self) -> int:
        """The term the machine leads under.

        After a lease was lost and won again, this replica knows the new term before the machine
        does. What the machine decides until then must not be stored under the new term, because
        the records were already read under it.
        """
        leader = self.control.leader
        return self.term if leader is None else leader.term

    def remember_operator_state(self) -> None:
        """Keep the operator's settings in memory, in case the store loses them."""
        control = self.control
        if control.leader is not None and self.keeper.lasting:
            state = OperatorState(control.policy, control.hold, control.frozen_until)
            self._recovery.remember(control.leader.term, state)

    async def claim(self) -> None:
        """Keep records of the deployment from now on: all its ranks came, or an operator acts.

        Raises:
            Unavailable: the store did not take what must be stored first.
            Conflict: another replica leads.
        """
        if self.keeper.lasting and not self._late:
            return
        await self.keeper.claim()
        for name, body in list(self._late.items()):
            await self.shared.store.store_document(
                self.control.deployment, name, body, self.machine_term
            )
            self._late.pop(name, None)

    def raise_term(self, at_least: int) -> None:
        """Take the lease again under a term above the one that ranks know."""
        self._recovery.ranks_know(at_least)
        self.keeper.raise_term(at_least)

    def fenced(self, why: str) -> None:
        """Drop the lease after a refused write, unless we hold it under a later term."""
        if self.machine_term == self.term:
            self.keeper.drop(why)

    async def release(self, *, forget: bool = False) -> None:
        """Give the lease up.

        Args:
            forget: also note in the store that nobody leads the deployment any more, so that this
                replica does not take it up again after a restart.
        """
        if forget and self.keeper.leading and self.keeper.lasting:
            nobody = {"replica_id": "", "address": ""}
            with contextlib.suppress(Unavailable, Conflict):
                await self.shared.store.store_document(
                    self.control.deployment, "leader", nobody, self.term
                )
                await self.shared.store.unlist(self.control.deployment)
        await self.keeper.release(forget=forget)

    async def leader_address(self) -> NotLeader:
        """Return the answer that sends a rank to the leader, as far as it is known."""
        winner = self.keeper.winner
        try:
            body = await self.shared.store.fetch_document(self.control.deployment, "leader") or {}
        except Unavailable:
            body = {}
        leader = winner.holder if winner is not None else ""
        known = leader != self.settings.replica_id and body.get("replica_id") == leader
        return NotLeader(
            leader, str(body.get("address", "")) if known else "", self.settings.renew_s
        )

    # --- a lease that is won, and one that another replica holds ----------------------------------

    async def _won(self, lease: Lease) -> None:
        """Load the records, then let the machine lead, and present the connected ranks to it."""
        await self.shared.clock.follow(self.shared.store)
        for session in self.ranks.by_stream.values():
            known = session.hello.highest_term
            if is_credible_term(known, lease.term):
                self._recovery.ranks_know(known)
        found = await take_over(self.shared.store, self.control.deployment, lease, self._recovery)
        self._late = {} if lease.lasting else dict(found.restored.unstored)
        if found.led_by is None:
            self.loads.store_shape_again()
        if not self._restored or found.led_by not in (None, self.settings.replica_id):
            await self._restore()
        await self.kv.restore()
        leader = {"replica_id": self.settings.replica_id, "address": self.advertise}
        await self.shared.store.store_document(
            self.control.deployment, "leader", leader, lease.term, lease.lasting
        )
        self.term = lease.term
        self.inbox.post(
            ctl.LeaseAcquired(Leader(self.settings.replica_id, lease.term), self._records(found))
        )
        for session in self.ranks.registered():
            self.inbox.post(session.event(session.hello))

    def _records(self, found: Takeover) -> ctl.StoredRecords:
        """Return the records the machine starts with; log what the store lost."""
        restored = found.restored
        for name, why in restored.unreadable.items():
            self.shared.health.unreadable("document", f"{self.control.deployment} {name}", why)
        if not restored.loss:
            return found.records
        if "control" not in restored.unreadable and self.keeper.lasting:
            _log.error(
                "store_came_back_empty", deployment=self.control.deployment, detail=restored.loss
            )
        return replace(found.records, loss=restored.row(self.shared.clock.unix()))

    async def _restore(self) -> None:
        """Load windows and decisions, also if another replica led since they were in memory."""
        await self.loads.restore(self.ranks.generations)
        rows = await self.shared.store.fetch_decisions(self.control.deployment, _DECISIONS)
        if not self.keeper.lasting:
            return  # Those in memory are stored once the deployment has records.
        self.decisions.clear()
        self.decisions.extendleft(dict(row) for row in rows)
        self._restored = True

    def _outrun(self, _winner: Lease) -> None:
        """Send the ranks to the replica that leads."""
        if any(self.ranks.registered()):
            self.shared.spawn(self._send_away(), f"send-away-{self.control.deployment}")

    async def _send_away(self) -> None:
        answer = await self.leader_address()
        for session in self.ranks.registered():
            if not self.keeper.leading:
                session.stream.close(answer)
