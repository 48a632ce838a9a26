"""Policies as documents, and changes that are refused."""

import math

import pytest

from evenkeel_moe.controller.policy_document import (
    change_policy,
    policy_document,
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
    again = change_policy(DeploymentPolicy(), policy_document(policy))
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
    assert changed(None) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy_options": 3}, "policy_options: .* valid dictionary"),
        ({"policy_options": {"gem": 3}}, r"policy_options\.gem: .* valid dictionary"),
        ({"policy_options": {"gem": {"restarts": "x"}}}, r"gem\.restarts is 'x', must be"),
        ({"policy_options": {"gem": {"restarts": True}}}, r"policy_options\.gem\.restarts"),
        ({"policy_options": {"gem": {"restart": None}}}, "unknown options of gem: restart; known"),
        ({"policy_options": {"gone": None}}, "unknown policy 'gone'; known: craft"),
        ({"policy_options": {"eplb": {"a": 1}}}, "unknown options of eplb"),
        ({"dispatch": "best"}, "dispatch: .* 'even', 'nearest', .* or 'fewest'"),
        ({"dispatch": 3}, "dispatch: "),
        ({"dispatch": ""}, "dispatch: "),
        ({"cost": "seconds"}, "cost: .* 'auto' or 'tokens'"),
        ({"cost": []}, "cost: .* text"),
        ({"observe_lock": "maybe"}, "observe_lock: .* valid boolean"),
        ({"observe_lock": 1}, "observe_lock: .* valid boolean"),
        ({"schedule": {"windows": ["sometimes"]}}, "'sometimes' is not a weekly span"),
        ({"schedule": {"windows": "daily 01:00 - 02:00"}}, r"schedule\.windows: .* valid list"),
        ({"schedule": {"holidays": []}}, r"schedule\.holidays: "),
        ({"schedule": {"blackouts": ["daily 00:00 - 24:00"]}}, "no minute of the week"),
        ({"modus": "auto"}, "^modus: "),
        ({"plan_below": 2}, "^plan_below: "),
        ({"mode": "never"}, "mode: .* 'observe', 'propose' or 'auto'"),
        ({"mode": 3}, "mode: .* text"),
        ({"policy": "best"}, "unknown policy 'best'; known: craft"),
        ({"policy": 3}, "policy: .* valid string"),
        ({"shadow_policies": "keel"}, "shadow_policies: .* valid list"),
        ({"shadow_policies": ["keel", 3]}, r"shadow_policies\.1: .* valid string"),
        ({"shadow_policies": ["keel", "keel"]}, "shadow_policies must name each policy once"),
        ({"shadow_policies": ["keel"] * 9}, "shadow_policies: .* at most 8 items"),
        ({"shadow_policies": ["best"]}, "unknown policy 'best'; known: craft"),
        ({"limits": {"max_move": 1}}, r"limits\.max_move: "),
        ({"limits": {"max_moves": -1}}, r"limits\.max_moves: .* greater than or equal to 0"),
        ({"limits": {"max_moves": True}}, r"limits\.max_moves: .* valid integer"),
        ({"limits": {"max_bytes": 2**62 + 1}}, r"limits\.max_bytes: .* 4611686018427387904"),
        ({"limits": {"max_moves": 10**400}}, r"limits\.max_moves: "),
        ({"limits": 3}, "limits: "),
        ({"thresholds": {"min_gian": 1}}, "unknown gate settings min_gian; known: "),
        ({"thresholds": {"min_gain": "x"}}, r"thresholds\.min_gain: .* valid number"),
        ({"thresholds": {"min_gain": -1}}, "min_gain is -1.0, must be finite and not negative"),
        ({"thresholds": {"cooldown_s": 10**400}}, r"thresholds\.cooldown_s: "),
        ({"thresholds": {"stop_above": 0.1}}, "does not hold"),
        ({"cycle_s": 0}, "cycle_s: .* greater than 0"),
        ({"cycle_s": math.nan}, "cycle_s: .* finite number"),
        ({"cycle_s": math.inf}, "cycle_s: .* finite number"),
        ({"cycle_s": 10**400}, "cycle_s: .* valid number"),
        ({"cycle_s": -(10**400)}, "cycle_s: .* valid number"),
        ({"cycle_s": True}, "cycle_s: .* valid number"),
        ({"cycle_s": "\ud800"}, "cycle_s: .* valid number"),
        ({"proposal_ttl_s": "1"}, "proposal_ttl_s: .* valid number"),
    ],
)
def test_changes_that_cannot_be_right_are_refused_in_words(changes, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        change_policy(DeploymentPolicy(), changes)
    assert len(str(caught.value)) < 400


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


def test_a_deeply_nested_value_is_refused():
    nested: list = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(InvalidInput, match="^mode: "):
        change_policy(DeploymentPolicy(), {"mode": nested})
