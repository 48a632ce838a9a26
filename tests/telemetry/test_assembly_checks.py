"""R19: counts that do not add up, and reports of another shape, never enter a window."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.telemetry.assembly import Quarantine, Rejection, StepAssembler
from evenkeel_moe.telemetry.step_buffer import StepBuffer, StepRules, derive_epoch_map
from evenkeel_moe.telemetry.step_kernels import NO_STEP, sum_slots
from tests.telemetry.reports import EPOCH, SHAPE, Fleet, make_assembler, reasons, windows_of
from tests.telemetry.test_load_check import HALVED


def test_r19_destination_counts_must_sum_to_tokens_times_top_k():
    assembler, run = make_assembler(), Fleet().run(range(3))
    run.received[1, 0, 2] += 1
    intakes = [assembler.take(run.report(rank)) for rank in range(3)]
    assert reasons(intakes[-1]) == {Reason.SUM_MISMATCH: 3}
    detail = intakes[-1].rejected[0].detail
    tokens = run.tokens[1].sum()
    assert detail == (
        f"step 1 layer 0: counts of all ranks sum to {2 * tokens + 1},"
        f" tokens x top_k = {tokens} x 2"
    )
    assert windows_of(intakes)[Phase.DECODE].steps.tolist() == [0, 2]


@HALVED
@pytest.mark.parametrize("side", list(CountingSide))
def test_steps_that_do_not_add_up_are_returned_apart(side):
    assembler, run = make_assembler(), Fleet().run(range(3))
    run.received[1, 0, 2] += 1  # A slot of expert 2.
    wanted = (run.routed[:, 2] if side is CountingSide.SOURCE else run.load).copy()
    wanted[1, 0, 2] += 1
    run.routed[1, 2, 0, 2] += 1
    intakes = [assembler.take(run.report(rank, side)) for rank in range(3)]
    assert [intake.unsummed for intake in intakes[:2]] == [None, None]
    apart = intakes[2].unsummed
    assert apart is not None
    assert np.array_equal(apart.counts, wanted[1:2])
    assert (apart.steps.tolist(), apart.epochs.tolist()) == ([1], [EPOCH])


def test_r19_counts_too_large_to_add_up_are_not_taken_for_small_ones():
    """The sum of three copies exceeds 2**32 by exactly the routed tokens."""
    assembler, run = make_assembler(), Fleet().run(range(2))
    third = 2**32 // 3
    run.received[1, 1, [0, 4, 5]] += (third, third, 2**32 - 2 * third)
    intakes = [assembler.take(run.report(rank)) for rank in range(3)]
    assert reasons(intakes[-1]) == {Reason.SUM_MISMATCH: 3}
    words = f"counts of all ranks sum to {2**32 + 2 * run.tokens[1].sum()},"
    assert words in intakes[-1].rejected[0].detail
    assert windows_of(intakes)[Phase.DECODE].steps.tolist() == [0]
    assert not intakes[-1].unsummed, "the counts are not those of the ranks"


def test_r19_source_counts_must_sum_in_every_report_and_layer():
    assembler, run = make_assembler(), Fleet().run(range(3))
    run.routed[1, 2, 1, 3] += 1
    intakes = [assembler.take(run.report(rank, CountingSide.SOURCE)) for rank in range(3)]
    assert reasons(intakes[2]) == {Reason.SUM_MISMATCH: 1, Reason.INCOMPLETE_STEP: 2}
    assert "rank 2 step 1 layer 1" in intakes[2].rejected[0].detail
    assert intakes[2].accepted_steps == 2
    assert windows_of(intakes)[Phase.DECODE].steps.tolist() == [0, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": EpRank(3)},
        {"rank": EpRank(-1)},
        {"counts": np.ones((2, 2, 3), np.int32)},
        {"counts": np.ones((3, 2, 2), np.int32)},
        {"counts": np.ones((2, 4), np.int32)},
    ],
)
def test_a_report_of_a_group_of_another_shape_is_refused_whole(change):
    """Compiled code has no bounds checks: a rank that reconnected with another shape must not write
    beyond the buffer."""
    assembler, run = make_assembler(), Fleet().run(range(2))
    intake = assembler.take(replace(run.report(0), **change))
    assert reasons(intake) == {Reason.BAD_LENGTH: 2} and intake.highest_step == 1
    assert assembler.pending() == 0 and intake.accepted_steps == 0


def test_a_map_without_some_expert_breaks_nothing():
    """Maps come from ranks; the assembler does not check that they hold every expert."""
    placement = Placement(np.array([[0, 1, 2, 2, 0, -1], [-1] * 6], np.int32), 3, 4)
    assembler = StepAssembler(SHAPE)
    assembler.learn_epoch(EPOCH, placement)
    empty, full = Fleet().run(range(2), idle=(0, 1, 2)), Fleet().run(range(2, 4), idle=(0, 1, 2))
    empty.idle = full.idle = set()
    full.received[:] = 1
    window = windows_of([assembler.take(empty.report(rank)) for rank in range(3)])[Phase.DECODE]
    assert window.counts.max() == 0
    last = [assembler.take(full.report(rank)) for rank in range(3)][-1]
    assert reasons(last) == {Reason.SUM_MISMATCH: 6}


def test_adding_up_takes_every_slot_of_an_expert_and_nothing_else():
    """Compiled code has no bounds checks: empty slots, and an expert without a slot."""
    placement = Placement(np.array([[0, 1, -1, 2, 0, 1], [3, 3, 3, 3, -1, 0]], np.int32), 3, 4)
    # Two rows of (R, L * slots_per_rank), of which the second is summed.
    board = np.array([[[99] * 4] * 3, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]], np.uint32)
    around = np.full((3, 2, 4), 99, np.uint32)
    sums = np.zeros((1, 2), np.int64)
    known = derive_epoch_map(placement)
    assert not sum_slots(board, np.array([1]), *known, around[1:2], sums).any()
    assert around[1].tolist() == [[1 + 9, 2 + 10, 6, 0], [12, 0, 0, 3 + 4 + 7 + 8]]
    assert sums.tolist() == [[28, 34]]
    assert (around[[0, 2]] == 99).all()
    assert (board[0] == 99).all()


@pytest.mark.parametrize("tokens, overflows", [(2**31 - 1, False), (2**31, True)])
def test_an_expert_of_more_tokens_than_32_bits_hold_is_reported(tokens, overflows):
    """The sum alone would not show the overflow of a count."""
    known = derive_epoch_map(Placement(np.zeros((1, 2), np.int32), 2, 1))
    board, rows = np.array([[[tokens], [tokens]]], np.uint32), np.zeros(1, np.int64)
    total, sums = np.zeros((1, 1, 1), np.uint32), np.zeros((1, 1), np.int64)
    assert sum_slots(board, rows, *known, total, sums).tolist() == [overflows]
    assert sums.tolist() == [[2 * tokens]]


def test_the_step_that_all_ranks_have_passed_is_the_smallest_of_their_newest():
    rng, newest = np.random.default_rng(0), np.full(SHAPE.num_ranks, NO_STEP)
    buffer = StepBuffer(CountingSide.DESTINATION, SHAPE, 64)
    rules = StepRules(1, 0, np.array([EPOCH]))
    assert buffer.lowest == NO_STEP
    for _ in range(60):
        rank = int(rng.integers(SHAPE.num_ranks))
        # Reports that are repeated, that rise by one, and of a rank that is ahead.
        step = max(0, int(newest[rank] + rng.choice([-3, 0, 1, 1, 6])))
        buffer.release(buffer.pending[:-60])
        buffer.add(Fleet().run([step]).report(rank), np.zeros(1, np.bool_), rules)
        newest[rank] = max(newest[rank], step)
        assert buffer.lowest == newest.min()
    assert buffer.lowest > 20


def test_quarantine_counts_all_and_keeps_few():
    quarantine = Quarantine()
    for step in range(10):
        quarantine.add(EpRank(1), Rejection(Reason.LATE_STEP, 3, f"step {step}"))
    assert quarantine.rank_steps == {Reason.LATE_STEP: 30}
    kept = tuple((1, f"step {step}") for step in range(2, 10))
    assert quarantine.samples(Reason.LATE_STEP) == kept
    assert quarantine.samples(Reason.SUM_MISMATCH) == ()
