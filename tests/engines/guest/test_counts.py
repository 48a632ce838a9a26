"""The tokens of a batch that several ranks got are counted once, those of a dummy step never."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.engines.guest.counts import StepNote, count_once, record_step
from evenkeel_moe.model.load import Phase


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


def test_rows_that_pad_a_batch_are_taken_from_the_expert_that_they_fill():
    counts = np.array([[9, 4, 3], [8, 4, 4]])
    part, tokens = count_once(counts, 8, 5, 0, filler=0)
    assert (part.tolist(), tokens) == ([[3, 4, 3], [2, 4, 4]], 5)
    scattered, tokens = count_once(np.array([[2, 8, 6]]), 8, 5, 0, filler=0)
    assert (int(scattered.sum()), tokens) == (10, 5) and (scattered >= 0).all()


@pytest.mark.parametrize(("dummy", "factor"), [(False, 1), (True, 0)])
def test_a_dummy_step_is_recorded_without_tokens(dummy, factor):
    told = []
    agent: Any = SimpleNamespace(record=lambda *values, **named: told.append((values, named)))
    counts = np.array([[3, 4, 5]])
    record_step(agent, StepNote(7, 2, dummy, 6), counts, 6, Phase.DECODE)
    [((step, recorded), named)] = told
    assert step == 7 and np.array_equal(recorded, factor * counts)
    assert (named["tokens"], named["dummy"], named["epoch"]) == (factor * 6, dummy, 2)
