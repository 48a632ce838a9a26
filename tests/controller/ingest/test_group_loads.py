"""The windows follow the machine and the store over restarts, takeovers and new groups."""

import asyncio
import dataclasses
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase
from evenkeel_moe.controller.ingest.dispatch_choice import choose_dispatch
from evenkeel_moe.controller.ingest.group_loads import (
    GroupLoads,
    shape_document,
    shape_from_document,
    topology_of,
)
from evenkeel_moe.controller.ingest.group_memory import (
    group_memory,
    limit_steps,
    memory_together,
)
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.ids import Epoch, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import DEMO, feed, make_health, make_ingest, replicas
from tests.protocol.machines import answer_queries, control_of
from tests.telemetry.reports import EPOCH, PLACEMENT, SHAPE, Fleet
from tests.waiting import until


def stop(sessions):
    """Stop a group as planned: its name is then free for another one."""
    for session in sessions:
        session.received(Heartbeat(1, 1, 1, stopping=True))
        session.lost()


def test_nodes_are_numbered_as_ranks_name_them():
    assert topology_of(["b", "b", "a", "b"]).node_of_rank == (0, 0, 1, 0)


def test_a_shape_survives_its_document():
    generation = Generation("g")
    assert shape_from_document(shape_document(generation, SHAPE)) == (generation, SHAPE)
    for body in (None, {}, {"generation": "g"}, {"generation": "g", "shape": {"num_layers": 0}}):
        assert shape_from_document(body) is None


def steps_of(replica):
    return replica.member.loads.ingest.rings[Phase.DECODE].window().steps.tolist()


async def test_a_replica_that_leads_again_has_the_steps_the_other_stored():
    async with replicas("a", "b") as (one, two, store):
        sessions = await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        feed(one, 20, 25)  # Never stored; the other replica counts these steps too.
        await one.yield_lease(sessions)
        sessions = await two.lead(first=11, highest_term=1)
        feed(two, 20, 60, incarnation=11)
        await two.member.store_windows()
        await two.yield_lease(sessions)
        await one.lead(first=21, highest_term=2)
        assert steps_of(one) == list(range(60))
        feed(one, 60, 70, incarnation=21)
        await one.member.store_windows()
        assert steps_of(one) == list(range(70))
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == list(range(70))


async def test_a_replica_that_leads_again_keeps_the_window_of_a_group_that_restarted_meanwhile():
    async with replicas("a", "b") as (one, two, store):
        sessions = await one.lead()
        feed(one, 0, 200)
        await one.member.store_windows()
        await one.yield_lease(sessions)
        sessions = await two.lead("g2", first=11)
        feed(two, 0, 40, "g2", 11)
        await two.member.store_windows()
        await two.yield_lease(sessions)
        await one.lead("g2", first=21, highest_term=2)
        await until(lambda: one.member.loads.ingest.generation == "g2")
        assert one.member.loads.ingest.newest_step == 39
        feed(one, 40, 50, "g2", 21)
        await one.member.store_windows()
        assert steps_of(one) == list(range(50))
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == list(range(50))


async def test_steps_that_only_this_replica_has_outlive_another_that_led_without_ranks():
    async with replicas("a") as (one, store):
        await one.lead()
        feed(one, 0, 20)
        await one.member.store_windows()
        feed(one, 20, 25)
        await one.lose(store)
        assert steps_of(one) == list(range(25))
        await one.member.store_windows()
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == list(range(25))


@pytest.mark.parametrize("stay", [False, True])
async def test_a_group_that_restarted_before_the_write_is_counted_under_its_own_generation(
    stay,
):
    """The stored window is of the former group: it would hide the steps of the new one for days."""
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        feed(one, 0, 200)
        await one.member.store_windows()
        stop(sessions)
        sessions = await one.lead("g2", first=11, highest_term=one.member.leadership.term)
        await until(lambda: one.member.loads.ingest.generation == "g2")
        feed(one, 0, 20, "g2", 11)
        if not stay:
            for session in sessions:
                session.lost()
        term = await one.lose(store, seen=not stay)
        if not stay:
            await one.lead("g2", first=31, highest_term=term)
        await until(
            lambda: (
                one.member.control.state == "ready" and one.member.loads.ingest.generation == "g2"
            )
        )
        feed(one, 20, 60, "g2", 11 if stay else 31)
        await one.member.store_windows()
        # Without ranks nobody knew which group returns: unstored steps of the new one are lost.
        assert steps_of(one) == list(range(0 if stay else 20, 60))
        assert (await store.fetch(DEMO, Phase.DECODE, SHAPE, 512)).steps.tolist() == steps_of(one)
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g2"


@pytest.mark.parametrize("fails", [None, Unavailable("a timeout"), asyncio.CancelledError()])
async def test_a_group_that_restarts_while_the_shape_is_stored_has_its_own_stored(fails):
    """The stored shape names the generation of the window: a wrong one would drop the window."""
    async with replicas("a") as (one, store):
        sessions = await one.lead()
        feed(one, 0, 20)
        keep, met = store.store_document, []

        async def slow(deployment, name, body, term):
            if name == "shape" and not met:
                met.append(body["generation"])
                stop(sessions)
                await one.lead("g2", first=11, highest_term=one.member.leadership.term)
                await until(lambda: one.member.loads.ingest.generation == "g2")
                if fails is not None:
                    raise fails
            await keep(deployment, name, body, term)

        store.store_document = slow
        with nullcontext() if fails is None else pytest.raises(type(fails)):
            await one.member.store_windows()
        await one.member.store_windows()
        assert met == ["g1"]
        assert (await store.fetch_document(DEMO, "shape"))["generation"] == "g2"


@pytest.mark.parametrize("fails", [Unavailable("a timeout"), asyncio.CancelledError()])
async def test_a_shape_that_was_not_stored_is_given_again(fails):
    async with replicas("a") as (one, store):
        await one.lead()
        keep, refused = store.store_document, []

        async def refuses(deployment, name, body, term):
            if name == "shape" and not refused:
                refused.append(body)
                raise fails
            await keep(deployment, name, body, term)

        store.store_document = refuses
        with pytest.raises(type(fails)):
            await one.member.store_windows()
        await one.member.store_windows()
        assert (await store.fetch_document(DEMO, "shape")) == refused[0]


async def test_maps_of_an_earlier_group_with_fewer_experts_are_not_counted_by():
    """Layers, slots and ranks agree: only the number of experts shows that it is another model."""
    control = control_of(ControlState.RECOVERING)
    answer_queries(control, epoch=Epoch(3))
    committed = control.placement
    assert committed is not None
    other = Placement(
        committed.phy2log.copy(), committed.num_ranks, committed.num_logical_experts + 1
    )
    control.as_leader.executor.history = {Epoch(1): other, Epoch(2): committed, Epoch(3): committed}
    store = MemoryStore(SystemClock())
    ingest = make_ingest()
    loads = GroupLoads(control, store, ingest, 8, DispatchModel.EVEN, make_health())
    loads.times.update({}, committed, 3, loads.split())
    assert len(loads.times.speed_factors()) == committed.num_ranks
    assert loads.follow_generation()
    assert len(loads.times.speed_factors()) == 0, "the ranks' times are of a generation, too"
    loads.follow_placement()
    assembler = ingest._assembler
    assert assembler is not None
    assert {1, 2, 3} & set(assembler._epochs) == {2, 3}


# --- The memory of a group follows from its shape, and its parts keep to it -----------------------


LARGEST = ModelShape(92, 896, 2048, 1, 8, 44_000_000)
WIDE, LONG = ModelShape(4, 512, 128, 5, 8, 1), ModelShape(8, 128, 16, 10, 8, 1)
TOKENS, READING = CostModel(), CostModel(replica=ReplicaWork(read_tokens=50.0))
MANY = ModelShape(92, 896, 256, 4, 8, 44_000_000)


def memory(shape, window_steps=512, max_pending=512, plan_steps=256):
    return group_memory(
        shape,
        window_steps=window_steps,
        max_pending=max_pending,
        plan_steps=plan_steps,
        threads=2,
    )


@pytest.mark.parametrize("shape", [LARGEST, MANY])
def test_the_largest_groups_are_bounded(shape):
    """Ten groups of 256 ranks and one of 2,048 fit in 24 GB, with the largest plan of them."""
    assert memory(shape).total < 1.6e9
    assert 1e9 < memory(LARGEST).plan < 2e9
    together = memory_together([memory(LARGEST), *[memory(MANY)] * 10])
    assert together == memory(LARGEST).total + 10 * memory(MANY).total + memory(LARGEST).plan
    assert together < 24e9


def test_a_part_that_is_larger_shows_in_the_words():
    found = memory(MANY)
    assert str(found).startswith(
        f"{found.total + found.plan} bytes (windows {found.windows}, sources 0, "
    )


@pytest.mark.parametrize("side", list(CountingSide))
def test_a_full_window_takes_no_more_than_said(side):
    ingest = make_ingest()
    ingest.begin_generation(Generation("g"), SHAPE)
    ingest.settle(EPOCH, PLACEMENT)
    run = Fleet().run(range(200))
    for rank in range(SHAPE.num_ranks):
        ingest.take(run.report(rank, side=side), lambda ack: None)
    parts = ingest.rings[Phase.DECODE].parts()
    assert sum(map(len, parts)) == 50
    arrays = ("counts", "steps", "epochs", "tokens", "compute_s")
    held = sum(getattr(part, name).nbytes for part in parts for name in arrays)
    said = memory(SHAPE, window_steps=50, max_pending=64, plan_steps=50)
    assert 0.9 * said.windows < held * len(Phase) <= said.windows
    if side is CountingSide.SOURCE:
        blocks = ingest.rings[Phase.DECODE]._blocks
        assert sum(block.nbytes for block in blocks) * len(Phase) <= said.sources


@pytest.mark.parametrize("dispatch", [DispatchModel.EVEN, DispatchModel.NEAREST])
@pytest.mark.parametrize("cost", [TOKENS, READING], ids=["tokens", "reading"])
@pytest.mark.parametrize(("shape", "steps"), [(WIDE, 32), (LONG, 256)], ids=["wide", "long"])
def test_a_plan_takes_no_more_than_said(shape, steps, cost, dispatch):
    rng = np.random.default_rng(1)
    size = (shape.num_layers, shape.num_logical_experts)
    load = rng.lognormal(3.0, 1.0, (steps, *size))
    sources = rng.random((shape.num_ranks, *size))
    problem = PlacementProblem(
        load,
        shape,
        Topology(tuple(rank // 8 for rank in range(shape.num_ranks))),
        current=Placement.initial(shape),
        objective=Objective(cost=cost, dispatch=dispatch),
        source_load=sources,
        max_evaluations=2_000,
    )
    plan_keel(replace(problem, max_evaluations=1))  # Compiles what it needs.
    tracemalloc.start()
    plan_keel(problem)
    peak = tracemalloc.get_traced_memory()[1] + load.nbytes + sources.nbytes
    tracemalloc.stop()
    said = memory(shape, plan_steps=steps).plan
    # Loads that a forecast moves, the origins of tokens and a second thread would take the rest.
    assert 0.2 * said < peak <= said


@pytest.mark.parametrize("side", list(CountingSide))
def test_incomplete_steps_take_no_more_than_said(side):
    ingest = make_ingest()
    ingest.begin_generation(Generation("g"), SHAPE)
    ingest.settle(EPOCH, PLACEMENT)
    ingest.take(Fleet().run(range(200)).report(0, side=side), lambda ack: None)
    assert ingest._assembler is not None
    buffer = ingest._assembler._buffers[side]
    held = buffer.counts.nbytes + sum(part.nbytes for part in buffer.board)
    assert held <= memory(SHAPE, window_steps=50, max_pending=64, plan_steps=50).pending


def test_reports_that_wait_take_no_more_than_said():
    ingest = make_ingest()
    ingest.begin_generation(Generation("g"), SHAPE)
    run = Fleet().run(range(16))
    for _ in range(40):
        for rank in range(SHAPE.num_ranks):
            ingest.take(run.report(rank), lambda ack: None)
    said = memory(SHAPE, window_steps=50, max_pending=64, plan_steps=50)
    assert 0 < ingest._waiting.num_bytes <= said.waiting


async def test_a_restored_window_of_a_large_shape_is_bounded_too():
    wide = ModelShape(1 << 16, 256, 1, 256, 8, 64)
    ingest = make_ingest()
    await ingest.restore(Generation("g"), wide)
    assert {ring.capacity for ring in ingest.rings.values()} == {3}


def test_no_source_sums_are_kept_that_would_fill_the_memory():
    assert limit_steps(
        dataclasses.replace(MANY, num_ranks=64, slots_per_rank=16), 50, 50
    ).keeps_sources
    assert not limit_steps(MANY, 50, 50).keeps_sources
    ingest = make_ingest(max_pending=2)
    ingest.begin_generation(Generation("g"), MANY)
    ingest.settle(Epoch(0), Placement.initial(MANY))
    ring = ingest.rings[Phase.DECODE]
    ring.add_source(EpRank(0), np.ones((92, 896), np.int64))
    assert ring.source() is None
    assert memory(MANY).sources == 0


# --- The dispatch model that is in force, and the disagreements that operators are told of --------


EVEN, NEAREST, OPTIMAL = DispatchModel.EVEN, DispatchModel.NEAREST, DispatchModel.OPTIMAL


@pytest.mark.parametrize(
    ("operator", "told", "setting", "model", "words"),
    [
        (None, (), EVEN, EVEN, ""),
        (None, ("", ""), OPTIMAL, OPTIMAL, ""),
        (None, ("nearest", "nearest"), EVEN, NEAREST, ""),
        (None, ("nearest", ""), EVEN, NEAREST, ""),
        (None, ("nearest",), NEAREST, NEAREST, ""),
        (None, ("even",), OPTIMAL, EVEN, "planner.dispatch is 'optimal', the ranks report 'even'"),
        (
            None,
            ("even", "nearest"),
            OPTIMAL,
            OPTIMAL,
            "dispatchers, 'even' and 'nearest'",
        ),
        (None, ("fake", "fake"), NEAREST, NEAREST, "'fake', which has no model; plans are for 'n"),
        (OPTIMAL, ("optimal",), EVEN, OPTIMAL, ""),
        (OPTIMAL, ("", ""), NEAREST, OPTIMAL, ""),
        (
            OPTIMAL,
            ("even",),
            EVEN,
            OPTIMAL,
            "sets dispatch 'optimal', the ranks report 'even'",
        ),
        (EVEN, ("even", "x"), EVEN, EVEN, "sets dispatch 'even', the ranks report 'even' and 'x'"),
    ],
)
def test_the_policy_comes_first_then_the_ranks_then_the_setting(
    operator, told, setting, model, words
):
    choice = choose_dispatch(operator, told, setting)
    assert choice.model is model
    assert bool(choice.warning) == bool(words)
    assert words in choice.warning


def test_names_of_ranks_do_not_make_a_warning_long():
    choice = choose_dispatch(None, (f"{rank}\n{'x' * 60}" for rank in range(99)), EVEN)
    assert len(choice.warning) < 250 and "\n" not in choice.warning


def dispatch_of(replica):
    """The choice that plans use, after the objective of a cycle was built."""
    planner, control = replica.member.planner, replica.member.control
    base = PlanBase.current(control)
    inputs = planner.builder.build(base, control.policy.policy, PlanLimits())
    assert inputs.objective.dispatch is inputs.token_split.dispatch
    return inputs.objective.dispatch


async def test_plans_and_status_follow_the_ranks_until_an_operator_decides():
    async with replicas("a") as (one, _):
        await one.lead(dispatch="nearest")
        assert dispatch_of(one) is NEAREST
        assert one.member.loads.split().dispatch is NEAREST
        status = LiveView(one.member).status()
        assert (status.dispatch, status.dispatch_warning) == ("nearest", "")
        await one.operations.set_policy(DEMO, {"dispatch": "optimal"}, "eve")
        with capture_logs() as log:
            assert dispatch_of(one) is dispatch_of(one) is OPTIMAL
        warning = "The policy sets dispatch 'optimal', the ranks report 'nearest'."
        assert [row["detail"] for row in log if row["event"] == "dispatch_disagrees"] == [warning]
        status = LiveView(one.member).status()
        assert (status.dispatch, status.dispatch_warning) == ("optimal", warning)
        await one.operations.set_policy(DEMO, {"dispatch": None}, "eve")
        with capture_logs() as log:
            assert dispatch_of(one) is NEAREST
        assert not log


async def test_options_cost_and_full_slots_reach_the_inputs_of_a_cycle():
    async with replicas("a") as (one, _):
        await one.lead(slots_stay_filled=True)
        options = {"gem": {"restarts": 2}}
        await one.operations.set_policy(DEMO, {"policy_options": options}, "eve")
        control = one.member.control
        inputs = one.member.planner.builder.build(
            PlanBase.current(control), control.policy.policy, PlanLimits()
        )
        assert inputs.policy_options == options
        assert inputs.objective.fill_slots
