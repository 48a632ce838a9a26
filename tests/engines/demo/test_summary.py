"""The results of a run, derived from its lines, and their text."""

from dataclasses import dataclass
from typing import Any

import pytest

from evenkeel_moe.engines.demo.fleet_log import FleetLog
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.summary import decision_lines, summarise, summary_lines
from evenkeel_moe.engines.reference.config import DispatchRule, Fault
from tests.engines.demo.lines import (
    PLANS,
    check_line,
    exit_line,
    good_run,
    plan,
    step_lines,
    swap_line,
)

ANSWERED = "the controller answered the shift by its own decision"


@dataclass(frozen=True)
class Options(DemoOptions):
    """A run far shorter than the demo accepts."""

    ranks: int = 2
    steps: int = 80

    def __post_init__(self):
        pass


def run(lines, plans=PLANS, **options):
    fleet = FleetLog(2)
    fleet.feed(lines)
    return summarise(fleet, plans, Options(**options))


def failed(summary):
    return [check.promise for check in summary.checks if not check.held]


def test_a_good_run_keeps_every_promise():
    summary = run(good_run())
    assert failed(summary) == []
    assert summary.passed
    assert summary.faults_found == ()
    first, second = summary.plans
    assert (first.plan_id, second.plan_id) == ("p1", "p2")
    assert first.before == pytest.approx(8 / 12)
    assert first.after == 1.0
    # The comparison of the second plan starts at the shift, not in the balanced steps before it.
    assert second.before == pytest.approx(8 / 12)
    assert second.reason == "load_changed"
    assert (first.first_step, first.last_step, first.steps_during) == (19, 19, 4)
    assert first.p99_during_s == pytest.approx(0.03, rel=0.05)
    assert first.p99_before_s == pytest.approx(0.01)


def test_the_summary_as_text():
    text = "\n".join(summary_lines(run(good_run())))
    for part in ("because load_changed", "0.667 -> 1.000", "3 experts, 300 kB", "FAIL"):
        assert (part in text) == (part != "FAIL")


def test_another_dispatch_rule_may_absorb_the_shift_but_not_lose_balance():
    lines = [line for line in good_run() if line.get("plan_id") != "p2"]
    lost = run(lines, dispatch=DispatchRule.LPLB)
    assert failed(lost) == ["dispatch absorbed the shift of domain"]
    steps = [
        line | {"rank_load": [5, 5]}
        if line.get("step", 0) >= 20 and line["kind"] == "step"
        else line
        for line in lines
    ]
    held = run(steps, dispatch=DispatchRule.LPLB)
    assert failed(held) == []
    assert "balancedness fell when the domain shifted" in failed(run(steps))
    # Under Libra the recorded load does not show what fetched experts carried.
    assert failed(run(lines, dispatch=DispatchRule.LIBRA)) == []


def test_fewest_active_experts_promises_a_plan_but_no_balance_of_tokens():
    lines = [line for line in good_run() if line.get("plan_id") != "p2"]
    unmoved = [line for line in lines if line.get("plan_id") != "p1"]
    assert failed(run(lines, dispatch=DispatchRule.FEWEST)) == []
    assert failed(run(unmoved, dispatch=DispatchRule.FEWEST)) == ["at least one plan was committed"]


@pytest.mark.parametrize(
    ("loads", "promises"),
    [
        ((102, 98), []),  # 1.000 -> 0.980 would be the least that a plan must save.
        ((103, 97), ["at least two plans were committed", ANSWERED]),
    ],
)
def test_a_placement_that_lost_less_than_a_plan_must_save_may_be_kept(loads, promises):
    lines = [line for line in good_run() if line.get("plan_id") != "p2"]
    shifted = [
        line | {"rank_load": [loads[line["rank"]]]}
        if line["kind"] == "step" and line["step"] >= 40
        else line
        for line in lines
    ]
    assert failed(run(shifted)) == promises


def test_a_plan_without_a_gain_is_reported():
    lines = []
    for step in range(80):
        lines += step_lines(step, (12, 4) if step < 70 else (8, 8))
        lines += [swap_line(0, step, "p1")] if step == 19 else []
        lines += [swap_line(0, step, "p2")] if step == 59 else []
    summary = run(lines)
    assert "balancedness rose with plan 1" in failed(summary)
    assert "balancedness fell when the domain shifted" in failed(summary)


@pytest.mark.parametrize(
    ("last", "promises"), [((8, 8), []), ((10, 6), ["balancedness did not fall with plan 3"])]
)
def test_a_further_plan_may_gain_little_but_not_lose(last, promises):
    lines = []
    for step in range(80):
        for line in good_run():
            if line.get("step") == step:
                late = line["kind"] == "step" and step >= 71
                lines.append(line | {"rank_load": [last[line["rank"]]]} if late else line)
        lines += [swap_line(rank, 70, "p3") for rank in range(2)] if step == 70 else []
    lines += [line for line in good_run() if "step" not in line]
    third = plan("p3", 68.5, "balance_below_threshold")
    assert failed(run(lines, [*PLANS, third])) == promises


def test_a_manual_plan_is_no_reaction_of_the_controller():
    by_hand = [PLANS[1], plan("p2", 55.5, "manual_request", kind="manual")]
    assert failed(run(good_run(), by_hand)) == [ANSWERED]


@pytest.mark.parametrize(
    ("change", "kind", "promise"),
    [
        (
            {
                "wrong_slots": [{"layer": 2, "local_slot": 3, "expert": 7}],
                "ok": False,
                "problems": ["x"],
            },
            "byte: rank 1 layer 2 slot 3 does not hold the weights expert 7",
            "every slot's weights equal the original expert's",
        ),
        (
            {"maps_agree": False},
            "map: the maps of the ranks differ",
            "all ranks agree on map and epoch",
        ),
        ({"epochs_agree": False}, "epoch: the ranks are at", "all ranks agree on map and epoch"),
        (
            {"mismatches": 5},
            "output: rows that differ from the never-migrated model's: 5 on rank 1",
            "every output equals the never-migrated model's",
        ),
        ({"rows_checked": -1000}, None, "every output equals the never-migrated model's"),
        ({"slots_checked": -10}, None, "every slot's weights equal the original expert's"),
        (
            {"ok": False, "problems": ["a leak"]},
            "check: a leak",
            "all ranks agree on map and epoch",
        ),
    ],
)
def test_each_fault_is_named(change, kind, promise):
    lines = [line for line in good_run() if line["kind"] != "check" or line["rank"] == 0]
    summary = run([*lines, check_line(1, **change)])
    assert not summary.passed
    assert promise in failed(summary)
    assert kind is None or any(fault.startswith(kind) for fault in summary.faults_found)


def test_a_run_without_final_checks_fails():
    summary = run([line for line in good_run() if line["kind"] not in ("check", "exit")])
    assert len(failed(summary)) == 3


def test_observe_mode_must_move_nothing():
    assert "observe mode moves nothing" in failed(run(good_run(), mode="observe"))
    still = [line for line in good_run() if line["kind"] != "swap"]
    assert run(still, plans=[], mode="observe").passed


def test_a_run_that_ended_early_is_reported():
    cut = [line for line in good_run() if line["kind"] != "step" or line["step"] < 70]
    assert failed(run(cut)) == ["every step was served"]


def test_a_run_with_a_fault_is_judged_by_what_was_found():
    promises = [check.promise for check in run(good_run(), fault=Fault.BYTE).checks]
    assert "every slot's weights equal the original expert's" in promises
    assert "at least two plans were committed" not in promises


def test_ranks_with_the_same_reason_are_named_together():
    lines = [line for line in good_run() if line["kind"] != "exit"]
    lines += [exit_line(one, 41, "epoch_mismatch", "rank 0 at 2, rank 1 at 1") for one in range(2)]
    summary = run(lines)
    assert failed(summary) == ["no rank was lost"]
    assert summary.faults_found == (
        "epoch: left because of epoch_mismatch: rank 0, 1; rank 0 at 2, rank 1 at 1",
    )


def test_decisions_are_counted_and_the_last_judged_plan_is_reported():
    numbers = {"gain": 0.192, "gain_lower": 0.187, "held_out_steps": 42.0, "copies": 1.0}
    rows: list[dict[str, Any]] = [
        {"reason": "no_change", "numbers": {}},
        {"reason": "observe_mode", "numbers": numbers},
        {"reason": "no_change", "numbers": None},
        {"reason": "observe_mode", "numbers": {**numbers, "gain": 0.5}},
        {"reason": "no_change", "numbers": {}},
    ]
    judged = (
        "Last plan judged (observe_mode): predicted to save 19.2% of MoE time, at least 18.7%,"
        " on 42 steps it was not planned on, for 1 copy"
    )
    assert decision_lines(rows) == [
        "Decisions: 5 cycles: no_change 3, observe_mode 2",
        judged,
    ]
    assert decision_lines([]) == ["Decisions: none was recorded"]
