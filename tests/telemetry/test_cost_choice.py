"""The best known cost model is used, and what is bad or missing is named, never guessed."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.policy import CostChoice
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.derived_cost import derived_cost
from evenkeel_moe.planning.problem.moe_time import rank_times, replica_work
from evenkeel_moe.telemetry.cost_choice import KnownCosts, RankNumbers, choose_cost, clock_factors
from evenkeel_moe.telemetry.time_fit import NoFit, TimeFit
from evenkeel_moe.wire.link import CostCurve, DeviceClock, ReplicaCost

SHAPE = ModelShape(2, 8, 4, 3, 2, 3 * 7168 * 2048, shared_experts=1.0)
H100 = RankNumbers("NVIDIA H100 80GB HBM3", "fp8")
NOW = 1_800_000_000.0
PROFILE = ReplicaCost(2e-5, 6e-8, 1e-6, 1.2e-5, 0.03, NOW - 7200)
CURVE = CostCurve(64, (1e-3, 2e-3), 1e-5)
FIT = TimeFit(
    fixed_s=1e-5,
    s_per_token=5e-8,
    s_per_replica=1e-5,
    factors=np.array([1.0, 1.0, 1.12, 1.0]),
    error=0.02,
    explained=0.97,
    steps=256,
)
NONE = NoFit("no rank reports seconds")


def known(ranks=(H100,) * 4, fit=NONE) -> KnownCosts:
    return KnownCosts(SHAPE, ranks, fit, 100.0, 2.0, NOW)


def chosen(*args, **kwargs):
    return choose_cost(known(*args, **kwargs)).model


def seconds(model, tokens):
    """Return the time of each rank with one replica of so many tokens."""
    return rank_times(replica_work(np.full(4, float(tokens)), model.replica), model)


def test_a_sound_fit_comes_before_a_profile_before_the_data_sheet():
    profiled = [replace(H100, replica_cost=PROFILE)] * 4
    assert chosen().source is CostSource.DERIVED
    assert chosen(profiled).source is CostSource.PROFILED
    choice = choose_cost(known(profiled, FIT))
    assert choice.model.source is CostSource.MEASURED
    assert list(choice.ratios) == [CostSource.PROFILED, CostSource.DERIVED]
    assert None not in choice.ratios.values()
    assert choice.model.shared_tokens == 0.5
    assert choice.model.fit_error == 0.02


def test_the_models_are_those_of_their_numbers():
    found = seconds(chosen(fit=FIT), 100)
    assert found == pytest.approx(FIT.factors * (1e-5 + 1e-5 + 100 * 5e-8))
    slow = replace(PROFILE, s_per_token=9e-8, s_per_replica=1.5e-6, read_s=1.8e-5)
    ranks = [replace(H100, replica_cost=one) for one in (PROFILE, PROFILE, slow, PROFILE)]
    model = chosen(ranks)
    assert seconds(model, 10) == pytest.approx([3.3e-5, 3.3e-5, 2e-5 + 1.95e-5, 3.3e-5])
    assert seconds(model, 1000)[0] == pytest.approx(2e-5 + 1e-6 + 6e-5)
    assert "profiles of 4 ranks, the oldest of 2 h ago" in model.detail
    assert seconds(chosen([replace(H100, curve=CURVE)] * 4), 65) == pytest.approx([2e-3] * 4)


def test_no_numbers_mean_tokens_with_every_reason():
    model = chosen([RankNumbers()] * 4)
    assert model.by_tokens
    assert model.source is CostSource.TOKENS
    assert "not measured: no rank reports seconds" in model.detail
    assert "not profiled: no rank sent a profile" in model.detail
    assert "not derived" in model.detail


def test_the_operator_can_ask_for_tokens():
    choice = choose_cost(known(fit=FIT), CostChoice.TOKENS)
    assert choice.model.by_tokens
    assert "policy asks for tokens" in choice.model.detail
    assert CostSource.MEASURED in choice.ratios, "the others are still shown"


@pytest.mark.parametrize("asked", list(CostChoice))
def test_under_waterfill_tokens_include_the_shared_experts_that_are_poured(asked):
    unknown = known([RankNumbers()] * 4)
    poured = replace(unknown, dispatch=DispatchModel.WATERFILL)
    model = choose_cost(poured, asked).model
    assert (model.shared_tokens, model.source) == (0.5, CostSource.TOKENS)
    assert model.curves is None and model.unit == "tokens"
    assert "shared experts" not in model.detail
    assert choose_cost(unknown, asked).model.by_tokens


@pytest.mark.parametrize("fit", [NONE, FIT])
def test_shared_experts_that_waterfill_cannot_pour_are_named(fit):
    poured = replace(known([RankNumbers()] * 4, fit), dispatch=DispatchModel.WATERFILL)
    words = "the work of shared experts is not known, so waterfill counts as an even split"
    for shared, named in ((None, True), (0.0, False), (2.0, False)):
        found = replace(poured, shape=replace(SHAPE, shared_experts=shared))
        assert (words in choose_cost(found).model.detail) is named
    nothing_known = replace(poured, shape=replace(SHAPE, shared_experts=None))
    assert words in choose_cost(nothing_known, CostChoice.TOKENS).model.detail
    even = replace(nothing_known, dispatch=DispatchModel.EVEN)
    assert words not in choose_cost(even).model.detail


def reason_of(source, *args, **kwargs):
    return choose_cost(known(*args, **kwargs)).reasons[source]


def test_a_fit_with_a_large_error_is_not_used():
    bad = replace(FIT, error=0.3)
    assert chosen(fit=bad).source is CostSource.DERIVED
    assert "mean error of the fit is 30%" in reason_of(CostSource.MEASURED, fit=bad)


def test_ranks_that_disagree_on_the_device_are_not_derived():
    mixed = [H100, H100, H100, replace(H100, device="NVIDIA H200")]
    reason = reason_of(CostSource.DERIVED, mixed)
    assert "different devices" in reason and "H100" in reason and "H200" in reason
    formats = [H100, H100, H100, replace(H100, weight_format="bf16")]
    assert "different devices" in reason_of(CostSource.DERIVED, formats)
    assert chosen(mixed).by_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({2: {}}, "not every rank (missing: 2) sent a profile"),
        ({1: {"curve": CostCurve(32, (1e-3,), 0.0)}}, "tiles of [32, 64] tokens"),
        ({3: {"curve": CostCurve(64, (0.0,), 0.0)}}, "rank 3 is 0 seconds"),
    ],
)
def test_curves_that_do_not_fit_together_are_not_used(changes, words):
    ranks = [replace(H100, **changes.get(rank, {"curve": CURVE})) for rank in range(4)]
    assert words in reason_of(CostSource.PROFILED, ranks)
    assert chosen(ranks).source is CostSource.DERIVED


def test_a_shorter_curve_goes_on_by_its_slope():
    short = CostCurve(64, (2e-3,), 5e-5)
    model = chosen([replace(H100, curve=short if rank else CURVE) for rank in range(4)])
    assert seconds(model, 64) == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3])
    assert seconds(model, 192) == pytest.approx([2e-3 + 64e-5, *3 * [2e-3 + 128 * 5e-5]])


def test_a_profile_with_a_large_error_yields_to_curves_or_is_named():
    bad = replace(PROFILE, fit_error=0.4)
    both = [replace(H100, curve=CURVE, replica_cost=bad)] * 4
    assert "curves of 4 ranks" in chosen(both).detail
    ranks = [replace(H100, replica_cost=bad if rank == 1 else PROFILE) for rank in range(4)]
    assert "rank 1 has a mean error of 40%" in reason_of(CostSource.PROFILED, ranks)


def test_a_curve_that_explains_the_profile_better_than_the_line_is_used():
    better, worse = replace(CURVE, fit_error=0.01, line_error=0.06), replace(CURVE, fit_error=0.06)
    model = chosen([replace(H100, curve=better, replica_cost=PROFILE)] * 4)
    assert seconds(model, 64) == pytest.approx([1e-3] * 4)
    assert seconds(model, 65) == pytest.approx([2e-3] * 4)
    assert "curves of 4 ranks" in model.detail and model.fit_error == 0.01
    line = chosen([replace(H100, replica_cost=PROFILE)] * 4)
    # The line explains it better, or it is not known which does.
    for curve in (replace(worse, line_error=0.02), CURVE):
        both = chosen([replace(H100, curve=curve, replica_cost=PROFILE)] * 4)
        assert seconds(both, 65) == pytest.approx(seconds(line, 65))
    # One rank's curve cannot be compared with the others' lines.
    mixed = [replace(H100, curve=better if r else None, replica_cost=PROFILE) for r in range(4)]
    assert seconds(chosen(mixed), 65) == pytest.approx(seconds(line, 65))


def test_gem_plans_on_the_curves_whatever_else_is_known():
    ranks = [replace(H100, curve=CURVE, replica_cost=PROFILE)] * 4
    profiled = choose_cost(known(ranks), curves=True).model
    assert seconds(profiled, 65) == pytest.approx([2e-3] * 4)
    # Seconds of serving ranks give the speeds, not the stairs.
    measured = choose_cost(known(ranks, FIT), curves=True).model
    assert measured.source is CostSource.PROFILED
    assert seconds(measured, 65) == pytest.approx(2e-3 * FIT.factors)
    # Without curves of all ranks it is the model of the other policies.
    without = [replace(H100, replica_cost=PROFILE)] * 4
    assert choose_cost(known(without, FIT), curves=True).model.source is CostSource.MEASURED
    assert choose_cost(known(ranks), CostChoice.TOKENS, curves=True).model.by_tokens


def test_a_rank_without_a_profile_by_replicas_is_named():
    ranks = [replace(H100, replica_cost=PROFILE if rank else None) for rank in range(4)]
    assert "missing: 0" in reason_of(CostSource.PROFILED, ranks)


def test_speeds_are_measured_where_slopes_are_not():
    speeds_only = replace(FIT, s_per_replica=0.0, told_apart=2)
    model = chosen(fit=speeds_only)
    derived = derived_cost(SHAPE, H100.device, H100.weight_format)
    assert model.source is CostSource.DERIVED
    assert seconds(model, 100) == pytest.approx(FIT.factors * seconds(derived, 100))
    assert "speeds of the ranks are measured" in model.detail
    alone = chosen([RankNumbers()] * 4, speeds_only)
    assert alone.source is CostSource.MEASURED
    assert "rise together" in alone.detail


def test_ranks_that_take_longer_than_the_median_rank_are_named_with_their_factor():
    uneven = replace(FIT, factors=np.array([1.0, 1.12, 1.0, 1.01]))
    assert "rank 1 takes 1.12 times as long" in chosen(fit=uneven).detail
    assert "rank 3 takes" not in chosen(fit=uneven).detail, "a small difference is noise"
    slow = replace(PROFILE, s_per_token=1.12 * PROFILE.s_per_token)
    told = [replace(H100, replica_cost=slow if rank == 2 else PROFILE) for rank in range(4)]
    assert "rank 2 takes 1.12 times as long" in chosen(told).detail


def test_models_that_disagree_are_named_with_their_ratio():
    slower = replace(PROFILE, fixed_s=1e-3)
    choice = choose_cost(known([replace(H100, replica_cost=slower)] * 4, FIT))
    ratio = choice.ratios[CostSource.PROFILED]
    assert ratio is not None and ratio > 10
    assert f"profiled it would be {ratio:.2g} times as long" in choice.model.detail


def test_a_rank_whose_speed_changed_is_named():
    assert "speed of rank 2 has changed" in chosen(fit=replace(FIT, drifted=(2,))).detail
    held = chosen(fit=replace(FIT, refused="noise"))
    assert held.source is CostSource.MEASURED
    assert "newer steps are not used: noise" in held.detail


def test_models_are_not_compared_without_load():
    idle = replace(known(fit=FIT), tokens_per_rank=0.0, active_per_rank=0.0)
    assert choose_cost(idle).ratios == {CostSource.DERIVED: None}


def clocks(*ratios, limited_by=""):
    return [
        replace(H100, clock=None if ratio is None else DeviceClock(ratio, limited_by))
        for ratio in ratios
    ]


def test_clocks_tell_speeds_where_no_rank_reports_seconds():
    slow = chosen(clocks(0.9, 0.9, 0.75, 0.9, limited_by="heat"))
    assert slow.source is CostSource.DERIVED
    assert seconds(slow, 1000.0) / seconds(chosen(), 1000.0) == pytest.approx([1, 1, 1.2, 1])
    assert "by the devices' clocks rank 2 takes 1.20 times" in slow.detail
    assert "rank 2 is limited by heat" in slow.detail
    measured = replace(NONE, factors=np.ones(4))
    assert chosen(clocks(0.9, 0.9, 0.75, 0.9), measured).detail == chosen().detail
    asked = choose_cost(known(clocks(0.9, 0.9, 0.75, 0.9)), CostChoice.TOKENS).model
    assert asked.by_tokens


def test_clocks_that_hardly_differ_or_are_not_all_known_change_nothing():
    for told in (clocks(0.9, 0.91, 0.9, 0.9), clocks(0.9, None, 0.5, 0.9)):
        assert chosen(told).detail == chosen().detail


def test_a_clock_never_counts_for_more_than_a_factor_of_two():
    factors = clock_factors([DeviceClock(ratio) for ratio in (1.0, 1.0, 1e-9, 2.0)])
    assert factors is not None
    assert factors.tolist() == [1.0, 1.0, 2.0, 0.5]
    assert clock_factors([]) is None
