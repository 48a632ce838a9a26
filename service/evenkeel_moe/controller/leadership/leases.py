"""Takes and keeps the lease of a deployment, and drops it before another replica can take it."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import structlog

from evenkeel_moe.controller.tasks import end_tasks
from evenkeel_moe.errors import Conflict, EvenkeelError, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.stores import Clock, DeploymentStore, Lease

_log = structlog.get_logger(__name__)
_RETRY_S = 1.0
"""Longest wait before the next attempt after the store refused a lease or did not answer."""
_EXPIRED_WHILE_LOADING = "it ran out while the records were loaded"


class _StoreSilent(Unavailable):
    """The store did not answer while the lease was ours."""


@dataclass(eq=False, repr=False)
class LeaseKeeper:
    """The lease of one deployment.

    Args:
        holder: this replica.
        alone: there is no other replica, so an unreachable store cannot have given the lease away.
        won: called with a new lease. If it raises Unavailable, the lease is taken again.
        lost: called when the lease is lost or may be lost.
        outrun: called with the lease when another replica holds it.
        lasting: the store has records of the deployment, as far as is known.
    """

    deployment: DeploymentId
    holder: str
    store: DeploymentStore
    clock: Clock
    _: KW_ONLY
    lease_s: float
    renew_s: float
    alone: bool
    won: Callable[[Lease], Coroutine[Any, Any, None]]
    lost: Callable[[], None]
    outrun: Callable[[Lease], None]
    lasting: bool = True
    """False while the store keeps nothing beyond the leadership; see `claim`."""
    lease: Lease | None = field(default=None, init=False)
    """Our lease; None while we hold none."""
    winner: Lease | None = field(default=None, init=False)
    """The newest answer of the store, which tells who leads."""
    fault: Unavailable | None = field(default=None, init=False)
    """The error of the store's last answer; None after a good answer, and while no lease is
    wanted."""
    _held_since: float = field(default=0.0, init=False)
    _at_least: int = field(default=0, init=False)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)

    @property
    def leading(self) -> bool:
        """True if we hold the lease and have loaded the records."""
        return self.lease is not None

    def want(self) -> None:
        """Try to take the lease from now on."""
        self._wanted.set()

    def raise_term(self, at_least: int) -> None:
        """Take the lease again under a higher term: the ranks know a term above ours (R2)."""
        self._at_least = max(self._at_least, at_least)
        self.lease = None
        self._wanted.set()

    async def claim(self) -> None:
        """Keep the records of the deployment from now on: it is not new any more.

        Raises:
            Conflict: the lease is lost. Of a new deployment the store also forgets the term, which
                would refuse the writes of a replica that no longer leads.
            Unavailable: the store did not answer.
        """
        if self.lasting:
            return
        lease = self.lease
        if lease is None or not await self._renew(replace(lease, lasting=True)):
            raise Conflict(f"{self.deployment}: another replica leads", Reason.LEASE_LOST)
        self.lasting = True

    async def _renew(self, lease: Lease) -> bool:
        return await self.store.renew_lease(self.deployment, lease, self.lease_s)

    def drop(self, why: str) -> None:
        """Drop the lease without telling the machine, which the caller has told."""
        _log.warning("lease_lost", deployment=self.deployment, why=why)
        self.lease = None

    def lose(self, why: str) -> None:
        """Drop the lease, if there is one, and tell the machine: another replica leads."""
        if self.lease is not None:
            self._lose(why)

    async def yield_lease(self, why: str) -> None:
        """Let another replica take the lease, and do not try again until `want` is called."""
        lease = self.lease
        if lease is None:
            return
        self._wanted.clear()
        self.winner = self.fault = None
        self._lose(why)
        await self._give_back(lease)

    async def decided(self, timeout_s: float) -> None:
        """Try to take the lease; wait until it is known who leads, or for the timeout."""
        self.want()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.lease is not None or self._other_leads())
        except TimeoutError:
            return

    def _other_leads(self) -> bool:
        return self.winner is not None and self.winner.holder != self.holder

    async def run(self) -> None:
        """Take the lease when it is wanted, and keep it, until cancelled."""
        while True:
            await self._wanted.wait()
            if await self._acquire():
                await self._keep()
            else:
                await asyncio.sleep(min(self.renew_s, _RETRY_S))

    async def release(self, *, forget: bool = False) -> None:
        """Give the lease up, so that another replica need not wait until it runs out.

        Args:
            forget: also delete what the store has of a new deployment.
        """
        lease, self.lease = self.lease, None
        if lease is not None:
            await self._give_back(lease, forget=forget)

    async def _give_back(self, lease: Lease, *, forget: bool = False) -> None:
        try:
            if forget and not self.lasting:
                await self.store.drop_lease(self.deployment, lease)
            else:
                await self.store.release_lease(self.deployment, lease)
        except Unavailable as error:
            _log.info("lease_not_released", deployment=self.deployment, error=str(error))

    async def _acquire(self) -> bool:
        """Ask for the lease once; return True if we hold it and the records are loaded."""
        asked_at = self.clock.monotonic()
        try:
            self.winner = await self.store.acquire_lease(
                self.deployment, self.holder, self.lease_s, self._at_least, self.lasting
            )
            self.lasting = self.winner.lasting
            if self.winner.holder == self.holder:
                self._held_since = asked_at
                await self._load(self.winner)
                self.lease = self.winner
                if not self.alone and self.clock.monotonic() - self._held_since >= self.lease_s:
                    self._lose(_EXPIRED_WHILE_LOADING)
                    return False
                self._at_least = max(self._at_least, self.winner.term)
                _log.info("leading", deployment=self.deployment, term=self.winner.term)
            else:
                self.outrun(self.winner)
            self.fault = None
        except EvenkeelError as error:
            self.fault = error if isinstance(error, Unavailable) else None
            _log.warning("lease_not_acquired", deployment=self.deployment, error=str(error))
            return False
        async with self._changed:
            self._changed.notify_all()
        return self.lease is not None

    async def _load(self, lease: Lease) -> None:
        """Load the records, and renew the lease meanwhile: large plans may take longer to read.

        Raises:
            Conflict: another replica took the lease.
        """
        loading = asyncio.create_task(self.won(lease))
        try:
            while not (await asyncio.wait((loading,), timeout=self.renew_s))[0]:
                left = None if self.alone else self._ends_at - self.clock.monotonic()
                if not await self._prolong(lease, left):
                    raise Conflict(_EXPIRED_WHILE_LOADING, Reason.LEASE_LOST)
            loading.result()
        except EvenkeelError:
            if loading.done() and loading.exception() is None:
                self.lost()  # The records were loaded as the renewal failed: the machine leads.
            raise
        finally:
            await end_tasks((loading,))

    @property
    def _ends_at(self) -> float:
        """Monotonic seconds from which on another replica may have the lease."""
        return self._held_since + self.lease_s

    async def _prolong(self, lease: Lease, within_s: float | None) -> bool:
        """Renew a lease; return False if it is no longer ours.

        Raises:
            Unavailable: the store did not take it; `_StoreSilent` if it did not answer in time.
        """
        asked_at = self.clock.monotonic()
        try:
            async with asyncio.timeout(within_s):
                held = await self._renew(lease)
        except TimeoutError:
            raise _StoreSilent(f"the store did not answer within {within_s or 0:g} s") from None
        if held:
            self._held_since = asked_at
        return held

    async def _keep(self) -> None:
        """Renew the lease until it is lost, may be lost, or is to be taken again."""
        while (lease := self.lease) is not None:
            await asyncio.sleep(self._pause_s())
            if self.lease is None:
                break
            try:
                held = await self._prolong(replace(lease, lasting=self.lasting), self._answer_s())
                self.fault = None
                if not held:
                    taken = "" if self.alone else ", or another replica took it"
                    self._lose(f"it ran out in the store{taken}")
            except Unavailable as error:
                if self.lease is not lease:
                    break  # It was given up: no later answer would end a fault.
                self.fault = error
                gone = not self.alone and self.clock.monotonic() >= self._gone_at
                if isinstance(error, _StoreSilent) or gone:
                    self._lose(f"{error}: it may have run out")

    @property
    def _gone_at(self) -> float:
        """Monotonic seconds at which a lease that cannot be renewed is dropped: before it ends."""
        return self._ends_at - self.renew_s

    def _pause_s(self) -> float:
        """Return the wait before the next renewal; after a failure not longer than the lease."""
        if self.fault is None:
            return self.renew_s
        pause_s = min(self.renew_s, _RETRY_S)
        return pause_s if self.alone else min(pause_s, self._gone_at - self.clock.monotonic())

    def _answer_s(self) -> float | None:
        """Return the time for the store to answer: until the lease is dropped.

        A store that is asked late gets a moment more, but less than what is left of the lease.
        """
        if self.alone:
            return None
        now = self.clock.monotonic()
        moment_s = min(self.lease_s / 10, (self._ends_at - now) / 2)
        return max(self._gone_at - now, moment_s, 0.0)

    def _lose(self, why: str) -> None:
        self.drop(why)
        self.lost()
