"""The gates of the newest cycle as a checklist."""

import re

import pytest

from evenkeel_moe.api.words.gates import gates_of
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.model.finding import Finding, FindingCode, Severity
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.schedule import Schedule
from tests.api.fakes import NOW, make_rank, make_status

BALANCE = {"balancedness_mean": 0.95}
PLAIN = {"time_balance": None, "balancedness_mean": 0.95}


def gates(reason, numbers=None, /, **changes):
    decision = None if reason is None else {"at": NOW, "reason": reason, "numbers": numbers or {}}
    return gates_of(make_status(**{**PLAIN, "last_decision": decision, **changes}))


def closed(reason, numbers=None, /, **changes):
    (found,) = [gate for gate in gates(reason, numbers, **changes) if gate.state == "closed"]
    return found


def test_gates_before_the_closed_one_are_open_and_those_after_it_were_not_reached():
    found = gates("balance_above_threshold", BALANCE)
    index = [gate.state for gate in found].index("closed")
    assert found[index].title == "Balance is low, or the traffic changed"
    assert found[index].detail == "Balancedness 0.950; planning starts below 0.90."
    assert all((gate.state, gate.remedy) == ("open", None) for gate in found[:index])
    assert all((gate.state, gate.remedy) == ("later", None) for gate in found[index + 1 :])
    assert found[index].remedy


@pytest.mark.parametrize(
    ("reason", "state"), [("plan_started", "open"), (None, "unknown"), ("brand_new", "unknown")]
)
def test_every_gate_is_open_when_a_plan_was_started_and_unknown_without_a_decision(reason, state):
    assert {gate.state for gate in gates(reason)} == {state}


def test_counts_that_contradict_each_other_close_a_gate_of_their_own():
    doubt = Finding(FindingCode.IDLE_EXPERTS, Severity.DOUBT, "no expert counts", "rank 1")
    gate = closed("implausible_counts", findings=(doubt,))
    assert (gate.title, gate.detail) == ("The counts agree with each other", doubt.words)
    assert "max_layer_deviation or max_idle_experts" in str(gate.remedy)
    (open_gate,) = [each for each in gates("no_change") if each.title == gate.title]
    assert open_gate.detail == "Layers of a step may differ by 0.5%."


@pytest.mark.parametrize(
    ("reason", "mode", "words"),
    [
        ("held_after_rollback", Mode.AUTO, "In mode auto no plan is made"),
        ("plan_proposed", Mode.PROPOSE, "proposals are still made, and each waits for approval"),
        ("observe_mode", Mode.OBSERVE, "the controller starts nothing"),
    ],
)
def test_the_gate_of_the_hold_says_what_the_hold_stops_in_each_mode(reason, mode, words):
    found = gates(reason, held=True, held_because="held_after_rollback", mode=mode)
    (gate,) = [gate for gate in found if "hold" in gate.title]
    assert words in gate.detail
    (free,) = [gate for gate in gates(reason) if "hold" in gate.title]
    assert free.detail == "Automatic plans are not held."


def test_one_gate_alone_names_the_mode_and_no_title_is_a_negation():
    titles = [gate.title for gate in gates("no_change")]
    assert [title for title in titles if re.search(r"\bmode\b", title)] == [
        "The mode lets plans start"
    ]
    assert not any(re.search(r"\b(no|not|none|never)\b", title, re.I) for title in titles)


def test_too_few_later_steps_close_the_gate_of_the_gain_not_the_one_of_the_window():
    late = closed("insufficient_data", {"held_out_steps": 3.0})
    assert late.title == "The gain is large enough and certain"
    assert closed("insufficient_data").title == "There are enough complete steps"


@pytest.mark.parametrize(
    ("reason", "numbers", "detail"),
    [
        ("plan_proposed", {"expires_in_s": 600.0}, "The proposal expires in 10 min."),
        (
            "limit_exceeded",
            {"copies": 12.0},
            "copies: 12, at most 10; bytes: no limit; layers: no limit.",
        ),
        (
            "gain_too_small",
            {"gain": 0.001, "gain_lower": -0.1},
            (
                "Predicted 0.1%, at least -10.0%; "
                "needs 0.2%, and a lower bound above 1.5 times the price of the copies."
            ),
        ),
        ("frozen", {"frozen_s": 600.0}, "Paused for another 10 min."),
        ("frozen", {}, "Paused for another 5 min."),
        ("ranks_missing", {"ranks_fresh": 1.0}, "1 of 2 ranks."),
        ("cooldown", {"since_plan_s": 3.0, "cooldown_s": 8.0}, "3 s since the plan, needs 8 s."),
        ("insufficient_data", {"window_steps": 3.0}, "3 steps, needs 64."),
        ("stale_data", {"newest_step_age_s": 60.0}, "60 s old, at most 15 s."),
        (
            "balance_above_threshold",
            {"time_balance": 0.9, "balancedness_mean": 0.95, "starts_below": 0.93},
            "Time balance 0.900 (balancedness 0.950); planning starts below 0.93.",
        ),
        ("waiting_consecutive_windows", {"windows_below": 1.0}, "1 of 2 cycles in a row."),
        ("no_change", {"copies": 1.0}, "1 copy of experts."),
        (
            "payback_too_long",
            {"payback_steps": 30_000.0},
            "After 30,000 steps, at most 20,000 steps.",
        ),
        ("observe_mode", {}, "Mode auto."),
        ("not_leader", {}, "State ready."),
    ],
)
def test_a_closed_gate_tells_what_it_compares(reason, numbers, detail):
    rules = DeploymentPolicy(limits=PlanLimits(max_moves=10))
    gate = closed(reason, numbers, rules=rules, frozen_until_unix=NOW + 300)
    assert gate.detail == detail


@pytest.mark.fault(
    "ranks that only observe, under auto", "no gate was closed, and none had a remedy"
)
@pytest.mark.parametrize(
    "reason", ["observe_only", "weights_version_changed", "gate_layout_disagrees"]
)
def test_ranks_that_cannot_carry_plans_out_close_a_gate_of_their_own(reason):
    gate = closed(reason, reason=reason)
    assert gate.title == "All ranks can carry plans out, with the same weights"
    assert gate.detail == sentence(reason) and "EVENKEEL_RANK__MODE=place" in str(gate.remedy)
    faulty = closed(reason, ranks=(make_rank(0), make_rank(1, trouble="its worker ended")))
    assert faulty.detail == "Ranks with a fault: 1."
    (free,) = [each for each in gates("no_change") if each.title == gate.title]
    assert (free.state, free.detail) == ("open", "No rank reports a fault.")


@pytest.mark.parametrize(
    "reason",
    [
        *("planner_failed", "unknown_policy", "wrong_shape", "expert_without_replica"),
        *("duplicate_on_rank", "empty_slots", "no_change", "stale_base"),
    ],
)
def test_a_cycle_that_found_no_placement_closes_the_gate_of_the_planner(reason):
    assert closed(reason).title == "The planner found a better placement"


def test_what_lets_no_plan_begin_is_told_alone():
    rules = DeploymentPolicy(schedule=Schedule(blackouts=("sun 00:00 - sat 00:00",)))
    assert closed("outside_schedule", rules=rules).detail.startswith("The schedule opens in ")
    (free,) = [each for each in gates("no_change") if "Pause" in each.title]
    assert free.detail == "Not paused; no schedule."


async def test_the_gates_have_a_route(client):
    answer = await client.get("/v1/deployments/demo/gates")
    states = [gate["state"] for gate in answer.json()["items"]]
    assert states.count("closed") == 1 and states[0] == "open"
