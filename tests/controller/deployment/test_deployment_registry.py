"""Deployments that are evicted, loaded again, and make room for others."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.controller.deployment.deployment_registry import DeploymentFailures
from evenkeel_moe.controller.ingest.group_memory import memory_together
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import NotLeading
from evenkeel_moe.wire.link import NotLeader, Registration, RegistrationOutcome
from tests.controller.replicas import DEMO, ONE, TWO, replicas
from tests.protocol.machines import hello_of
from tests.waiting import until


def renamed(name, rank=0, **changes):
    """Return the Hello of a rank of two, of another deployment."""
    hello = hello_of(rank, **changes)
    return replace(hello, identity=replace(hello.identity, deployment=DeploymentId(name)))


async def attached(replica, hello, number):
    """Let a rank register; return the refusal, or None if it was accepted."""
    stream = RankStream(number, "peer", capacity=64)
    if await replica.registry.attach(hello, stream) is not None:
        return None
    (refusal,) = stream._queue
    assert isinstance(refusal, Registration)
    return refusal


async def said_hello(replica, name, number):
    """Let one rank of two register under a name and leave; return True if it was accepted."""
    refusal = await attached(replica, renamed(name, generation="g1", incarnation=number), number)
    if refusal is None:
        replica.registry.deployments[DeploymentId(name)].ranks.by_stream[number].lost()
        return True
    assert (refusal.outcome, refusal.reason) == (
        RegistrationOutcome.REFUSED,
        Reason.LIMIT_EXCEEDED,
    )
    return False


def age(replica, *names, idle_s=60.0):
    """Let deployments be without ranks since some time, in which they make room for others."""
    for name in names:
        replica.registry.deployments[DeploymentId(name)].ranks.last_open_at -= idle_s


async def lead_and_leave(replica):
    """Lead DEMO until its ranks leave, a minute ago."""
    for session in await replica.lead():
        session.lost()
    age(replica, DEMO)


async def test_an_evicted_deployment_is_not_loaded_by_a_restart():
    async with replicas("a") as (one, store):
        for session in await one.lead():
            session.lost()
        await one.operations.forget(DEMO, "eve")
        assert store._leases == {}
        async with replicas("a", store=store) as (again, _):
            await again.registry.take_up(await store.deployments())
            assert again.registry.deployments == {}
            await again.lead(first=11, highest_term=1)  # Its ranks bring it back.
            assert not again.member.control.held


async def test_what_was_led_until_the_end_is_taken_up_by_a_restart():
    async with replicas("a") as (one, store):
        await one.lead()
        await one.member.stop()
        async with replicas("a", store=store) as (again, _):
            await again.registry.take_up(await store.deployments())
            assert list(again.registry.deployments) == [DEMO]


async def test_letting_go_takes_nothing_from_the_replica_that_leads_now():
    async with replicas("a", "b") as (one, two, store):
        sessions = await one.lead()
        await one.yield_lease(sessions)
        await two.lead(first=11, highest_term=1)
        with pytest.raises(NotLeading):  # Only its leader can let it go.
            await one.operations.forget(DEMO, "eve")
        await one.registry.evict_idle(0.0)
        assert one.registry.deployments == {}
        assert (await store.fetch_document(DEMO, "leader"))["replica_id"] == "b"


async def test_a_live_rank_takes_the_place_of_a_deployment_without_ranks():
    async with replicas("a", max_deployments=2) as (one, store):
        for name in ("gone-1", "gone-2"):
            lease = await store.acquire_lease(DeploymentId(name), "a", 0.01, 0)
            leader = {"replica_id": "a", "address": "a:1"}
            await store.store_document(DeploymentId(name), "leader", leader, lease.term)
        await one.registry.take_up(await store.deployments())
        assert len(one.registry.deployments) == 2
        await until(
            lambda: all(member.keeper.leading for member in one.registry.deployments.values())
        )
        age(one, "gone-1", "gone-2")
        await one.lead()
        (displaced,) = {"gone-1", "gone-2"} - one.registry.deployments.keys()
        assert len(one.registry.deployments) == 2
        await until(lambda: DeploymentId(displaced) not in store._leases)
        assert (await store.fetch_document(DeploymentId(displaced), "leader"))["replica_id"] == ""
        # Both deployments have ranks, or will have them soon: a third one is refused.
        assert await attached(one, renamed("second"), 6) is None
        assert await attached(one, renamed("third"), 5) is not None


async def test_names_that_are_made_up_do_not_push_each_other_into_the_store():
    async with replicas("a", max_deployments=4) as (one, store):
        taken = [await said_hello(one, f"x{number}", number) for number in range(40)]
        assert taken == [True] * 4 + [False] * 36
        assert len(one.registry.deployments) == 4
        assert await store.deployments() == []
        assert not store._decisions
        age(one, "x2")
        assert await said_hello(one, "x40", 40)
        assert sorted(one.registry.deployments) == ["x0", "x1", "x3", "x40"]


async def test_new_names_keep_no_deployment_out_that_was_whole_once():
    async with replicas("a", max_new_deployments=2) as (one, store):
        await one.lead()
        assert await store.deployments() == [DEMO]
        taken = [await said_hello(one, f"x{number}", number) for number in range(10, 14)]
        assert taken == [True, True, False, False]
        refused = one.registry.shared.metrics._refused
        assert refused.labels("max_new_deployments")._value.get() == 2
        await one.registry.let_go(one.member)
        await one.lead(first=21, highest_term=1)
        assert len(one.registry.deployments) == 3
        age(one, "x10")
        assert await said_hello(one, "x30", 30)
        assert sorted(one.registry.deployments) == [DEMO, "x11", "x30"]


async def test_a_name_that_is_let_go_before_it_is_whole_leaves_nothing_in_the_store():
    async with replicas("a") as (one, store):
        assert await said_hello(one, "x1", 1)
        name = DeploymentId("x1")
        await until(lambda: one.registry.deployments[name].keeper.leading)
        assert (await store.fetch_document(name, "leader"))["address"] == "a:1"
        await one.registry.let_go(one.registry.deployments[name])
        assert not (store._leases or store._terms or store._documents or store._decisions)


async def test_decisions_before_a_deployment_is_whole_are_read_and_stored_later():
    async with replicas("a") as (one, store):
        hello, stream = hello_of(0, "g1", 1), RankStream(1, "peer", capacity=64)
        assert await one.registry.attach(hello, stream)
        await until(one.reasons)
        before = await one.reasons()
        assert before[-1] == "ranks_missing"
        assert await store.fetch_decisions(DEMO, 10) == []
        await one.lead(first=11)
        await until(lambda: bool(store._decisions))
        assert (await one.reasons())[-len(before) :] == before


async def test_a_deployment_is_idle_from_when_its_last_rank_went():
    async with replicas("a") as (one, _):
        sessions = await one.lead()
        one.member.ranks.last_open_at -= 60.0  # Nobody asked while the ranks were here.
        for session in sessions:
            session.lost()
        assert one.member.ranks.idle_s() < 10.0


async def test_a_deployment_that_was_whole_once_outlasts_names_that_never_were():
    async with replicas("a", max_deployments=3) as (one, store):
        for session in await one.lead():
            session.lost()
        for number in range(10, 12):
            assert await said_hello(one, f"x{number}", number)
        for idle_s, name in ((900.0, DEMO), (60.0, "x10"), (60.0, "x11")):
            age(one, name, idle_s=idle_s)
        for number in range(12, 20):
            assert await said_hello(one, f"x{number}", number)
            age(one, f"x{number}")
        assert DEMO in one.registry.deployments
        assert (await store.fetch_document(DEMO, "leader"))["replica_id"] == "a"


async def test_a_deployment_forgotten_by_an_operator_meanwhile_is_no_error(leading_two):
    registry, operations, _ = leading_two
    idle = await _begin_eviction(registry)
    await operations.forget(TWO, "operator")
    registry.shared.store.gate.set()
    await idle
    assert not registry.deployments


async def test_a_deployment_whose_ranks_came_back_meanwhile_is_kept(leading_two):
    registry, operations, _ = leading_two
    idle = await _begin_eviction(registry)
    registry.deployments[TWO].ranks.open(hello_of(0), RankStream(1, "peer", capacity=4))
    registry.shared.store.gate.set()
    await idle
    assert list(registry.deployments) == [TWO]


async def _begin_eviction(registry):
    """Start to evict idle deployments; return the task while it releases the lease of ONE."""
    store = registry.shared.store
    store.gated = ONE
    idle = asyncio.create_task(registry.evict_idle(0.0))
    await until(lambda: store.waiting)
    return idle


async def test_a_deployment_that_fails_ends_alone_and_starts_again_after_a_pause():
    async with replicas("a") as (one, _):
        one.registry.failures = DeploymentFailures(first_pause_s=3600.0)
        await one.lead()
        assert await attached(one, renamed(ONE), 50) is None
        broken, sound = one.member, one.registry.deployments[ONE]

        def fail(*_):
            raise ZeroDivisionError("a bug of ours")

        broken.control.handle = fail  # type: ignore[method-assign]
        await until(lambda: DEMO not in one.registry.deployments)
        refused = await attached(one, hello_of(0, incarnation=9), 51)
        assert refused is not None and refused.reason is Reason.DEPLOYMENT_FAILED
        assert "ZeroDivisionError: a bug of ours" in refused.detail
        await until(lambda: not broken.keeper.leading)
        with pytest.raises(Unavailable, match="failed on this replica") as error:
            await one.operations.deployment(DEMO)
        assert error.value.reason is Reason.DEPLOYMENT_FAILED
        assert one.registry.deployments[ONE] is sound and sound.keeper.leading

        one.registry.failures = DeploymentFailures()  # As after the pause.
        await one.lead(first=60, highest_term=1)
        assert one.member is not broken


async def test_a_rank_does_not_start_a_deployment_that_failed_while_the_store_was_asked():
    async with replicas("a") as (one, store):
        has_records = store.has_records

        async def fails_meanwhile(name):
            now = one.registry.shared.clock.monotonic()
            one.registry.failures.note(name, ValueError("a bug of ours"), now)
            return await has_records(name)

        store.has_records = fails_meanwhile  # type: ignore[method-assign]
        refused = await attached(one, hello_of(0), 50)
        assert refused is not None and refused.reason is Reason.DEPLOYMENT_FAILED
        assert not one.registry.deployments
        one.registry.failures = DeploymentFailures()


@pytest.mark.fault(
    "a deployment that failed and never came back",
    "the alert that nobody leads it fired until the controller restarted",
)
async def test_a_failed_deployment_that_does_not_start_again_loses_its_series():
    async with replicas("a") as (one, _):
        await one.lead()
        registry, failed = one.registry, one.member
        registry.failed(DEMO, failed, ValueError("a bug of ours"))
        await until(lambda: not failed.keeper.leading)
        failure = registry.failures._newest[DEMO]
        for age_s, forgotten in ((3500.0, False), (3600.0, True)):
            registry.failures._newest[DEMO] = replace(failure, at=failure.at - age_s)
            await registry.evict_idle(3600.0)
            series = [one for family in registry.shared.metrics.collect() for one in family.samples]
            leading = {one.labels["deployment"] for one in series if "leading" in one.name}
            assert (DEMO not in leading) == forgotten


async def test_a_group_that_does_not_fit_beside_the_others_is_refused_with_the_numbers():
    async with replicas("a") as (one, _):
        await one.lead()
        memory = one.registry.options.memory_of(hello_of(0).shape)
        assert one.member.memory == memory
        need = 2 * memory.total + memory.plan  # One plan runs at a time.
        one.registry.memory_bytes = need - 1
        refusal = await attached(one, renamed("second"), 11)
        assert refusal.outcome is RegistrationOutcome.REFUSED
        assert refusal.reason is Reason.LIMIT_EXCEEDED
        for words in (
            f"on 2 ranks may take {memory},",
            f"other deployments {memory.total + memory.plan};",
            f"ingest.memory_bytes is {need - 1}",
        ):
            assert words in refusal.detail
        assert DeploymentId("second") not in one.registry.deployments
        refused = one.registry.shared.metrics._refused
        assert refused.labels("memory_bytes")._value.get() == 1
        one.registry.memory_bytes = need
        assert await attached(one, renamed("second"), 12) is None


async def test_a_group_with_more_ranks_than_there_may_be_streams_is_refused_with_the_numbers():
    """It can never be whole, and its ranks would be remembered one by one."""
    async with replicas("a") as (one, _):
        one.registry.max_streams = 1
        refusal = await attached(one, renamed("second"), 11)
        assert refusal is not None and refusal.reason is Reason.LIMIT_EXCEEDED
        assert refusal.detail == "the group has 2 ranks, grpc.max_streams is 1"
        assert DeploymentId("second") not in one.registry.deployments
        one.registry.max_streams = 2
        assert await attached(one, renamed("second"), 12) is None


async def test_the_hello_that_would_complete_a_second_group_is_refused():
    """Groups that gather hold no windows, so that made-up shapes keep no group out."""
    async with replicas("a") as (one, _):
        memory = one.registry.options.memory_of(hello_of(0).shape)
        one.registry.memory_bytes = memory_together([memory])
        assert await attached(one, renamed("second"), 11) is None
        await one.lead()
        refusal = await attached(one, renamed("second", 1), 12)
        assert refusal is not None and refusal.reason is Reason.LIMIT_EXCEEDED


@pytest.mark.fault(
    "a controller whose memory had room for one group",
    "led three whose ranks came before the first of them was led",
)
async def test_groups_that_connect_together_are_led_only_while_they_fit():
    async with replicas("a") as (one, _):
        memory = one.registry.options.memory_of(hello_of(0).shape)
        one.registry.memory_bytes = memory_together([memory])
        names = [name for name in ("first", "second", "third") for _ in range(2)]
        refusals = await asyncio.gather(
            *(attached(one, renamed(name, n % 2), 11 + n) for n, name in enumerate(names))
        )
        accepted = [name for name, refusal in zip(names, refusals, strict=True) if refusal is None]
        assert len(accepted) == 4 and len(set(accepted)) == 3  # One rank each takes no memory.
        assert all(one.reason is Reason.LIMIT_EXCEEDED for one in refusals if one is not None)
        held = [one for one in one.registry.deployments.values() if one.memory is not None]
        assert len(held) == 1


async def test_a_group_without_ranks_gives_its_memory_to_another():
    async with replicas("a") as (one, _):
        await lead_and_leave(one)
        one.registry.memory_bytes = memory_together([one.member.memory])
        assert await attached(one, renamed("second"), 11) is None
        assert list(one.registry.deployments) == ["second"]


STRANGER = pytest.mark.fault(
    "a deployment whose engine restarted",
    "the Hello of a stranger that was refused evicted it first",
)


@STRANGER
async def test_nobody_is_evicted_for_a_group_that_does_not_fit_beside_the_busy_ones():
    async with replicas("a") as (one, store):
        for number in range(2):
            assert await attached(one, renamed("busy", number), 11 + number) is None
        await lead_and_leave(one)
        assert await said_hello(one, "young", 13)
        age(one, "young")
        one.registry.max_new_deployments = 1
        shape = hello_of(0).shape
        large = replace(shape, num_layers=16 * shape.num_layers)
        memories = [one.registry.options.memory_of(each) for each in (shape, large)]
        one.registry.memory_bytes = memory_together(memories) - 1
        refusal = await attached(one, replace(renamed("stranger"), shape=large), 14)
        assert refusal is not None and "may take" in refusal.detail
        assert sorted(one.registry.deployments) == ["busy", DEMO, "young"]
        assert (await store.fetch_document(DEMO, "leader"))["replica_id"] == "a"
        one.registry.memory_bytes += 1
        assert await attached(one, replace(renamed("stranger"), shape=large), 15) is None
        assert sorted(one.registry.deployments) == ["busy", "stranger"]


@STRANGER
async def test_nobody_is_evicted_for_memory_before_the_number_of_deployments_is_known():
    async with replicas("a", max_new_deployments=1) as (one, _):
        await lead_and_leave(one)
        assert await attached(one, renamed("young"), 11) is None
        one.registry.memory_bytes = memory_together([one.member.memory])
        refusal = await attached(one, renamed("stranger"), 12)
        assert refusal is not None and "were never all here" in refusal.detail
        assert sorted(one.registry.deployments) == [DEMO, "young"]


@STRANGER
@pytest.mark.parametrize(
    "changes", [{"generation": "g2"}, {"highest_term": 1 << 40}, {"incarnation": 0}, {}]
)
async def test_nobody_is_evicted_for_a_rank_that_the_machine_refuses(changes):
    """A stranger under the name of a deployment that is here, with a larger shape."""
    async with replicas("a") as (one, _):
        assert await attached(one, renamed("idle"), 11) is None
        assert await attached(one, renamed("idle", 1), 12) is None
        idle = one.registry.deployments[DeploymentId("idle")]
        await until(lambda: idle.memory is not None)
        for session in list(idle.ranks.by_stream.values()):
            session.lost()
        idle.ranks.last_open_at -= 60.0
        await one.lead()
        shape = hello_of(0).shape
        large = replace(shape, num_layers=16 * shape.num_layers)
        one.registry.memory_bytes = memory_together([one.registry.options.memory_of(large)])
        stranger = replace(hello_of(0, **{"incarnation": 99} | changes), shape=large)
        assert await attached(one, stranger, 90) is not None
        assert "idle" in one.registry.deployments


async def test_a_follower_sends_a_group_to_its_leader_whatever_memory_it_has():
    async with replicas("a", "b") as (one, two, _):
        await one.lead()
        session = await two.registry.attach(hello_of(0), RankStream(11, "peer", capacity=64))
        assert session is None
        two.registry.memory_bytes = 0
        stream = RankStream(12, "peer", capacity=64)
        assert await two.registry.attach(hello_of(0), stream) is None
        (answer,) = stream._queue
        assert isinstance(answer, NotLeader) and answer.address == "a:1"


def test_the_pause_doubles_with_each_failure_in_a_row_up_to_five_minutes():
    failures, now, pauses = DeploymentFailures(), 0.0, []
    for _ in range(9):
        failure = failures.note(ONE, ValueError("bad"), now)
        pauses.append(failure.pause_s)
        assert failures.waiting(ONE, now + failure.pause_s - 0.1) == failure
        now += failure.pause_s
        assert failures.waiting(ONE, now) is None
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_after_ten_minutes_without_a_failure_the_pause_is_short_again():
    failures = DeploymentFailures()
    failures.note(ONE, ValueError("bad"), 0.0)
    assert failures.note(ONE, ValueError("bad"), 604.0).pause_s == 10
    assert failures.note(ONE, ValueError("bad"), 604.0 + 10 + 600).pause_s == 5


def test_a_failure_is_kept_while_it_lengthens_the_next_pause():
    failures = DeploymentFailures()
    failures.note(ONE, ValueError("bad"), 0.0)
    assert failures.expire(604.0, 1.0) == []
    assert failures.expire(605.0, 606.0) == []
    assert failures.expire(605.0, 1.0) == [ONE]
    assert failures.note(ONE, ValueError("bad"), 605.0).pause_s == 5


def test_a_failure_names_the_error_and_other_deployments_do_not_wait():
    failures = DeploymentFailures()
    assert failures.note(ONE, ValueError("x" * 1000), 0.0).detail == f"ValueError: {'x' * 288}"
    assert failures.waiting(DeploymentId("two"), 0.0) is None


@given(st.lists(st.integers(0, 3000), max_size=3000))
def test_the_memory_is_bounded(names):
    failures = DeploymentFailures()
    for name in names:
        failures.note(DeploymentId(str(name)), ValueError(), 0.0)
    assert len(failures._newest) <= 1024


def test_the_series_of_failures_that_made_room_for_newer_ones_end_too():
    failures = DeploymentFailures()
    names = [DeploymentId(str(number)) for number in range(1026)]
    for name in [*names, names[1]]:
        failures.note(name, ValueError(), 0.0)
    assert set(failures.expire(0.0, 1.0)) == {names[0], names[2]}, "the second failed again"
    assert failures.expire(0.0, 1.0) == []
