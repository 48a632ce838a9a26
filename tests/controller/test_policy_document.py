"""Policies as documents, and changes that are refused."""

import math

import pytest

from evenkeel_moe.controller.policy_document import (
    change_policy,
    policy_document,
    policy_from_document,
)
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import CostChoice, DeploymentPolicy, Mode
from evenkeel_moe.model.schedule import Schedule


def test_a_policy_survives_its_document():
    policy = DeploymentPolicy(
        Mode.AUTO,
        "eplb",
        PlanLimits(max_moves=3),
        5.0,
        60.0,
        ("keel", "gem"),
        {"min_gain": 0.2},
        Schedule(("daily 01:00 - 05:00",), ("fri 00:00 - mon 00:00",)),
        {"gem": {"restarts": 4, "noise": 0.1}, "craft": {"rule": "knee"}},
        DispatchModel.NEAREST,
        CostChoice.TOKENS,
    )
    again = policy_from_document(policy_document(policy), DeploymentPolicy())
    assert policy_document(again) == policy_document(policy)
    assert again.limits == policy.limits
    assert again.schedule == policy.schedule
    assert again.shadow_policies == ("keel", "gem")
    assert again.policy_options == policy.policy_options
    assert (again.dispatch, again.cost) == (DispatchModel.NEAREST, CostChoice.TOKENS)
    assert change_policy(again, {"dispatch": None}).dispatch is None


def test_a_change_touches_only_what_it_names():
    policy = DeploymentPolicy(thresholds={"min_gain": 0.2})
    changed = change_policy(
        policy, {"mode": "auto", "limits": {"max_bytes": 9}, "thresholds": {"cooldown_s": 4}}
    )
    assert changed.mode is Mode.AUTO
    assert changed.limits == PlanLimits(max_bytes=9)
    assert (changed.thresholds["min_gain"], changed.thresholds["cooldown_s"]) == (0.2, 4.0)
    assert changed.cycle_s == policy.cycle_s


def test_options_change_one_by_one_and_null_removes_them():
    def changed(options):
        return change_policy(policy, {"policy_options": options}).policy_options

    policy = change_policy(
        DeploymentPolicy(),
        {"policy_options": {"gem": {"restarts": 4, "noise": 0.1}, "craft": {"rule": "knee"}}},
    )
    craft = {"craft": {"rule": "knee"}}
    assert changed({"gem": {"restarts": 8}}) == craft | {"gem": {"restarts": 8, "noise": 0.1}}
    assert changed({"gem": {"restarts": None}}) == craft | {"gem": {"noise": 0.1}}
    assert changed({"gem": {"restarts": None, "noise": None}}) == craft
    assert changed({"gem": None}) == craft
    assert changed({}) == policy.policy_options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy_options": 3}, "policy_options is 3, must be an object"),
        ({"policy_options": {"gem": 3}}, "policy_options.gem is 3, must be an object or null"),
        (
            {"policy_options": {"gem": {"restarts": "x"}}},
            "policy_options: gem.restarts is 'x', must be",
        ),
        ({"policy_options": {"gem": {"restart": None}}}, "unknown options of gem: restart; known"),
        ({"policy_options": {"gone": None}}, "policy_options: unknown policy 'gone'; known: craft"),
        ({"policy_options": {"eplb": {"a": 1}}}, "eplb takes no options"),
        (
            {"dispatch": "best"},
            'dispatch is "best", must be one of even, nearest, .*, fewest, null',
        ),
        ({"dispatch": 3}, "dispatch is 3, must be one of even"),
        ({"dispatch": ""}, 'dispatch is "", must be one of even'),
        ({"cost": "seconds"}, 'cost is "seconds", must be one of auto, tokens'),
        ({"cost": None}, "cost is null, must be one of auto, tokens"),
        ({"cost": []}, "cost is \\[\\], must be one of auto, tokens"),
        ({"observe_lock": "maybe"}, 'observe_lock is "maybe", must be true or false'),
        ({"schedule": {"windows": ["sometimes"]}}, "'sometimes' is not a weekly span"),
        ({"schedule": {"windows": "daily 01:00 - 02:00"}}, "must be a list of weekly spans"),
        ({"schedule": {"holidays": []}}, "unknown schedule holidays; known: blackouts, windows"),
        ({"schedule": {"blackouts": ["daily 00:00 - 24:00"]}}, "no minute of the week"),
        ({"modus": "auto"}, r"unknown policy fields modus: do you mean mode\?; known: mode"),
        ({"wholly": 1}, "unknown policy fields wholly; known: mode"),
        (
            {"plan_below": 2},
            r"fields plan_below: do you mean thresholds\.plan_below\?; known: mode",
        ),
        ({"max_move": 2}, r"fields max_move: do you mean limits\.max_moves\?; known: mode"),
        ({"mode": "never"}, 'mode is "never", must be one of observe, propose, auto'),
        ({"mode": 3}, "mode is 3, must be one of observe"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": None}, "policy is null, must be one of craft, eplb"),
        ({"shadow_policies": "keel"}, 'shadow_policies is "keel", must be a list'),
        ({"shadow_policies": ["keel", 3]}, "must be a list of policy names"),
        ({"shadow_policies": ["keel", "keel"]}, "must name at most 8 policies, each once"),
        ({"shadow_policies": ["best"]}, "shadow_policies: unknown policy 'best'; known: craft"),
        (
            {"limits": {"max_move": 1}},
            r"unknown limits max_move: do you mean max_moves\?; known: max_bytes",
        ),
        ({"limits": {"max_moves": -1}}, "limits.max_moves is -1"),
        ({"limits": {"max_moves": True}}, "limits.max_moves is true"),
        ({"limits": 3}, "limits is 3, must be an object"),
        ({"thresholds": {"min_gian": 1}}, r"thresholds min_gian: do you mean min_gain\?; known"),
        ({"thresholds": {"min_gain": "x"}}, 'thresholds.min_gain is "x"'),
        ({"thresholds": {"stop_above": 0.1}}, "does not hold"),
        ({"cycle_s": 0}, "cycle_s is 0"),
        ({"cycle_s": math.nan}, "cycle_s is NaN"),
        ({"proposal_ttl_s": "1"}, 'proposal_ttl_s is "1"'),
    ],
)
def test_changes_that_cannot_be_right_are_refused_in_words(changes, words):
    with pytest.raises(InvalidInput, match=words.replace("(", r"\(")):
        change_policy(DeploymentPolicy(), changes)


def test_a_stored_document_that_cannot_be_used_leaves_the_default():
    default = DeploymentPolicy(cycle_s=3.0)
    assert policy_from_document(None, default) is default
    assert policy_from_document({"mode": "gone"}, default) is default
    assert policy_from_document({"mode": "auto"}, default).cycle_s == 3.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cycle_s": 10**400}, "cycle_s is 1000.*, must be a finite number"),
        ({"cycle_s": -(10**400)}, "must be a finite number"),
        ({"proposal_ttl_s": 10**400}, "must be a finite number"),
        ({"thresholds": {"cooldown_s": 10**400}}, "thresholds.cooldown_s is 1000"),
        ({"cycle_s": float("nan")}, "cycle_s is NaN"),
        ({"cycle_s": True}, "cycle_s is true"),
        ({"cycle_s": "\ud800"}, "must be a finite number"),
        (
            {"limits": {"max_bytes": 2**62 + 1}},
            r"limits.max_bytes is 4611686018427387905, .* from 0 to 2\^62",
        ),
        ({"limits": {"max_moves": 10**400}}, "limits.max_moves is 1000"),
        ({"limits": {"max_layers": True}}, "limits.max_layers is true"),
    ],
)
def test_a_number_that_cannot_be_used_is_refused_with_its_field(changes, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        change_policy(DeploymentPolicy(), changes)
    assert len(str(caught.value)) < 200


def test_the_largest_limit_is_taken():
    assert (
        change_policy(DeploymentPolicy(), {"limits": {"max_bytes": 2**62}}).limits.max_bytes
        == 2**62
    )


def test_refusal_of_many_unknown_fields_is_short():
    for changes in (
        {f"field{number}": 1 for number in range(10_000)},
        {"thresholds": {"x" * 1_000_000: 1}},
    ):
        with pytest.raises(InvalidInput) as caught:
            change_policy(DeploymentPolicy(), changes)
        assert len(str(caught.value)) < 3000


def test_a_value_nested_too_deeply_to_be_shown_is_refused():
    nested: list = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(InvalidInput, match="mode is nested too deeply, must be one of observe"):
        change_policy(DeploymentPolicy(), {"mode": nested})
