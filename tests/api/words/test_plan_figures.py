"""The figures of a plan in words."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.api.convert import plan_out
from evenkeel_moe.api.words.plan_figures import Figure, details, figures
from evenkeel_moe.cli.plan_words import start_question
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.planning.decision.calibration import Calibration
from evenkeel_moe.planning.decision.cycle import run_cycle
from tests.api.fakes import NOW, SHAPE, make_plan, make_status
from tests.planning.decision.test_cycle import inputs, skewed


def shown(numbers, kind=PlanKind.MANUAL, status=None):
    record = make_plan()
    record = replace(record, plan=replace(record.plan, kind=kind, numbers=dict(numbers)))
    return {figure.name: figure for figure in figures(record, status or make_status())}


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
    first |= {"gain_modelled", "calibration", "copy_cost_share", "payback_steps"}
    first |= {"held_out_steps"}
    first |= {*("balancedness_mean", "balancedness_expected"), "copies", "bytes", "layers", "waves"}
    assert first < numbers.keys()
    assert "change_strength" in numbers and "calibration" in numbers
    rows = details(numbers)
    assert len(rows) == len(numbers) - len(first)
    assert not {name.replace("_", " ") for name in numbers} & {row.name for row in rows}
    told = shown(numbers)
    pays = "Pays for itself after (by tokens)"
    assert {"Balancedness", "Scored on", "Price of the copies", pays} <= told.keys()
    note = told["Predicted saving of MoE time (by tokens)"].note
    assert note.endswith(", times 0.5 as earlier plans delivered")


def test_copies_of_unknown_size_have_an_unknown_number_of_bytes():
    record = make_plan(story=({"at": NOW, "event": "wave_started", "waves_committed": 0},))
    (wave,) = record.plan.waves
    sizeless = replace(wave, batches=((replace(wave.transfers[0], nbytes=0),),))
    both = (wave, replace(sizeless, index=1))
    shown = plan_out(replace(record, plan=replace(record.plan, waves=both)), make_status())
    assert shown.model_dump().items() >= {"moves": 2, "nbytes": None}.items()
    assert [wave.nbytes for wave in shown.wave_list] == [1000, None]
    assert Figure("Copies between ranks", "2", "of unknown size") in shown.figures
    none = plan_out(replace(record, plan=replace(record.plan, waves=(sizeless,))), make_status())
    assert none.story[0]["text"] == "Wave 1 of 1 began: 1 copy of unknown size"
    asked = start_question(none.model_dump())
    assert asked.startswith("Ranks of demo copy 1 expert of unknown size, in 1 wave.")


def test_a_layer_that_several_waves_change_is_counted_once():
    record = make_plan()
    (wave,) = record.plan.waves
    twice = replace(record.plan, waves=(wave, replace(wave, index=1)))
    told = {figure.name: figure for figure in figures(replace(record, plan=twice), make_status())}
    assert told["Waves"].note == "1 layer changes" and " of 2 " in told["Waves"].value


@pytest.mark.parametrize(
    ("source", "balance", "by_tokens"),
    [
        (CostSource.TOKENS, {"time_balance": 0.9}, True),
        (CostSource.PROFILED, {}, False),
        (None, {}, True),
        (None, {"time_balance": 0.9}, False),
    ],
)
def test_a_gain_by_tokens_does_not_claim_time(source, balance, by_tokens):
    record = make_plan()
    record = replace(record, plan=replace(record.plan, cost_source=source))
    record.plan.numbers.update(balance, gain=0.081)
    shown = plan_out(record, None)
    assert shown.gain_by_tokens is by_tokens
    name = f"Predicted saving of MoE time{' (by tokens)' if by_tokens else ''}"
    assert name in [figure.name for figure in shown.figures]


def test_plans_that_calibrated_a_promise_are_counted():
    assert details({"calibrated_on_plans": 1.0}) == [Figure("calibrated on", "1 plan")]
    assert details({"calibrated_on_plans": 3.0}) == [Figure("calibrated on", "3 plans")]


def test_a_figure_of_a_later_controller_is_shown_all_the_same():
    assert details({"new_figure_s": 3.0, "unknown": None}) == [Figure("new figure", "3 s")]


def test_nothing_is_predicted_for_a_rollback_or_an_evacuation():
    told = shown({"to_epoch": 8.0, "gain": 0.3}, kind=PlanKind.ROLLBACK)
    assert told["Returns to"].value == "epoch 8"
    assert not {"Predicted saving of MoE time", "Expected stall"} & set(told)
    stall = shown({"to_epoch": 8.0, "expected_stall_s": 0.004}, kind=PlanKind.ROLLBACK)
    assert stall["Expected stall"].value == "4 ms"
    evacuation = shown({}, kind=PlanKind.EVACUATION)
    assert not {"Predicted saving of MoE time", "Returns to"} & set(evacuation)


def test_pooled_slots_leave_the_kv_cache_unknown():
    assert shown({})["KV cache"].value == "unchanged"
    pooled = make_status(shape=replace(SHAPE, pool_slots_per_rank=9))
    assert shown({}, status=pooled)["KV cache"].value == "unknown"
    assert shown({})["Expected stall"].value == "unknown"


def test_what_a_plan_loses_with_one_failure_is_told_with_its_price():
    numbers = {"survive_lost": 0.0, "survive_experts": 256.0, "survive_price": 0.012}
    assert shown(numbers)["Lost with one failure"] == Figure(
        "Lost with one failure", "0 of 256 experts", "costs 1.2% of MoE time"
    )
    some = shown(numbers | {"survive_lost": 28.0})["Lost with one failure"]
    assert some.value == "at most 28 of 256 experts"
    assert "Lost with one failure" not in shown({"gain": 0.1})
    assert details(numbers) == []
