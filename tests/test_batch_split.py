import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.batch_split import (
    choose_replicas,
    list_layers,
    slots_by_expert,
    split_tokens,
)
from tests.planning import twins


def choose(load, row, ranks):
    """Return (peak, active, tokens, chosen) of one layer."""
    tokens = np.asarray(load, np.float64)
    held = np.asarray(row, np.int32)
    first, following = slots_by_expert(held, len(tokens), ranks)
    active, by_rank = np.empty(ranks, np.int64), np.empty(ranks)
    chosen = np.empty(len(tokens), np.int64)
    peak = choose_replicas(tokens, held, first, following, active, by_rank, chosen)
    return peak, active, by_rank, chosen


@st.composite
def layers(draw):
    """(load, row, ranks) at random: experts twice on a rank, in no slot, or without tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, 14))
    row = rng.integers(0, experts, ranks * per_rank)
    row[rng.random(len(row)) < draw(st.sampled_from([0.0, 0.3]))] = -1
    load = rng.integers(0, 50, experts) * (rng.random(experts) < draw(st.floats(0.2, 1.0)))
    return load, row, ranks


@settings(max_examples=400)
@given(layers())
def test_the_worst_rank_has_the_fewest_active_experts_possible(layer):
    load, row, ranks = layer
    per_rank = len(row) // ranks
    peak, active, tokens, chosen = choose(load, row, ranks)
    assert peak == active.max() == twins.fewest_active(load, row, ranks)
    want_active, want_tokens = np.zeros(ranks, int), np.zeros(ranks)
    for expert, slot in enumerate(chosen):
        if load[expert] <= 0 or expert not in row:
            assert slot == -1
            continue
        assert row[slot] == expert
        want_active[slot // per_rank] += 1
        want_tokens[slot // per_rank] += load[expert]
    assert active.tolist() == want_active.tolist()
    assert tokens.tolist() == want_tokens.tolist()


def test_a_chain_of_experts_makes_room():
    # By weight, expert 0 takes rank 0 and expert 1 rank 1, as ranks without tokens are equal.
    # Expert 2 has only these two ranks, so expert 0 must move on to rank 2.
    row = [0, 2, 1, 2, 1, 0]
    peak, active, tokens, chosen = choose([9, 8, 1], row, 3)
    assert peak == 1 and active.tolist() == [1, 1, 1]
    assert chosen.tolist() == [5, 2, 1] and tokens.tolist() == [1, 8, 9]


def test_experts_confined_to_two_ranks_raise_the_peak_there_only():
    # Three experts live on ranks 0 and 1 alone; rank 2 has one.
    row = [0, 1, 2, 0, 1, 2, 3, -1, -1]
    peak, active, _, _ = choose([5, 4, 3, 2], row, 3)
    assert peak == 2 and sorted(active[:2].tolist()) == [1, 2] and active[2] == 1


def test_equal_peaks_are_decided_by_tokens_and_then_by_the_lower_rank():
    row = [0, 1, 2, 0, 1, 3]
    # One shared expert a rank; the heavier one avoids the rank of the busy expert 2.
    peak, _, tokens, chosen = choose([30, 20, 50, 1], row, 2)
    assert peak == 2 and chosen.tolist() == [3, 1, 2, 5] and tokens.tolist() == [70, 31]
    _, _, _, even = choose([30, 0, 7, 7], row, 2)
    assert even.tolist() == [0, -1, 2, 5]


@pytest.mark.parametrize("load", [[0, 0, 0], [float("nan"), -1.0, 0.0]])
def test_without_tokens_nothing_is_active(load):
    peak, active, tokens, chosen = choose(load, [0, 1, 2, 0], 2)
    assert peak == 0 and not active.any() and not tokens.any() and (chosen == -1).all()


def test_of_two_copies_on_a_rank_the_list_has_the_first():
    first, following = slots_by_expert(np.array([1, 0, 0, -1, 0, 1], np.int32), 3, 2)
    assert first.tolist() == [1, 0, -1]
    assert following[first[:2]].tolist() == [4, 5] and following[[4, 5]].tolist() == [-1, -1]


@pytest.mark.parametrize("whole", [False, True])
@given(layer=layers(), data=st.data())
def test_the_fullest_rank_has_the_fewest_tokens_possible(whole, layer, data):
    load, row, ranks = layer
    held = np.asarray(row, np.int32)
    load = np.where(np.isin(np.arange(len(load)), held), load, 0).astype(np.float64)
    before = np.array(data.draw(st.lists(st.integers(0, 99), min_size=ranks, max_size=ranks)))
    first, following, order = list_layers(held[None], len(load), ranks)
    flow, used = np.full(len(held), 7.0), before.astype(np.float64)
    peak = split_tokens(load, held, first[0], following[0], order[0], whole, flow, used)
    assert (flow >= 0).all() and (not whole or (flow == flow.round()).all())
    filled = held >= 0
    assert np.bincount(held[filled], flow[filled], len(load)) == pytest.approx(load)
    assert used == pytest.approx(before + flow.reshape(ranks, -1).sum(axis=1))
    # What a rank has already is like one more expert that only it holds.
    own = np.concatenate([held.reshape(ranks, -1), len(load) + np.arange(ranks)[:, None]], axis=1)
    best = twins.least_peak(np.concatenate([load, before]), own.reshape(-1), ranks)
    assert peak == used.max() == pytest.approx(np.ceil(best - 1e-6) if whole else best)
