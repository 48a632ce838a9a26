"""What `evenkeel plan show` says of a plan."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.cli.plan_figures import details, predicted
from evenkeel_moe.cli.reasons import with_reason
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostBasis, CostSource
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.planning.decision.calibration import Calibration
from evenkeel_moe.planning.decision.cycle import run_cycle
from tests.api.fakes import NOW, FakeView, make_plan, make_status
from tests.planning.decision.test_cycle import inputs, skewed

FIGURES = {
    "balancedness_mean": 0.647,
    "balancedness_expected": 0.962,
    "gain": 0.339,
    "gain_lower": 0.335,
    "gain_upper": 0.342,
    "payback_steps": 0.017,
    "payback_s": 0.077,
    "layers": 4.0,
    "expected_stall_s": 2.94e-4,
}


@pytest.fixture
def shown(run, operations):
    """Return a function that stores a plan and returns the lines of `plan show`."""

    def call(status=None, kind=PlanKind.MANUAL, numbers=FIGURES, **changes):
        if status is not None:
            operations.views["demo"] = FakeView(status, {}, None)
        record = make_plan("mine", **changes)
        record = replace(record, plan=replace(record.plan, kind=kind, numbers=dict(numbers)))
        operations.records["demo"] = [record]
        code, out, err = run("plan", "show", "mine", "-d", "demo")
        assert (code, err) == (0, "")
        return out.splitlines()

    return call


def cells(line):
    return re.split(" {2,}", line)


def test_a_plan_begins_with_what_it_gains_and_then_tells_what_it_moves(shown):
    lines = shown()
    assert [cells(line)[0] for line in lines[:10]] == [
        *("plan", "phase", "balancedness", "promised gain", "copies", "waves", "ranks"),
        *("expected stall", "made because", "created"),
    ]
    assert [cells(line)[1] for line in lines[1:8]] == [
        "proposed",
        "0.647 -> 0.962 promised, mean of layers",
        "33.9% of MoE time, 94 % interval 33.5% to 34.2%",
        "1 expert between ranks, 1 kB",
        "0 of 1 committed; 4 layers change",
        "2",
        "294 µs of one step for each wave",
    ]
    assert "paid back after  less than 1 step, 77 ms" in lines


def test_a_gain_by_tokens_does_not_claim_time(shown):
    tokens = make_status(cost_model=CostBasis(CostSource.TOKENS))
    line = next(line for line in shown(tokens) if line.startswith("promised gain"))
    assert "33.9% of MoE time (by tokens), 94 %" in line
    line = next(line for line in shown(make_status()) if line.startswith("cost model now"))
    assert cells(line)[1] == "measured while the ranks served (1200 steps, mean error 3.4%)"


def test_a_plan_is_shown_where_the_deployment_cannot_be_read(shown):
    lines = shown(Unavailable("no leader", Reason.NOT_LEADER))
    assert "promised gain" in "".join(lines) and "cost model" not in "".join(lines)


def test_a_plan_that_ended_tells_what_it_delivered_and_how_long_it_took(shown):
    begun = {"at": NOW, "event": "wave_started"}
    story = (begun, {"at": NOW + 21.1, "event": "wave_committed"}, {"at": NOW + 90, "event": "x"})
    ended = {"phase": PlanPhase.COMMITTED, "reason": Reason.COMMITTED, "waves_committed": 1}
    ended["story"] = story
    gained = DeliveredGain(1.0, 0.331, 0.01, 0.32, 0.34, None, 64)
    lines = [cells(line) for line in shown(delivered=gained, **ended)]
    words = "33.1% of MoE time saved, 95 % interval 32.0% to 34.0%, on 64 steps; promised 33.9%"
    assert ["delivered gain", words] in lines
    assert ["duration", "21.1 s for 1 wave"] in lines
    waits = ["delivered gain", "not measured yet: enough steps must run on the new placement"]
    assert waits in [cells(line) for line in shown(**ended)]
    running = shown(phase=PlanPhase.MIGRATING, reason=Reason.PLAN_STARTED, story=(begun,))
    assert re.search(r"duration +\S+ \w+ so far", "\n".join(running))
    lost = {"phase": PlanPhase.ABORTED, "reason": Reason.RANK_LOST}
    stopped = shown(story=(begun, {"at": NOW + 9, "event": "ended"}), **lost)
    assert ["duration", "9 s until it ended"] in [cells(line) for line in stopped]
    assert "duration" not in "\n".join(shown())


def test_a_rollback_names_the_epoch_to_which_it_returns(shown):
    lines = [cells(line) for line in shown(kind=PlanKind.ROLLBACK, numbers={"to_epoch": 8.0})]
    assert ["returns to", "epoch 8"] in lines
    assert ["Figures behind it"] not in lines


def test_no_figure_of_a_cycle_is_shown_under_a_field_name():
    """Each figure that a plan can hold has words of its own, in the first lines or below."""
    settled = run_cycle(inputs(skewed(64, (0, 1)))).target
    changed = np.concatenate([skewed(40, (0, 1)), skewed(40, (6, 7), seed=1)])
    results = (
        run_cycle(inputs(skewed(60), calibration=Calibration(0.5, 4), step_s=0.02)),
        run_cycle(inputs(changed, current=settled)),
    )
    assert {result.passed for result in results} == {True}
    numbers = dict(results[0].numbers | results[1].numbers)
    first = {*(f"gain{end}" for end in ("", "_lower", "_upper")), "payback_s"}
    first |= {"gain_modelled", "calibration"}
    first |= {*("balancedness_mean", "balancedness_expected"), "copies", "bytes", "layers", "waves"}
    assert first < numbers.keys()
    assert "change_strength" in numbers and "calibration" in numbers
    rows = details(numbers)
    assert len(rows) == len(numbers) - len(first)
    assert not {name.replace("_", " ") for name in numbers} & {words for words, _ in rows}
    shown = dict(predicted({"numbers": numbers, "kind": "manual"}, None))
    assert list(shown) == ["balancedness", "promised gain", "by the cost model"]
    assert shown["by the cost model"].endswith(", times 0.5 as earlier plans delivered")


def test_plans_that_calibrated_a_promise_are_counted():
    assert details({"calibrated_on_plans": 1.0}) == [("calibrated on", "1 plan")]
    assert details({"calibrated_on_plans": 3.0}) == [("calibrated on", "3 plans")]


def test_a_figure_of_a_later_controller_is_shown_all_the_same():
    assert details({"new_figure_s": 3.0, "unknown": None}) == [("new figure", "3 s")]


@pytest.mark.parametrize(
    ("phase", "reason", "words"),
    [
        ("cancelled", "cancelled", "cancelled"),
        ("committed", "committed", "committed"),
        ("proposed", "plan_proposed", "proposed"),
        ("recovering", "recovering", "recovering"),
        ("stalled", "ranks_missing", "stalled (ranks_missing)"),
    ],
)
def test_a_phase_and_its_reason_never_say_the_same(phase, reason, words):
    assert with_reason(phase, reason) == words


def test_a_cancelled_plan_says_so_once(shown, run):
    ended = {"phase": PlanPhase.CANCELLED, "reason": Reason.CANCELLED, "error": "cancelled"}
    lines = shown(**ended)
    assert sum("cancelled" in line.split(":")[0] for line in lines) == 2  # phase, and the legend
    assert cells(lines[1]) == ["phase", "cancelled"]
    record = json.loads(run("plan", "show", "mine", "-d", "demo", "--json")[1])
    assert (record["phase"], record["reason"], record["error"]) == ("cancelled",) * 3
