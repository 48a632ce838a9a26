import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.dispatch import Waterfill, expand_topk
from evenkeel_moe.dispatch.waterfill import count_by_rank, waterline
from evenkeel_moe.errors import InvalidInput, ShapeMismatch


def test_waterline_by_hand():
    # Loads 10, 4, 1 and 6 shared slots: H = ceil(21 / 3) = 7.
    score = torch.tensor([10, 4, 1])
    assert int(waterline(score, 6)) == 7
    assert int(waterline(score, 7)) == 8
    # A shared expert twice as wide costs two routed choices.
    assert int(waterline(score, 6, shared_cost=2)) == 9


def test_draws_follow_slack_among_all_ranks():
    rule = Waterfill(3, 4, 0, all_ranks=True, local_preference=0.0)
    n = 9000
    # Up to the waterline of 7, rank 1 has 3 to spare and rank 2 has 6.
    chosen = rule.choose(torch.zeros((n, 1), dtype=torch.int64), torch.tensor([10, 4, 1]), 6)
    share = torch.bincount(chosen, minlength=3) / n
    assert share.tolist() == pytest.approx([0, 1 / 3, 2 / 3], abs=0.02)


def test_local_preference_weighs_the_source():
    n = 9000
    score = torch.tensor([0, 0])
    slots = torch.full((n, 1), 4)
    for preference in (0.0, 1.0):
        rule = Waterfill(2, 4, 0, local_preference=preference)
        home = float((rule.choose(slots, score, n) == 0).double().mean())
        assert home == pytest.approx((1 + preference) / (2 + preference), abs=0.02)


def test_candidates_are_visited_ranks_and_the_source_only():
    rule = Waterfill(4, 2, 1)
    # Token 0 visits ranks 0 and 3, token 1 only its own; rank 2 is empty and not on the way.
    slots = torch.tensor([[0, 7], [2, 3]]).repeat(200, 1)
    chosen = rule.choose(slots, torch.tensor([5, 5, 0, 5]), 40)
    assert set(chosen[::2].tolist()) == {0, 1, 3}
    assert set(chosen[1::2].tolist()) == {1}
    everywhere = Waterfill(4, 2, 1, all_ranks=True).choose(slots, torch.tensor([5, 5, 0, 5]), 40)
    assert 2 in everywhere.tolist()


def test_without_slack_only_a_clearly_lighter_rank_draws_tokens_away():
    # Both candidates are above the waterline; only rank 2, which no token visits, is below.
    slots = torch.tensor([[2]] * 8)
    rule = Waterfill(3, 2, 0, lighter_by=0.1)
    assert int(waterline(torch.tensor([100, 80, 0]), 8)) == 63
    assert set(rule.choose(slots, torch.tensor([100, 80, 0]), 8).tolist()) == {1}
    assert set(rule.choose(slots, torch.tensor([100, 95, 0]), 8).tolist()) == {0}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_every_token_gets_exactly_one_shared_expert(seed, all_ranks):
    rng = np.random.default_rng(seed)
    ranks, per_rank = int(rng.integers(1, 6)), 3
    source = int(rng.integers(ranks))
    slots = torch.from_numpy(rng.integers(-1, ranks * per_rank, (int(rng.integers(0, 30)), 3)))
    rule = Waterfill(ranks, per_rank, source, all_ranks=all_ranks)
    score, number = rule.static_score(slots)
    chosen = rule.choose(slots, score, number)
    real = (slots >= 0).any(dim=1)
    assert ((chosen >= 0) == real).all()
    assert (chosen < ranks).all()
    if not all_ranks:
        for row, rank in zip(slots[real].tolist(), chosen[real].tolist(), strict=True):
            assert rank == source or rank in {slot // per_rank for slot in row if slot >= 0}
    wide, weights = expand_topk(slots, torch.ones(slots.shape), chosen, per_rank)
    assert int((wide >= 0).sum()) == int((slots >= 0).sum()) + int(real.sum())
    assert torch.equal(
        count_by_rank(wide[:, :-1], ranks, per_rank + 1), count_by_rank(slots, ranks, per_rank)
    )
    assert float(weights.sum()) == int((wide >= 0).sum())


def test_extended_layout_keeps_a_slot_behind_each_rank():
    slots = torch.tensor([[0, 5], [3, -1], [-1, -1]])
    weights = torch.tensor([[0.6, 0.4], [1.0, 0.0], [0.0, 0.0]])
    wide, share = expand_topk(slots, weights, torch.tensor([1, 0, -1]), 3, shared_weight=0.5)
    assert wide.tolist() == [[0, 6, 7], [4, -1, 3], [-1, -1, -1]]
    assert share.tolist() == [
        [pytest.approx(0.6), pytest.approx(0.4), 0.5],
        [1.0, 0.0, 0.5],
        [0.0, 0.0, 0.0],
    ]


def test_dynamic_score_sees_all_ranks_and_static_only_its_own():
    slots = torch.tensor([[0, 1], [2, 3]])
    rule = Waterfill(2, 2, 0)
    own, number = rule.static_score(slots)
    assert own.tolist() == [2, 2] and number == 2
    assert rule.static_score(torch.cat([slots, torch.full((5, 2), -1)]))[1] == 2
    assert rule.dynamic_score(torch.stack([own, torch.tensor([0, 9])])).tolist() == [2, 11]


def test_shared_work_evens_out_what_routing_left_uneven():
    rng = np.random.default_rng(3)
    ranks, per_rank, n = 4, 4, 2000
    law = np.array([4.0] * 4 + [1.0] * 12)
    routed = [torch.from_numpy(rng.choice(16, (n, 4), p=law / law.sum())) for _ in range(ranks)]
    landed = torch.stack([count_by_rank(slots, ranks, per_rank) for slots in routed])
    load, moved = landed.sum(dim=0), landed.sum(dim=0)
    for source, slots in enumerate(routed):
        rule = Waterfill(ranks, per_rank, source)
        moved = moved + torch.bincount(
            rule.choose(slots, rule.dynamic_score(landed), ranks * n), minlength=ranks
        )
    at_home = load + n
    assert int(moved.sum()) == int(at_home.sum())
    fluid = max(float(moved.sum()) / ranks, float(load.max()))
    assert float(moved.max()) < 1.02 * fluid
    assert float(at_home.max()) > 1.1 * fluid


@pytest.mark.parametrize(
    "arguments",
    [
        {"ep_rank": 4},
        {"slots_per_rank": 0},
        {"shared_cost": 0},
        {"local_preference": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(arguments):
    with pytest.raises(InvalidInput):
        Waterfill(**({"num_ranks": 4, "slots_per_rank": 2, "ep_rank": 0} | arguments))


def test_inputs_of_another_deployment_are_refused():
    rule = Waterfill(2, 2, 0)
    slots = torch.tensor([[0, 1]])
    with pytest.raises(ShapeMismatch):
        rule.choose(slots, torch.tensor([1, 2, 3]), 1)
    with pytest.raises(InvalidInput, match="float16"):
        rule.choose(slots, torch.ones(2, dtype=torch.float16), 1)
    with pytest.raises(ShapeMismatch):
        expand_topk(slots, torch.ones(1, 3), torch.tensor([0]), 2)
