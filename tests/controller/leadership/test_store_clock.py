"""Times that outlast a leadership are those of the store's clock, which all replicas share."""

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.store_clock import StoreClock
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.plan import PlanKind
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import DEMO, Replica, SetClock
from tests.waiting import until

HOUR_S = 3600.0
CLOCKS = pytest.mark.fault(
    "two controller replicas whose clocks are an hour apart",
    "after a takeover a freeze was gone, or lasted an hour more",
)


@CLOCKS
@pytest.mark.parametrize("ahead_s", [(0.0, HOUR_S), (HOUR_S, 0.0), (-HOUR_S, HOUR_S)])
async def test_a_freeze_ends_when_it_should_after_a_takeover(ahead_s):
    store, clocks, made = MemoryStore(SystemClock()), [SetClock(), SetClock()], []
    for name, clock, ahead in zip("ab", clocks, ahead_s, strict=True):
        clock.ahead_s = ahead
        made.append(Replica(store, name, clock=clock))
    first, second = made
    try:
        sessions = await first.lead()
        await first.operations.freeze(DEMO, 600.0, "ann")
        ends_at = SystemClock().unix() + 600.0
        await first.yield_lease(sessions)
        await second.lead(first=11, highest_term=1)
        control, now = second.member.control, second.member.clock
        left_s = control.frozen_until - now.unix()
        assert left_s == pytest.approx(ends_at - SystemClock().unix(), abs=2.0)
        assert control.frozen_until == pytest.approx(ends_at, abs=2.0)
        assert control.unix_offset_s == pytest.approx(now.unix() - now.monotonic(), abs=2.0)
        # The freeze is over when it should be, whatever the machine's own clock says.
        loop = control.as_leader.planning_loop
        assert loop is not None
        monotonic_end = ends_at - control.unix_offset_s
        assert loop.closed(monotonic_end - 5.0, PlanKind.AUTOMATIC) is not None
        assert loop.closed(monotonic_end + 5.0, PlanKind.AUTOMATIC) is None
    finally:
        for replica in made:
            await replica.tasks.end()


@CLOCKS
async def test_a_machine_follows_the_clock_of_the_store_that_was_set(leading_two):
    registry, _, clock = leading_two
    store = registry.shared.store
    member = next(iter(registry.deployments.values()))
    store._clock = SystemClock()
    clock.ahead_s = HOUR_S
    await registry.shared.clock.follow(store)
    assert member.clock.unix() == pytest.approx(SystemClock().unix(), abs=1.5)
    await until(
        lambda: (
            abs(member.control.unix_offset_s - (member.clock.unix() - member.clock.monotonic()))
            < 1.5
        )
    )


class StillClock(SystemClock):
    """A clock that stands still until it is moved."""

    at, steady = 1000.0, 50.0

    def unix(self):
        return self.at

    def monotonic(self):
        return self.steady


class SlowStore(MemoryStore):
    """Tells a time, after some seconds of the asker's clock."""

    told, took_s = 1000.0, 0.0

    async def unix(self):
        self._clock.steady += self.took_s  # type: ignore[attr-defined]
        if self.told < 0:
            raise Unavailable("down")
        return self.told


@pytest.mark.parametrize(
    ("told", "took_s", "unix"),
    [(1000.9, 0.0, 1000.0), (1002.0, 0.0, 1002.0), (900.0, 0.4, 900.2), (9000.0, 0.6, 1000.0)],
    ids=["as good as equal", "ahead", "behind", "too slow to tell"],
)
async def test_only_a_prompt_answer_that_differs_counts(told, took_s, unix):
    machine = StillClock()
    store, clock = SlowStore(machine), StoreClock(machine)
    store.told, store.took_s = told, took_s
    await clock.follow(store)
    assert clock.unix() == pytest.approx(unix)
    store.told = -1.0
    with pytest.raises(Unavailable):
        await clock.follow(store)
    assert clock.unix() == pytest.approx(unix)
