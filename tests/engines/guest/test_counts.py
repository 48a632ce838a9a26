"""Counts by slot become counts by expert, step by step."""

import numpy as np
import pytest
import structlog
import torch

from evenkeel_moe.agent.device_recorder import StepCounts
from evenkeel_moe.engines.guest.counts import StepNote, count_once


def test_an_error_of_every_step_does_not_fill_the_log():
    counts = StepCounts(3, lambda note, values: None)
    with structlog.testing.capture_logs() as said:
        for step in range(1000):
            try:
                counts.take(StepNote(step, 0, False, None), torch.zeros(1, 4), torch.zeros(2, 5))
            except RuntimeError:
                counts.failed(step)
    assert [line["times"] for line in said] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_counts_by_slot_become_counts_by_expert_with_the_map_of_their_step():
    seen = []
    counts = StepCounts(3, lambda note, values: seen.append((note.step, values.tolist())))
    by_slot = torch.tensor([[5, 1, 2, 4]], dtype=torch.int32)
    counts.take(StepNote(0, 0, False, None), by_slot, torch.tensor([[0, 1, 2, 0]]))
    counts.take(StepNote(1, 1, False, None), by_slot, torch.tensor([[2, 1, -1, 0]]))
    counts.take(StepNote(2, 1, False, None), by_slot, None)
    assert seen == [(0, [[9, 1, 2]]), (1, [[4, 1, 5]]), (2, [[5, 1, 2, 4]])]


def test_the_engine_may_fill_its_own_counter_again():
    seen = []
    counts = StepCounts(3, lambda note, values: seen.append(values))
    own = torch.tensor([[5, 1, 2, 4]])
    for view in (own, own[:, 1:3]):
        counts.take(StepNote(0, 0, False, None), view, None)
    own.zero_()
    assert [values.tolist() for values in seen] == [[[5, 1, 2, 4]], [[1, 2]]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("batch", "padded"), [(1, 8), (12, 17), (100, 256), (24, 24)])
def test_ranks_that_each_route_a_chunk_count_the_batch_once(ranks, batch, padded):
    """The rows that pad the last chunks are counted by the engine, and must not be by us."""
    rng, top_k, chunk = np.random.default_rng(3), 2, -(-padded // ranks)
    tokens = 0
    for place in range(ranks):
        counted = min(chunk, batch)
        counts = rng.multinomial(counted * top_k, [1 / 6] * 6, size=2)
        part, own = count_once(counts, counted, batch, place)
        assert (part.sum(axis=1) == own * top_k).all()
        assert (part <= counts).all() and (part >= 0).all()
        tokens += own
    assert tokens == batch


def test_ranks_that_each_route_the_whole_batch_count_it_on_the_first():
    counts = np.array([[3, 4, 5]])
    parts = [count_once(counts, 6, 6, place) for place in range(4)]
    assert [tokens for _, tokens in parts] == [6, 0, 0, 0]
    assert np.array_equal(sum(part for part, _ in parts), counts)
