"""The memory of a group follows from its shape, and its parts keep to it."""

import dataclasses
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.ingest.group_memory import (
    group_memory,
    limit_steps,
    memory_together,
)
from evenkeel_moe.controller.ingest.ingest import Ingest
from evenkeel_moe.controller.ingest.waiting_reports import IncompleteGroups
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.telemetry.load_check import LoadCheck
from tests.contracts.memory_store import MemoryStore
from tests.telemetry.reports import EPOCH, PLACEMENT, SHAPE, Fleet

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


def make_ingest(**limits) -> Ingest:
    return Ingest(
        DeploymentId("demo"),
        MemoryStore(SystemClock(), capacity=50),
        SystemClock(),
        **{"window_steps": 50, "max_pending": 64, "stride": 1, **limits},
        accepted=lambda steps: None,
        rejected=lambda reason, steps: None,
        dropped=lambda rank, steps: None,
        incomplete=IncompleteGroups(),
        check=LoadCheck(50),
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
