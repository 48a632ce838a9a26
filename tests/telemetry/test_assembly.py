"""R18 and R19: only complete steps that add up enter a window."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.errors import Reason, ShapeMismatch
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.telemetry.assembly import StepAssembler
from tests.telemetry.reports import (
    EPOCH,
    PLACEMENT,
    SHAPE,
    Fleet,
    make_assembler,
    reasons,
    windows_of,
)


@pytest.mark.parametrize("side", list(CountingSide))
def test_r18_a_step_is_complete_when_the_last_rank_reported_it(side):
    assembler, run = make_assembler(), Fleet().run(range(10, 14))
    assert assembler.take(run.report(0, side)).complete == ()
    assert assembler.take(run.report(2, side)).complete == ()
    intake = assembler.take(run.report(1, side))
    ((phase, window),) = intake.complete
    assert phase is Phase.DECODE
    assert window.counts.dtype == np.uint32
    assert np.array_equal(window.counts, run.load)
    assert window.steps.tolist() == [10, 11, 12, 13]
    assert window.epochs.tolist() == [5] * 4
    assert np.array_equal(window.tokens, run.tokens)
    assert np.allclose(window.compute_s, [[0.001, 0.002, 0.003]] * 4)
    assert intake.accepted_steps == 4
    assert intake.highest_step == 13
    assert assembler.pending() == 0


def test_r18_a_lost_rank_never_shrinks_the_set():
    assembler, run = make_assembler(), Fleet().run(range(500))
    for first in range(0, 500, 50):
        for rank in (0, 2):
            intake = assembler.take(run.report(rank, only=slice(first, first + 50)))
            assert intake.complete == ()
    assert assembler.pending() == 256


def test_a_row_used_again_has_nothing_of_an_earlier_step():
    """Rows are not cleared: until a rank reports, its values in a row are those of that step."""
    assembler, first = make_assembler(max_pending=1), Fleet().run([0])
    assert windows_of([assembler.take(first.report(rank)) for rank in range(3)])
    run = Fleet(1).run([1], idle=(2,))
    window = windows_of([assembler.take(run.report(rank)) for rank in range(3)])[Phase.DECODE]
    assert np.array_equal(window.counts, run.load)
    assert np.array_equal(window.tokens, run.tokens) and window.tokens[0, 2] == 0


def test_r18_with_a_stride_only_sampled_steps_count_from_the_announced_one():
    assembler, run = make_assembler(), Fleet().run(range(20))
    assembler.sample(4, 10)
    intakes = [assembler.take(run.report(rank)) for rank in range(3)]
    assert windows_of(intakes)[Phase.DECODE].steps.tolist() == [*range(10), 12, 16]
    assert not any(intake.rejected for intake in intakes)
    assert assembler.pending() == 0


def test_r18_a_step_that_every_rank_passed_is_given_up():
    assembler, run = make_assembler(), Fleet().run(range(6))
    assembler.take(run.report(0))
    assembler.take(run.report(1))
    # The recorder of rank 2 dropped steps 2 and 3.
    first = assembler.take(run.report(2, only=slice(0, 2)))
    last = assembler.take(run.report(2, only=slice(4, 6)))
    assert windows_of([first, last])[Phase.DECODE].steps.tolist() == [0, 1, 4, 5]
    assert reasons(last) == {Reason.INCOMPLETE_STEP: 4}
    assert "reported by 2 of 3 ranks" in last.rejected[0].detail
    assert assembler.pending() == 0


def test_source_counts_are_kept_per_rank_and_phase():
    assembler, run = make_assembler(), Fleet().run(range(3))
    for rank in range(3):
        source = assembler.take(run.report(rank, CountingSide.SOURCE)).source
        assert source is not None
        assert np.array_equal(source[Phase.DECODE], run.routed[:, rank].sum(axis=0))
    assert make_assembler().take(run.report(0)).source is None


def test_dummy_steps_are_excluded():
    assembler, run = make_assembler(), Fleet().run(range(3))
    intakes = [assembler.take(run.report(rank, dummy=True)) for rank in range(3)]
    assert windows_of(intakes) == {}
    assert not any(intake.rejected for intake in intakes)
    assert assembler.pending() == 0


@pytest.mark.parametrize("side", list(CountingSide))
def test_a_rank_idle_in_a_step_still_serves_the_others(side):
    assembler, run = make_assembler(), Fleet().run(range(3), idle=(1,))
    intakes = [assembler.take(run.report(rank, side)) for rank in range(3)]
    assert np.array_equal(windows_of(intakes)[Phase.DECODE].counts, run.load)


def test_a_report_resent_changes_nothing():
    assembler, run = make_assembler(), Fleet().run(range(4))
    for rank in range(2):
        assembler.take(run.report(rank))
    again = assembler.take(run.report(0))
    assert reasons(again) == {Reason.DUPLICATE_STEP: 4}
    assert again.highest_step == 3
    window = windows_of([assembler.take(run.report(2))])[Phase.DECODE]
    assert np.array_equal(window.counts, run.load)
    after = assembler.take(run.report(2))
    assert reasons(after) == {Reason.DUPLICATE_STEP: 4}
    assert after.complete == ()
    assert assembler.pending() == 0


def test_an_unknown_epoch_is_refused_and_named():
    assembler, run = make_assembler(), Fleet().run(range(4))
    intake = assembler.take(run.report(0, epoch=9))
    assert reasons(intake) == {Reason.UNKNOWN_EPOCH: 4}
    assert "epoch 9: known are [5]" in intake.rejected[0].detail
    assert intake.highest_step == 3
    assert 9 not in assembler._epochs


def test_ranks_that_disagree_on_the_epoch_void_the_step():
    assembler, run = make_assembler(), Fleet().run(range(2))
    assembler.learn_epoch(Epoch(6), PLACEMENT)
    assembler.take(run.report(0))
    assert reasons(assembler.take(run.report(1, epoch=6))) == {Reason.EPOCH_DISAGREES: 2}
    last = assembler.take(run.report(2))
    assert last.complete == ()
    assert reasons(last) == {Reason.EPOCH_DISAGREES: 6}


def joined(one, other):
    """Return a report with the steps of two reports of a rank."""
    steps = np.concatenate([one.steps, other.steps])
    return replace(one, steps=steps, counts=np.concatenate([one.counts, other.counts]))


def test_steps_of_two_epochs_in_one_report_use_their_own_maps():
    other = Placement(np.array([[3, 2, 1, 0, 1, 2], [0, 1, 2, 3, -1, 1]], np.int32), 3, 4)
    assembler = make_assembler()
    assembler.learn_epoch(Epoch(6), other)
    before = Fleet().run(range(3))
    after = Fleet(1, other).run(range(3, 6), epoch=6)
    reports = [joined(before.report(rank), after.report(rank)) for rank in range(3)]
    window = windows_of([assembler.take(report) for report in reports])[Phase.DECODE]
    assert np.array_equal(window.counts, np.concatenate([before.load, after.load]))
    assert window.epochs.tolist() == [5, 5, 5, 6, 6, 6]


def test_ranks_in_different_phases_make_a_mixed_step():
    assembler, run = make_assembler(), Fleet().run(range(2))
    reports = run.report(0, phase=Phase.PREFILL), run.report(1), run.report(2)
    assert list(windows_of(map(assembler.take, reports))) == [Phase.MIXED]


def test_phases_are_told_apart_inside_one_report():
    assembler = make_assembler()
    decode, prefill = Fleet().run(range(2)), Fleet(1).run(range(2, 4), phase=Phase.PREFILL)
    intakes = [assembler.take(run.report(rank)) for run in (decode, prefill) for rank in range(3)]
    windows = windows_of(intakes)
    assert np.array_equal(windows[Phase.DECODE].counts, decode.load)
    assert np.array_equal(windows[Phase.PREFILL].counts, prefill.load)


def test_memory_is_bounded_and_the_oldest_step_gives_way():
    assembler, run = make_assembler(max_pending=8), Fleet().run(range(20))
    first = assembler.take(run.report(0))
    assert reasons(first) == {Reason.LATE_STEP: 12}
    assert assembler.pending() == 8
    assert reasons(assembler.take(run.report(1))) == {Reason.LATE_STEP: 12}
    last = assembler.take(run.report(2))
    assert windows_of([last])[Phase.DECODE].steps.tolist() == list(range(12, 20))
    later = Fleet().run(range(20, 30))
    assembler.take(later.report(0, only=slice(0, 6)))
    crowded = assembler.take(later.report(0, only=slice(6, 10)))
    assert reasons(crowded) == {Reason.INCOMPLETE_STEP: 2}
    behind = assembler.take(later.report(1))
    assert reasons(behind) == {Reason.LATE_STEP: 2}


def test_what_is_refused_for_a_reason_of_its_own_is_not_late_where_there_is_no_room():
    assembler = make_assembler(max_pending=4)
    one, other = Fleet().run(range(6), epoch=7), Fleet(1).run(range(6, 12))
    intake = assembler.take(joined(one.report(0), other.report(0)))
    assert reasons(intake) == {Reason.UNKNOWN_EPOCH: 6, Reason.LATE_STEP: 2}
    late, unknown = intake.rejected
    assert late.detail == "rank 0 steps 6..7 of epoch 5: step 7 and all before it are closed"
    assert "epoch 7: known are [5]" in unknown.detail
    assert intake.accepted_steps == assembler.pending() == 4


def test_a_report_that_makes_others_give_way_is_told_its_own_reason_first():
    assembler, run = make_assembler(max_pending=4), Fleet().run(range(8))
    assembler.take(run.report(0, only=slice(0, 4)))
    intake = assembler.take(run.report(0))
    found = [rejection.reason for rejection in intake.rejected]
    assert found == [Reason.DUPLICATE_STEP] + 4 * [Reason.INCOMPLETE_STEP]


def test_an_epoch_announced_again_replaces_its_placement():
    wrong = Placement(np.array([[1, 0, 2, 3, 0, -1], [3, 2, 1, 0, 3, 3]], np.int32), 3, 4)
    assembler = StepAssembler(SHAPE)
    assembler.learn_epoch(EPOCH, wrong)
    assembler.learn_epoch(EPOCH, PLACEMENT)
    run = Fleet().run(range(3))
    window = windows_of([assembler.take(run.report(rank)) for rank in range(3)])[Phase.DECODE]
    assert np.array_equal(window.counts, run.load)
    with pytest.raises(ShapeMismatch):
        assembler.learn_epoch(EPOCH, Placement(np.zeros((1, 6), np.int32), 3, 4))
    for ranks, experts in ((3, 5), (3, 40), (2, 4)):
        with pytest.raises(ShapeMismatch, match=rf"2, 6, {ranks}, {experts}"):
            assembler.learn_epoch(EPOCH, Placement(PLACEMENT.phy2log.copy(), ranks, experts))


def test_an_epoch_forgotten_while_its_steps_were_pending_voids_them_and_nothing_else():
    assembler, run = make_assembler(), Fleet().run(range(2))
    assembler.take(run.report(0))
    assembler.take(run.report(1))
    for epoch in range(6, 14):
        assembler.learn_epoch(Epoch(epoch), PLACEMENT)
    found = reasons(assembler.take(run.report(2)))
    assert found == {Reason.UNKNOWN_EPOCH: 2, Reason.INCOMPLETE_STEP: 4}
    assert assembler.pending() == 0


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(CountingSide),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_any_interleaving_and_any_resending_assembles_the_same_steps(seed, side, cuts, order):
    """The naive twin sums the routes over source ranks."""
    random, total = Random(order), sum(cuts)
    run = Fleet(seed).run(range(total))
    queues = []
    for rank in range(3):
        edges = np.cumsum([0, *random.sample(cuts, len(cuts))])
        queues.append(
            [run.report(rank, side, slice(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
        )
    assembler, intakes = make_assembler(), []
    sent: list[LoadReport] = []
    while any(queues):
        if sent and random.random() < 0.3:
            intakes.append(assembler.take(random.choice(sent)))
            continue
        queue = random.choice([queue for queue in queues if queue])
        sent.append(queue.pop(0))
        intakes.append(assembler.take(sent[-1]))
    window = windows_of(intakes)[Phase.DECODE]
    assert np.array_equal(window.counts, run.load)
    assert window.steps.tolist() == list(range(total))
    assert np.array_equal(window.tokens, run.tokens)
