"""The planner's inputs: merged phases, prices, and the history of plans."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.controller.cycles.cycle_inputs import (
    CycleSettings,
    build_evacuation,
    merge_phases,
    plan_history,
    price,
    steps_since_move,
)
from evenkeel_moe.errors import Reason, ShapeMismatch
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.width_change import holders, stranded
from tests.contracts.test_stores import make_record
from tests.planning.decision.test_cycle import inputs, skewed
from tests.telemetry.test_balance import SHAPE, make_window


def test_phases_are_merged_in_step_order_and_the_newest_kept():
    decode, prefill = (
        make_window(range(0, 20, 2), source=True),
        make_window(range(1, 21, 2), seed=1, source=True),
    )
    counts, source = merge_phases([decode, prefill], SHAPE, 6)
    assert source is not None and decode.source is not None and prefill.source is not None
    wanted = [
        prefill.counts[7],
        decode.counts[8],
        prefill.counts[8],
        decode.counts[9],
        prefill.counts[9],
    ]
    assert np.array_equal(counts[1:], np.stack(wanted))
    assert len(counts) == 6
    assert np.array_equal(source, decode.source.astype(float) + prefill.source)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_merging_phases_is_sorting_all_their_steps(seed, lengths, num_steps):
    rng = np.random.default_rng(seed)
    windows = [
        make_window(np.sort(rng.choice(20, length, replace=False)), seed + at)
        for at, length in enumerate(lengths)
    ]
    newest = [window.last(num_steps) for window in windows]
    rows = [
        (step, at, counts)
        for at, w in enumerate(newest)
        for step, counts in zip(w.steps, w.counts, strict=True)
    ]
    rows = sorted(rows, key=lambda row: row[:2])[-num_steps:]
    wanted = np.array([counts for _, _, counts in rows], np.uint32).reshape(-1, 2, 4)
    counts, _ = merge_phases(windows, SHAPE, num_steps)
    assert counts.dtype == np.uint32
    assert np.array_equal(counts, wanted)


def test_no_load_is_an_empty_window():
    counts, source = merge_phases([], SHAPE, 6)
    assert counts.shape == (0, 2, 4)
    assert source is None
    alone, _ = merge_phases([make_window(range(9))], SHAPE, 4)
    assert len(alone) == 4


def settings(**changes) -> CycleSettings:
    values = {
        "plan_steps": 100,
        "recent_steps": 8,
        "threads": 1,
        "copy_bytes_per_s": 1e6,
        "copy_cost_tokens": 77.0,
        "deadline_s": 60.0,
        "objective": Objective(),
    }
    return CycleSettings(**{**values, **changes})


def test_a_copy_costs_what_a_rank_computes_meanwhile():
    speeds = np.array([1e-6, 3e-6])
    assert price(TOKENS, speeds, 1000, settings()) == pytest.approx(1e-3 / 2e-6)
    in_seconds = CostModel(CostCurves.linear(speeds))
    assert price(in_seconds, speeds, 1000, settings()) == pytest.approx(1e-3)
    for unknown in (np.zeros(0), np.array([1e-6, math.nan])):
        assert price(TOKENS, unknown, 1000, settings()) == 77.0


def test_only_plans_that_ran_start_the_cooldown():
    records = [
        make_record("a", phase=PlanPhase.COMMITTED, updated_at=5.0),
        make_record("b", phase=PlanPhase.EXPIRED, updated_at=9.0),
        make_record("c", phase=PlanPhase.ABORTED, updated_at=7.0),
    ]
    assert plan_history(records)[1] == 7.0
    assert plan_history(records[1:2])[1] is None


def ended(plan_id, phase, reason, at, kind=PlanKind.AUTOMATIC):
    record = make_record(plan_id, phase=phase, reason=reason, updated_at=at)
    return replace(record, plan=replace(record.plan, kind=kind))


def test_failures_in_a_row_are_counted_back_to_the_last_plan_that_was_carried_out():
    done = ended("a", PlanPhase.COMMITTED, Reason.COMMITTED, 5.0)
    earlier = ended("b", PlanPhase.ABORTED, Reason.RANK_LOST, 3.0)
    refused = ended("c", PlanPhase.REFUSED, Reason.NO_SOURCE, 7.0)
    aborted = ended("d", PlanPhase.ABORTED, Reason.PREPARE_DEADLINE, 9.0)
    assert plan_history([]) == (0, None)
    assert plan_history([done, earlier]) == (0, 5.0)
    assert plan_history([aborted, done, refused, earlier]) == (2, 9.0)
    assert plan_history([refused]) == (1, 7.0)
    assert plan_history([replace(done, updated_at=10.0), aborted, refused]) == (0, 10.0)


def test_what_a_person_did_or_the_world_outran_is_no_failure():
    for phase, reason, kind in (
        (PlanPhase.CANCELLED, Reason.CANCELLED, PlanKind.MANUAL),
        (PlanPhase.EXPIRED, Reason.EXPIRED, PlanKind.AUTOMATIC),
        (PlanPhase.REFUSED, Reason.STALE_BASE, PlanKind.AUTOMATIC),
        (PlanPhase.ABORTED, Reason.GENERATION_CHANGED, PlanKind.AUTOMATIC),
        (PlanPhase.ABORTED, Reason.RANK_VOTED_NO, PlanKind.MANUAL),
        (PlanPhase.MIGRATING, Reason.LOAD_CHANGED, PlanKind.AUTOMATIC),
    ):
        assert plan_history([ended("a", phase, reason, 5.0, kind)])[0] == 0


@pytest.mark.fault("an operator who cancels what runs", "auto began the same plan 8 s later")
def test_a_proposal_that_was_rejected_counts_and_so_does_a_plan_that_was_stopped():
    """The planner waits before it asks again."""
    rejected = ended("a", PlanPhase.CANCELLED, Reason.CANCELLED, 5.0)
    for record in (
        rejected,
        replace(rejected, wave_sent=True),
        replace(rejected, waves_committed=1),
    ):
        assert plan_history([record]) == (1, 5.0)


def test_steps_under_the_present_placement_are_those_of_its_epoch():
    window = make_window(range(10))
    window.epochs[6:] = 3
    other = make_window(range(10, 14))
    other.epochs[:] = 4
    assert steps_since_move([window, other], Epoch(3), 100) == 8
    assert steps_since_move([window, other], Epoch(3), 5) == 5
    assert steps_since_move([window], Epoch(4), 100) == 0


def test_an_evacuation_retires_as_many_ranks_as_do_not_stay_and_whole_nodes_if_asked():
    asked = inputs(skewed(20), topology=Topology((0,) * inputs(skewed(20)).shape.num_ranks))
    stay = asked.shape.num_ranks - 1
    retired, target, waves = build_evacuation(asked, (), stay, False)
    assert len(retired) == 1 and waves
    assert stranded(holders(target), retired) == 0
    with pytest.raises(ShapeMismatch, match="whole nodes"):
        build_evacuation(asked, (), stay, True)
