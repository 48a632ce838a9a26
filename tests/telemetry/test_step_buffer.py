"""The memory of the assembler against a slow second implementation."""

import numpy as np

from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.telemetry.step_buffer import StepBuffer, StepRules
from evenkeel_moe.telemetry.step_kernels import NO_STEP
from tests.telemetry.reports import EPOCH, SHAPE, Fleet


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
