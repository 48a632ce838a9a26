"""Short chaos runs: a leader, a store and a rank fail during plans; hostile peers attack."""

import asyncio
import random
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest

from evenkeel_moe.engines.reference.config import RankConfig
from tests.chaos import peers, run
from tests.chaos.arena import Arena, Struck
from tests.chaos.checks import SERVING_BOUND_S, bad_logs, bad_plans, excuses
from tests.chaos.operator import Operator, PlanLife
from tests.chaos.peers import PEERS, Attack
from tests.chaos.processes import MARK, Sentinel
from tests.chaos.run import run_chaos
from tests.chaos.schedule import Fault, FaultKind, make_schedule
from tests.waiting import deadline

SHORT = (
    [
        Fault(0.0, FaultKind.KILL_LEADER, 6.0, 1),
        Fault(7.0, FaultKind.KILL_PRIMARY, 6.0, 2),
        Fault(14.0, FaultKind.STOP_RANK, 1.0, 3),
    ],
    [Fault(3.0, FaultKind.HOSTILE_CLIENTS, 5.0, 4)],
    # One list, played in order: a restart of the group would take the place of a resize.
    [
        Fault(2.0, FaultKind.RETIRE, 0.0, 6),
        Fault(12.0, FaultKind.GROW, 0.0, 7),
        Fault(16.0, FaultKind.KILL_MOST, 1.0, 5),
    ],
)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(400)
async def test_a_leader_a_store_and_a_rank_fail_and_nothing_breaks(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(uuid.uuid4()))
    result = await run_chaos(
        tmp_path,
        1,
        20.0,
        num_ranks=4,
        schedule=SHORT,
        least_plans=1,
        least_through=1,
        least_resizes=0,
        say=print,
    )
    assert result.broken == []
    assert result.figures["groups after retire"] and result.figures["groups after grow"]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
async def test_hostile_peers_take_nothing_from_honest_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(uuid.uuid4()))
    result = await run_chaos(tmp_path, 1, 60.0, num_ranks=3, peers=True, say=print)
    assert result.broken == []
    met = {name.split(":")[0] for name in result.figures if name.startswith("peer ")}
    assert len(met) == len(PEERS)


async def test_a_peer_that_is_taken_is_told():
    async def is_taken(_target, _rng) -> str:
        return "taken"

    attack = Attack(None, [], 1, {is_taken: ("refused",)})  # type: ignore[arg-type]
    assert await attack.become(is_taken, random.Random(1)) == "taken"
    assert attack.broken == ["is_taken: taken"]


async def test_a_peer_without_any_promised_answer_is_told():
    async def is_left(_target, _rng) -> str:
        raise TimeoutError

    attack = Attack(None, [], 1, {is_left: ("refused",)})  # type: ignore[arg-type]
    attack.met["is_left", await attack.become(is_left, random.Random(1))] += 1
    assert (attack.broken, attack.unanswered()) == ([], ["is_left"])
    attack.met["is_left", "refused"] += 1
    assert attack.unanswered() == []


async def test_a_stream_that_is_never_ended_is_told(monkeypatch):
    monkeypatch.setattr(peers, "_ENDS_WITHIN_S", 0.01)
    assert await peers._ended(SimpleNamespace(read=asyncio.Event().wait)) == "was not ended"


def test_an_operator_waits_for_a_plan_whose_record_was_lost():
    life = PlanLife("p", 1.0, accepted_at=2.0)
    operator = Operator((), RankConfig("none").shape, 4, None, 1, None, plans=[life])
    assert operator.waiting
    life.lost, life.accepted_at = 1, 0.0
    assert operator.waiting and not operator.under_way
    life.ended_at = 3.0
    assert not operator.waiting


@pytest.mark.parametrize(
    ("primary", "final", "through"),
    [
        (7, ("a", 1, 7), False),
        (7, ("a", 1, 8), True),
        (7, ("a", 1, None), False),
        (None, ("a", 1, 7), False),
        (None, ("b", 2, None), True),
    ],
)
def test_an_unknown_primary_is_no_failover(primary, final, through):
    life = PlanLife("p", 1.0, leader="a", term=1, primary=primary, accepted_at=2.0)
    life.final_leader = final
    assert life.through_failover is through


async def test_a_silent_sentinel_names_no_primary(tmp_path):
    assert await Sentinel(tmp_path, 1).primary_port() is None


@pytest.mark.parametrize(
    "event", ["request_failed_by_defect", "rank_stream_failed", "failed_deployment_not_ended"]
)
def test_a_defect_in_a_log_is_told(event):
    controller = SimpleNamespace(name="a", rows=lambda: ([{"event": event}], []))
    (told,) = bad_logs([controller])  # type: ignore[list-item]
    assert event in told


async def test_no_fault_begins_once_a_run_has_failed(tmp_path, monkeypatch):
    playing, cancelled = set(), []

    async def fails(*_arguments: object) -> None:
        raise AssertionError("the operator failed")

    class FailingArena(Arena):
        async def start(self) -> None:
            self.controllers = []
            operator = SimpleNamespace(run=fails, plans=[], faults=[], answers={})
            self.operator = operator  # type: ignore[assignment]

        async def look_after(self, *_arguments: object) -> None:
            """Judge nothing: no process runs."""

        async def dump_store(self, *_arguments: object) -> None:
            """Read nothing: no store runs."""

        async def play(self, *_args: object) -> None:
            playing.add(asyncio.current_task())
            try:
                await asyncio.sleep(deadline(3))  # Without an end of its own, a run would hang.
            except asyncio.CancelledError:
                cancelled.append(asyncio.current_task())
                raise
            finally:
                playing.discard(asyncio.current_task())

        async def stop(self) -> dict[str, int]:
            assert not playing
            return await super().stop()

    monkeypatch.setattr(run, "Arena", FailingArena)
    result = await run_chaos(tmp_path, 1, 0.0, least_resizes=0)
    assert result.broken[0] == "AssertionError: the operator failed"
    assert len(cancelled) == 3, "the faults of all lists are cancelled"


def test_a_failed_plan_that_a_fault_explains_is_counted():
    life = PlanLife("p", 190.0, accepted_at=200.0, ended_at=220.0, phase="aborted")
    life.reason = "rank_lost"
    early = Struck(FaultKind.STOP_RANK, "rank 1", 100.0, 102.0)
    near = Struck(FaultKind.STOP_RANK, "rank 1", 180.0, 182.0)
    grown = Struck(FaultKind.GROW, "4 to 6 ranks", 190.0, 200.0)
    assert not excuses([life], [early, grown])
    (told,) = bad_plans([life], [early, grown])
    assert "rank_lost" in told and "grow" in told
    assert excuses([life], [early, near, grown]) == {("rank_lost", "stop_rank"): 1}
    assert list(bad_plans([life], [near])) == []


async def test_a_fault_that_has_nothing_to_strike_is_counted(tmp_path):
    arena = Arena(tmp_path, 1)
    try:  # No controller runs, so there is no leader.
        await arena.play([Fault(0.0, FaultKind.STOP_FOLLOWER, 0.0, 1)], 0.0, print)
        assert (arena.not_done, arena.struck) == ([FaultKind.STOP_FOLLOWER], [])
    finally:
        await arena.stop()


@pytest.mark.parametrize("kind", [FaultKind.SLOW_STORE, FaultKind.SLOW_LINKS])
async def test_the_end_of_a_fault_ends_no_other_one(tmp_path, kind):
    arena = Arena(tmp_path, 1)
    try:
        cut, silent = arena.nodes if kind is FaultKind.SLOW_STORE else arena.controllers
        cut.proxy.cut()
        silent.proxy.silence()
        await arena._strike(Fault(0.0, kind, 0.0, 1))
        assert cut.proxy._cut and not silent.proxy._open.is_set()
        assert cut.proxy.delay_s == silent.proxy.delay_s == 0.0
    finally:
        await arena.stop()


def test_a_schedule_is_a_function_of_its_seed():
    assert make_schedule(7, 600) == make_schedule(7, 600)
    assert make_schedule(7, 600) != make_schedule(8, 600)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_hold_every_kind_of_fault_one_at_a_time(seed):
    main, noise, resizes = make_schedule(seed, 600)
    for faults in (main, noise, resizes):
        for before, after in zip(faults, faults[1:], strict=False):
            assert before.at + before.seconds < after.at
        assert faults[-1].at + faults[-1].seconds <= 600
    kinds = Counter(fault.kind for fault in (*main, *noise, *resizes))
    assert kinds.keys() == set(FaultKind)
    assert min(count for kind, count in kinds.items() if kind.resizes) >= 5
    failovers = [fault for fault in main if fault.kind.changes_leader or fault.kind.changes_primary]
    assert len(failovers) >= 15
    # Control-plane outages last longer than the bound on serving, so a wait would be found.
    assert all(fault.seconds >= SERVING_BOUND_S for fault in failovers)
