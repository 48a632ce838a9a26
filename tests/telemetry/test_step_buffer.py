"""The memory of the assembler against a slow second implementation."""

import numpy as np

from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.telemetry.step_buffer import NO_STEP, StepBuffer
from tests.telemetry.reports import SHAPE


def test_the_step_that_all_ranks_have_passed_is_the_smallest_of_their_newest():
    rng = np.random.default_rng(0)
    buffer = StepBuffer(CountingSide.DESTINATION, SHAPE, 8)
    assert buffer.lowest == NO_STEP
    for _ in range(500):
        rank = int(rng.integers(SHAPE.num_ranks))
        # Reports that are repeated, that rise by one, and of a rank that is far ahead.
        buffer.advance(rank, buffer.highest[rank] + int(rng.choice([-3, 0, 1, 1, 40])))
        assert buffer.lowest == min(buffer.highest)
    assert buffer.lowest > 500
