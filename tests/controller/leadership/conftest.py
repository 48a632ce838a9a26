"""Lease keepers on one store that can be made to fail."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.leadership.leases import LeaseKeeper
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import DeploymentId
from tests.contracts.memory_store import MemoryStore
from tests.waiting import deadline, until

DEMO = DeploymentId("demo")


class JumpingClock(SystemClock):
    """A monotonic clock that can be set forward, or stand still."""

    ahead_s = 0.0
    still_at: float | None = None

    def monotonic(self):
        return super().monotonic() + self.ahead_s if self.still_at is None else self.still_at


class Rig:
    """Keepers on one store that can be made to fail."""

    def __init__(self):
        self.clock = JumpingClock()
        self.store = MemoryStore(self.clock)
        self.down = self.silent = self.silent_renewals = False
        self.loaded = asyncio.Event()
        """Set while the records can be read."""
        self.loaded.set()
        self.happened = []
        self.start: Any = None
        """The fixture's function that starts a keeper."""
        self.calls: Counter[str] = Counter()

    async def acquire_lease(self, *arguments):
        return await self._ask(self.store.acquire_lease, *arguments)

    async def renew_lease(self, *arguments):
        return await self._ask(self.store.renew_lease, *arguments)

    async def release_lease(self, *arguments):
        return await self._ask(self.store.release_lease, *arguments)

    async def drop_lease(self, *arguments):
        return await self._ask(self.store.drop_lease, *arguments)

    async def _ask(self, method, *arguments):
        self.calls[method.__name__] += 1
        if self.silent or (self.silent_renewals and method.__name__ == "renew_lease"):
            await asyncio.Event().wait()
        if self.down:
            raise Unavailable("down")
        return await method(*arguments)

    def keeper(self, holder, *, alone=False, load_fails=0, lasting=True) -> LeaseKeeper:
        fails = [load_fails]

        async def won(lease):
            await self.loaded.wait()
            if fails[0]:
                fails[0] -= 1
                raise Unavailable("records cannot be read")
            self.happened.append(("won", holder, lease.term))

        return LeaseKeeper(
            DEMO,
            holder,
            self,  # type: ignore[arg-type]
            self.clock,
            lease_s=0.3,
            renew_s=0.03,
            alone=alone,
            won=won,
            lost=lambda: self.happened.append(("lost", holder)),
            outrun=lambda lease: self.happened.append(("outrun", holder, lease.holder)),
            lasting=lasting,
        )

    async def decided(self, *arguments, **options):
        """Start a keeper and wait until it is known who leads; return the keeper."""
        keeper = self.start(*arguments, **options)
        await keeper.decided(deadline(5))
        return keeper

    async def until(self, ask):
        await until(ask, every_s=0.01, what=f"a change after {self.happened}")

    async def after(self, method, count):
        """Wait until the store was asked that many more times."""
        wanted = self.calls[method] + count
        await self.until(lambda: self.calls[method] >= wanted)


@pytest.fixture
async def rig():
    rig = Rig()
    tasks = []

    def start(*arguments, **options):
        keeper = rig.keeper(*arguments, **options)
        tasks.append(asyncio.create_task(keeper.run()))
        return keeper

    rig.start = start
    yield rig
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
