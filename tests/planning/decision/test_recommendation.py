import math
import re
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.calibration import Calibration
from evenkeel_moe.planning.decision.cycle import run_cycle
from evenkeel_moe.planning.decision.recommendation import (
    recommend,
    score_shadows,
)
from evenkeel_moe.planning.decision.verdict import Call
from evenkeel_moe.planning.policies import registry as policies
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.signals.change_detection import Change
from tests.planning.decision.test_cycle import SHAPE, inputs, listening, skewed


def ask(load, compare=("keel",), free_bytes=None, **changes):
    return recommend(inputs(load, **changes), compare, free_bytes)


def test_the_recommendation_is_what_a_cycle_would_do_and_moves_nothing():
    load = skewed(60)
    found, cycle = ask(load), run_cycle(inputs(load))
    assert found.call is Call.RECOMMEND
    assert found.reason is Reason.PLAN_STARTED
    own, other = found.policies
    assert (own.policy, other.policy) == ("eplb", "keel")
    assert own.verdict == cycle.verdict
    assert own.copies == cycle.numbers["copies"]
    assert own.nbytes == cycle.numbers["bytes"]
    assert (found.window_steps, found.planned_on_steps, found.scored_on_steps) == (60, 50, 10)
    assert found.steps_since_change is None


@pytest.mark.parametrize("copy_cost", [3.7, 5.3, 31.0, 57.0, 121.0])
def test_the_figures_of_a_net_gain_add_up_as_they_are_printed(copy_cost):
    words = " ".join(ask(skewed(60), objective=Objective(copy_cost=copy_cost)).words)
    found = re.search(r"Net gain (\S+)% - (\S+)% = (\S+)%: ", words)
    assert found is not None, words
    gain, price, net = found.groups()
    assert float(price) > 0
    assert round(float(gain) - float(price) - float(net), 9) == 0


def test_without_load_in_the_later_steps_no_number_of_replicas_is_judged():
    load = skewed(60)
    load[50:] = 0
    *_, replicas = ask(load).words
    assert replicas == (
        "4 extra replicas per layer: what another number would save is unknown, as no later step"
        " had load."
    )


def test_a_plan_on_fewer_steps_than_the_window_must_hold_says_so():
    few = ask(skewed(26))
    assert few.planned_on_steps < 24
    assert few.words[1].startswith("The plan rests on fewer steps than min_window_steps (24)")
    assert "min_window_steps" not in " ".join(ask(skewed(60)).words)


def test_the_words_name_the_margin_on_the_price_where_only_that_is_missing():
    words = "A lower bound above 1.5 times the price of the copies would be needed."
    free = ask(skewed(60))
    verdict, copies = free.policies[0].verdict, free.policies[0].copies
    assert verdict is not None and copies
    lower = verdict.gain_lower * verdict.saved_per_step / verdict.gain * 1000 / copies
    for share, call in ((0.6, Call.RECOMMEND), (0.8, Call.INSUFFICIENT_EVIDENCE)):
        found = ask(skewed(60), objective=Objective(copy_cost=share * lower))
        assert found.call is call
        assert (words in found.words) == (call is not Call.RECOMMEND)
    assert words not in free.words


@pytest.mark.parametrize("busy", [0, 1])
def test_a_saving_that_is_not_known_is_one_sentence_without_figures(busy):
    load = skewed(60)
    load[50 + busy :] = 0
    found = ask(load)
    assert found.policies[0].copies
    assert found.words[-2] == (
        f"What it saves is unknown: {busy} of the later steps had load, and at least 2 are needed:"
        " insufficient_evidence."
    )
    assert not re.search("nan|never", " ".join(found.words))


def test_the_size_of_copies_is_not_told_where_that_of_an_expert_is_unknown():
    found = ask(skewed(60), shape=replace(SHAPE, bytes_per_expert=0))
    own = found.policies[0]
    assert own.copies and own.nbytes is None
    assert f"eplb would make {own.copies} copies between ranks, of unknown size." in found.words


def test_a_calibrated_recommendation_says_so():
    found = ask(skewed(60), calibration=Calibration(0.75, 4))
    own = found.policies[0].verdict
    assert own is not None and own.calibration.plans == 4
    said = (
        f"The cost model predicts {own.gain_modelled:.2%}; what the last measured 4 plans delivered"
        " corrects that by the factor 0.75."
    )
    assert said in found.words
    assert any(f"It saves {own.gain:.2%}" in words for words in found.words)
    assert not any("by the factor" in words for words in ask(skewed(60)).words)


def test_a_recommendation_states_the_cost_model_and_its_unit():
    cost = CostModel(
        CostCurves.linear(np.full(4, 1e-6)),
        source=CostSource.MEASURED,
        detail="1200 steps",
        fit_error=0.034,
    )
    found = ask(skewed(60), objective=Objective(cost=cost, copy_cost=1e-6))
    assert found.call is Call.RECOMMEND
    own = found.policies[0].verdict
    assert own is not None
    assert found.cost_model == own.cost_model == cost.basis
    assert found.words[1] == (
        "Cost model: measured while the ranks served (1200 steps, mean error 3.4%)."
    )
    assert " s saved a step" in " ".join(found.words)
    short = ask(skewed(3), objective=Objective(cost=cost))
    assert short.cost_model.source is CostSource.MEASURED


def test_too_short_a_window_is_insufficient_evidence_and_not_a_figure():
    for load in (skewed(0), skewed(23)):
        found = ask(load)
        assert (found.call, found.reason) == (Call.INSUFFICIENT_EVIDENCE, Reason.INSUFFICIENT_DATA)
        assert found.policies == ()
        assert found.redundancy is None
        assert f"{len(load)} complete steps, 24 are needed" in found.words[0]
    silent = ask(np.zeros((60, 2, 8), np.uint32))
    assert silent.call is Call.INSUFFICIENT_EVIDENCE
    assert "no token was routed" in silent.words[0]


def test_a_change_of_traffic_is_told():
    load = np.concatenate([skewed(64), skewed(24, (6, 7))])
    for policy, steps in (("keel", 16), ("gem", 16), ("eplb", 80)):
        found = ask(load, policy=policy)
        assert found.steps_since_change == 24
        assert found.planned_on_steps == steps
        assert f"Planned on {steps} steps" in found.words[0]


def split_of(load):
    split = run_cycle(inputs(load)).split
    assert split is not None
    return split


def test_a_policy_on_trial_that_fails_says_so_in_its_own_row(monkeypatch):
    def broken(problem):
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setitem(policies.POLICIES, "broken", PolicyEntry("broken", "", broken))
    split = split_of(skewed(60))
    rows = score_shadows(inputs(skewed(60)), split, ("broken", "wishful", "keel"))
    assert [row.reason for row in rows] == [
        Reason.PLANNER_FAILED,
        Reason.UNKNOWN_POLICY,
        Reason.PLAN_STARTED,
    ]
    assert "ZeroDivisionError: nobody thought of this" in rows[0].detail
    assert (rows[0].copies, rows[0].verdict) == (None, None)
    assert rows[2].verdict is not None


def test_a_policy_on_trial_is_not_held_to_what_the_cycles_own_may_evaluate(monkeypatch):
    told = listening(monkeypatch)
    split = split_of(skewed(60))
    score_shadows(inputs(skewed(60), max_evaluations=7), split, ("listener",))
    assert [problem.max_evaluations for problem in told] == [None]


def test_shadows_are_scored_on_the_very_split_of_the_cycle():
    load = skewed(60)
    cycle = run_cycle(inputs(load))
    assert cycle.split is not None
    (same,) = score_shadows(inputs(load), cycle.split, ("eplb",))
    assert same.verdict == cycle.verdict
    other = replace(cycle.split, begin=10, change=Change(10, math.nan))
    (elsewhere,) = score_shadows(inputs(load), other, ("eplb",))
    assert elsewhere.copies is not None


BARE = ModelShape(2, 8, 4, 2, 2, 1000)
"""A shape without replicas."""


def redundancy(load, shape=BARE, free_bytes=None, **changes):
    found = ask(load, (), free_bytes, shape=shape, current=Placement.initial(shape), **changes)
    assert found.redundancy is not None
    return found.redundancy, found.words


def test_replicas_that_pay_are_advised_with_their_memory():
    found, words = redundancy(skewed(60), free_bytes=10_000)
    assert found.present == 0
    assert found.advised > 0
    assert [level.replicas_per_layer for level in found.levels] == [0, 1, 2, 4, 8]
    level = next(level for level in found.levels if level.replicas_per_layer == found.advised)
    assert level.gain_lower > 0
    assert level.fits is True
    # 2 layers x replicas of 1000 bytes on 4 ranks; the fullest rank is rounded up.
    assert level.extra_bytes_per_rank == math.ceil(2 * found.advised / 4) * 1000
    assert "free on the fullest: 10 kB" in words[-1]
    assert found.levels[0].marginal_gain is None
    assert found.levels[1].marginal_gain == pytest.approx(found.levels[1].gain)


def test_replicas_that_cost_reading_are_advised_against():
    """Two hot experts pay for replicas by tokens, but not where every expert takes as long."""
    shape = replace(SHAPE, slots_per_rank=3)
    by_tokens, _ = redundancy(skewed(60), shape)
    reading = CostModel(replica=ReplicaWork(read_tokens=500.0), source=CostSource.DERIVED)
    found, words = redundancy(skewed(60), shape, objective=Objective(cost=reading))
    assert (by_tokens.present, by_tokens.advised) == (4, 8)
    assert (found.present, found.advised) == (4, 0)
    assert found.levels[0].gain == pytest.approx(1 / 3)
    assert words[1] == "Cost model: derived, not measured."
    assert words[-3:-1] == (
        (
            "0 extra replicas per layer instead of 4 would save 33.33% of predicted MoE time; the"
            f" saving is from {found.levels[0].gain_lower:.2%} to {found.levels[0].gain_upper:.2%}."
        ),
        "It is the smallest number that costs less than 0.2%, by the lower end.",
    )


def test_memory_bounds_the_advice_and_unknown_memory_does_not_pretend():
    tight, _ = redundancy(skewed(60), free_bytes=0)
    assert tight.advised == 0
    assert [level.fits for level in tight.levels] == [True, False, False, False, False]
    unknown, words = redundancy(skewed(60), free_bytes=None)
    assert unknown.advised > 0
    assert [level.fits for level in unknown.levels] == [True, None, None, None, None]
    assert "free on the fullest: unknown" in words[-1]
    sizeless, _ = redundancy(skewed(60), replace(BARE, bytes_per_expert=0), free_bytes=10_000)
    assert {level.extra_bytes_per_rank for level in sizeless.levels} == {None}
    assert {level.fits for level in sizeless.levels} == {None}


def test_replicas_that_bring_nothing_are_called_superfluous():
    """All experts have the same load and ranks hold two each, so replicas can only unbalance."""
    load = np.full((60, 2, 8), 50, np.uint32)
    roomy = replace(SHAPE, slots_per_rank=4)
    found, words = redundancy(load, roomy)
    assert (found.present, found.advised) == (8, 0)
    freed = found.levels[0]
    assert freed.extra_bytes_per_rank == -4000
    assert freed.fits is True
    assert "= 4 kB fewer on a rank" in words[-1]
    kept, words = redundancy(load, BARE)
    assert kept.advised == 0
    assert words[-1] == (
        "0 extra replicas per layer: no other number tried pays, by the lower end of its interval."
    )


def test_craft_levels_are_told_per_layer_beside_the_uniform_ones():
    """Only layer 0 is skewed, so CRAFT gives layer 1 nothing and takes less memory."""
    load = skewed(60)
    load[:, 1] = 50
    found, _ = redundancy(load, free_bytes=10_000)
    assert [level.replication_factor for level in found.craft] == [1, 2]
    assert [level.layers_with_replicas for level in found.craft] == [1, 1]
    for level in found.craft:
        assert level.replicas <= level.replication_factor * BARE.num_ranks
        assert level.extra_bytes_per_rank == math.ceil(level.replicas / 4) * 1000
        assert level.gain > 0
    assert found.craft_factors is not None
    assert found.craft_factors.memory == 2
    chosen = found.craft_allocation
    assert chosen is not None
    assert (chosen.replication_factor, chosen.counts) == (1, (1, 2, 4))
    assert chosen.replicas == (2, 0)
    assert chosen.base[0] < chosen.base[1] and chosen.gain[0][1] > 0.1 > chosen.gain[1][1]
    options = {"craft": {"max_replicas_per_rank": 0}}
    none, _ = redundancy(load, policy_options=options)
    assert none.craft_allocation is not None
    assert none.craft_allocation.replicas == (0, 0)
    unknown, _ = redundancy(load, free_bytes=None)
    assert unknown.craft_factors is not None
    assert unknown.craft_factors.memory is None


def test_the_moe_share_is_known_only_where_times_are_in_seconds():
    cost = CostModel(CostCurves.linear(np.full(4, 1e-6)), source=CostSource.MEASURED)
    found, _ = redundancy(skewed(60), objective=Objective(cost=cost), step_s=1.0)
    assert found.moe_share is not None
    assert 0 < found.moe_share < 1
    for known in ({"objective": Objective(cost=cost)}, {"step_s": 1.0}):
        assert redundancy(skewed(60), **known)[0].moe_share is None
    impossible, _ = redundancy(skewed(60), objective=Objective(cost=cost), step_s=1e-9)
    assert impossible.moe_share is None
