"""The operator's settings over restarts, takeovers, and a store that lost its data."""

from dataclasses import replace

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.leadership.operator_state import OperatorState, OperatorStateRecovery
from evenkeel_moe.controller.store_clock import StoreClock
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.memory_store import MemoryStore
from tests.contracts.test_stores import make_record
from tests.controller.replicas import DEMO, Replica, SetClock, replicas
from tests.waiting import until


def flush(store):
    for kept in (store._leases, store._terms, store._plans, store._epochs, store._documents):
        kept.clear()
    store._decisions.clear()
    store._windows.clear()


def orders(replica):
    control = replica.member.control
    return control.policy.mode, control.held, control.frozen_until > 0


async def hold(replica):
    """Hold automatic plans, as a rollback does."""

    def change(_now):
        replica.member.control.as_leader.planning_loop.hold = Hold(Reason.HELD_AFTER_ROLLBACK)
        return None, replica.member.control.write_retry.order([replica.member.control.document()])

    await replica.member.driver.call(change)


async def test_a_flushed_store_undoes_nothing_an_operator_set():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead()
        await one.operations.set_policy(DEMO, {"mode": "observe"}, "eve")
        await one.operations.freeze(DEMO, 3600.0, "eve")
        await hold(one)
        term = one.member.leadership.term
        flush(store)
        await until(
            lambda: one.member.leadership.term > term and one.member.control.state == "ready"
        )
        assert orders(one) == (Mode.OBSERVE, True, True)
        stored = await store.fetch_document(DEMO, "policy")
        assert stored is not None and stored["mode"] == "observe"
        control = await store.fetch_document(DEMO, "control")
        assert control["held"] and control["frozen_until"] > 0
        await until(lambda: _said(one, "stay as they were"))
        # The store also learns again whose steps it holds.
        await one.member.store_windows()
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g1"


async def _said(replica, words):
    return any(
        words in row.get("detail", "") for row in await replica.operations.decisions(DEMO, 100)
    )


async def test_a_new_process_on_an_emptied_store_holds_automatic_plans_and_says_so():
    async with replicas("a", mode=Mode.AUTO) as (one, store):
        await one.lead(highest_term=7)
        assert orders(one) == (Mode.AUTO, True, False)
        assert one.member.leadership.term > 7
        control = await store.fetch_document(DEMO, "control")
        assert control["held"] and control["held_because"] == "held_after_data_loss"
        await until(lambda: _said(one, "held until resume"))
        await one.operations.resume(DEMO, "eve")
        assert not one.member.control.held


async def test_a_replica_that_led_earlier_does_not_trust_its_memory():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, store):
        sessions = await one.lead()
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.leadership.term)
        await hold(two)
        flush(store)
        await two.tasks.end()
        await one.lead(first=21, highest_term=two.member.leadership.term)
        assert orders(one) == (Mode.AUTO, True, False)


async def test_what_is_stored_beats_what_a_replica_remembers():
    async with replicas("a", "b", mode=Mode.AUTO) as (one, two, _):
        sessions = await one.lead()
        await hold(one)
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=one.member.leadership.term)
        assert two.member.control.held
        await two.operations.resume(DEMO, "eve")
        await two.yield_lease(sessions)
        await one.lead(first=21, highest_term=two.member.leadership.term)
        assert not one.member.control.held


@pytest.mark.parametrize("again", [False, True])
async def test_a_new_deployment_is_held_by_nothing(again):
    async with replicas("a", mode=Mode.AUTO) as (one, _):
        sessions = await one.lead()
        if again:
            await one.yield_lease(sessions)
            await one.lead(first=11, highest_term=one.member.leadership.term)
        assert orders(one) == (Mode.AUTO, False, False)
        assert not [row for row in await one.operations.decisions(DEMO, 100) if "detail" in row]


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("stored", [{"mode": "gone"}, {"mode": "auto", "cycle_s": "soon"}])
def test_a_stored_policy_that_cannot_be_used_leaves_the_default(stored, blank):
    default = DeploymentPolicy(cycle_s=3.0)
    recovery = OperatorStateRecovery("a", default)
    leader = None if blank else {"replica_id": "a"}
    recovery.restore({"leader": leader, "policy": None, "control": None})
    recovery.remember(1, OperatorState(replace(default, mode=Mode.AUTO)))
    documents = {"leader": {"replica_id": "a"}, "policy": stored, "control": None}
    found = recovery.restore(documents)
    assert found.state.policy is default and [*found.unreadable] == ["policy"]
    found = recovery.restore(documents | {"policy": {"mode": "auto"}})
    assert (found.state.policy.mode, found.state.policy.cycle_s) == (Mode.AUTO, 3.0)


async def test_an_order_the_store_did_not_take_is_not_led_without(monkeypatch):
    store = MemoryStore(SystemClock())
    async with replicas("a", store=store) as (one, _):
        await one.lead()
        await one.operations.set_policy(DEMO, {"mode": "observe"}, "me")
        flush(store)
        refused, keep = [], store.store_document

        async def refuses(deployment, name, body, term, *lasting):
            if name == "policy" and len(refused) < 2:
                refused.append(term)
                raise Unavailable("a timeout")
            await keep(deployment, name, body, term, *lasting)

        monkeypatch.setattr(store, "store_document", refuses)
        await until(lambda: len(refused) == 2 and one.member.control.state == "ready")
        stored = await store.fetch_document(DEMO, "policy")
        assert stored is not None and stored["mode"] == "observe"


# --- A replica that begins to lead has the plans and the ranks that were there before -------------


async def test_a_new_leader_finds_an_open_plan_behind_many_newer_ones():
    async with replicas("a") as (one, store):

        async def stored(name, created_at, phase):
            record = make_record(name, created_at, phase=phase, story=())
            await store.store_plan(replace(record, plan=replace(record.plan, deployment=DEMO)), 0)

        await stored("moving", 1.0, PlanPhase.STALLED)
        await stored("waits", 2.0, PlanPhase.PROPOSED)
        for number in range(60):
            await stored(f"dry-{number}", 10.0 + number, PlanPhase.EXPIRED)
        await one.lead()
        # Both were made for an earlier generation of the group, and end for that reason.
        for name in ("moving", "waits"):
            record = await one.operations.plan(DEMO, PlanId(name))
            assert record.reason is Reason.GENERATION_CHANGED
        assert await store.open_plans(DEMO) == []


async def test_a_ranks_trouble_outlives_a_lease_lost_and_won_again():
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        sessions[1].received(Heartbeat(1, 2, 3, "its replicas differ"))
        await one.lose(store, seen=False)
        await until(lambda: one.member.control.state == "ready")
        reason, detail = one.member.control.state_reason(one.member.clock.monotonic())
        assert (reason, "its replicas differ" in detail) == (Reason.OBSERVE_ONLY, True)


# --- Times that outlast a leadership are those of the store's clock, which all replicas share -----


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
