from dataclasses import fields

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.craft.policy import (
    CraftOptions,
    GainWeighting,
    ReplicaRule,
    plan_craft,
)
from evenkeel_moe.planning.policies.gem.policy import GemOptions, plan_gem
from evenkeel_moe.planning.policies.registry import POLICIES, find_policy
from tests.planning.builders import a_problem

SHAPE = ModelShape(6, 8, 4, 4, 2, 100, pool_slots_per_rank=24)


def problem_of(shape=SHAPE):
    load = np.random.default_rng(2).lognormal(4, 1, (6, 6, 8))
    return a_problem(load, shape, max_evaluations=20_000)


def test_options_reach_the_policy_in_the_types_of_its_class():
    craft = find_policy("craft").with_options(
        {"max_replicas_per_rank": 1, "weighting": "by_replicas"}
    )
    wanted = CraftOptions(GainWeighting.BY_REPLICAS, max_replicas_per_rank=1)
    assert craft(problem_of()).placement == plan_craft(problem_of(), wanted).placement
    gem = find_policy("gem").with_options({"restarts": 2, "noise": 0})
    by_hand = plan_gem(problem_of(), GemOptions(restarts=2, noise=0.0))
    assert gem(problem_of()).placement == by_hand.placement


def test_craft_places_no_more_replicas_than_the_bound():
    craft = find_policy("craft").with_options({"rule": "memory"})
    assert craft(problem_of()).numbers["replicas"] > 4
    for most in (0, 1):
        for rule in ReplicaRule:
            options = {"max_replicas_per_rank": most, "rule": rule.value}
            proposal = find_policy("craft").with_options(options)(problem_of())
            assert proposal.numbers["replicas"] <= 4 * most
            assert proposal.numbers["replication_factor"] <= most


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_option_that_is_offered_is_a_field_and_takes_its_default(name):
    one = POLICIES[name]
    defaults = one.options()
    assert set(one.option_names) <= {field.name for field in fields(defaults)}
    given = {key: getattr(defaults, key) for key in one.option_names}
    set_ones = {key: value for key, value in given.items() if value is not None}
    problem = problem_of(ModelShape(6, 8, 4, 3, 2, 100))
    answer = one.with_options(set_ones)(problem)
    assert answer.placement == POLICIES[name](problem).placement


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "gem",
            {"restart": 3},
            "unknown options of gem: restart; known: least_drop, noise, p",
        ),
        (
            "keel",
            {"change": 3},
            "of keel: change; known: caution, plan_steps, stick",
        ),
        ("eplb", {"a": 1}, "unknown options of eplb: a; known: plan_steps$"),
        ("eplb-global", {"a": 1}, "unknown options of eplb-global: a; known: plan_steps$"),
        ("magic", {"plan_steps": 16}, "unknown policy 'magic'"),
        ("metro", {"plan_steps": 0}, "options of metro: plan_steps is 0, must be at least 1"),
        ("gem", {"plan_steps": 1.5}, "gem.plan_steps is 1.5, must be a whole number"),
        ("gem", {"restarts": 2.5}, "gem.restarts is 2.5, must be a whole number"),
        ("gem", {"restarts": True}, "gem.restarts is True, must be a whole number"),
        ("gem", {"restarts": 10**400}, "gem.restarts is 1000000"),
        ("gem", {"restarts": 1001}, "options of gem: restarts is 1001, must be from 1 to 1000"),
        ("gem", {"noise": 1}, r"options of gem: noise is 1.0, must be in \[0, 1\)$"),
        ("gem", {"noise": "much"}, "gem.noise is 'much', must be a finite number"),
        ("gem", {"noise": float("nan")}, "gem.noise is nan, must be a finite number"),
        ("gem", {"noise": 10**400}, "must be a finite number below"),
        ("craft", {"rule": "best"}, "craft.rule is 'best', must be one of memory, marginal_gain"),
        ("craft", {"rule": 3}, "craft.rule is 3, must be one of"),
        ("craft", {"max_replicas_per_rank": -1}, "max_replicas_per_rank is -1, must not be neg"),
        ("libra", {"locality": 2}, "options of libra: locality is 2.0, must be in"),
        ("keel", {"caution": -0.1}, "options of keel: caution is -0.1, must be in"),
    ],
)
def test_options_that_cannot_be_right_are_refused_in_words(name, options, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        find_policy(name).with_options(options)
    assert len(str(caught.value)) < 220
