import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from evenkeel_moe.adapters.prometheus.metric_families import Series
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.topology import ModelShape
from tests.api.fakes import NOW, make_plan, make_rank, make_status

BALANCE: dict[str, Any] = {
    "balancedness_by_phase": {Phase.PREFILL: 0.8, Phase.DECODE: None},
    "balancedness_worst_by_phase": {Phase.PREFILL: 0.6, Phase.DECODE: None},
}
MORE: tuple[Series, ...] = (
    ("evenkeel_last_plan_gain_ratio", ("predicted",), 0.2),
    ("evenkeel_layer_balancedness_ratio", (1,), 0.6),
    ("evenkeel_layer_balancedness_ratio", (0,), None),
    ("evenkeel_layer_rank_load_ratio", (1, 0), 1.2),
    ("evenkeel_experts", ("one",), 5),
)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return ControllerMetrics(registry)


def series(registry):
    """Return every series as {name{labels without deployment}: value}; they are of `demo`."""
    found = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        labels = {k: v for k, v in sample.labels.items() if (k, v) != ("deployment", "demo")}
        words = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        found[f"{sample.name}{{{words}}}" if words else sample.name] = sample.value
    return found


def names(registry):
    return {name.partition("{")[0] for name in series(registry)}


def of_demo(registry):
    return [
        sample.name
        for family in registry.collect()
        for sample in family.samples
        if sample.labels.get("deployment") == "demo"
    ]


def exercise(metrics, deployment="demo"):
    metrics.deployment_added(deployment)
    metrics.reports_received(deployment, 16)
    metrics.reports_rejected(deployment, Reason.SUM_MISMATCH, 2)
    metrics.steps_dropped(deployment, 1, 3)
    metrics.decision(deployment, Reason.NO_CHANGE)
    metrics.wave_committed(deployment, 0.3, 7, 7000)
    metrics.swap_stall(deployment, 0.001)
    metrics.cycle_ended(deployment, 0.5)
    metrics.planner_ran(deployment, 0.25)
    metrics.store_called("read", 0.002)
    metrics.plan_ended(deployment, "committed", Reason.COMMITTED)
    metrics.store_answered(NOW)
    status = make_status(
        deployment,
        active_plan=make_plan(),
        newest_step_unix=NOW,
        plans_lost_time=2,
        **BALANCE,
    )
    metrics.refresh(status, MORE)


def test_counters_add_up(metrics, registry):
    exercise(metrics)
    exercise(metrics)
    assert (
        series(registry).items()
        >= {
            "evenkeel_report_steps_total": 32,
            "evenkeel_report_steps_rejected_total{reason=sum_mismatch}": 4,
            "evenkeel_report_steps_dropped_total{rank=1}": 6,
            "evenkeel_decisions_total{reason=no_change}": 2,
            "evenkeel_moves_total": 14,
            "evenkeel_migrated_bytes_total": 14000,
            "evenkeel_wave_duration_seconds_sum": 0.6,
            "evenkeel_swap_stall_seconds_count": 2,
            "evenkeel_cycle_duration_seconds_sum": 1.0,
            "evenkeel_planner_duration_seconds_sum": 0.5,
            "evenkeel_store_operation_duration_seconds_count{operation=read}": 2,
        }.items()
    )


def test_copies_of_unknown_size_count_no_bytes(metrics, registry):
    metrics.deployment_added("demo")
    metrics.wave_committed("demo", 0.3, 7, None)
    found = series(registry)
    assert found["evenkeel_moves_total"] == 7
    assert not found.get("evenkeel_migrated_bytes_total")


def test_each_value_of_a_view_has_its_series(metrics, registry):
    exercise(metrics)
    found = series(registry)
    assert (
        found.items()
        >= {
            "evenkeel_last_plan_gain_ratio{basis=predicted}": 0.2,
            "evenkeel_plans_lost_time_in_a_row": 2,
            "evenkeel_newest_step_timestamp_seconds": NOW,
            "evenkeel_plan_created_timestamp_seconds": NOW,
            "evenkeel_time_balance_ratio": 0.7,
            "evenkeel_time_balance_worst_ratio": 0.5,
            "evenkeel_balancedness_mean_ratio{phase=prefill}": 0.8,
            "evenkeel_balancedness_worst_ratio{phase=prefill}": 0.6,
            "evenkeel_cost_model_info{source=measured}": 1,
            "evenkeel_cost_model_fit_error_ratio": 0.034,
            "evenkeel_layer_balancedness_ratio{layer=1}": 0.6,
            "evenkeel_experts{live_replicas=one}": 5,
            "evenkeel_experts_lost_with_one_domain{domain=rank}": 2,
            "evenkeel_layer_rank_load_ratio{layer=1,rank=0}": 1.2,
            "evenkeel_leading": 1,
        }.items()
    )
    assert "evenkeel_layer_balancedness_ratio{layer=0}" not in found


def test_open_streams_are_counted_at_each_scrape(metrics, registry):
    streams = [object()]
    metrics.watch_streams(lambda: len(streams))
    assert series(registry)["evenkeel_grpc_streams"] == 1
    streams.clear()
    assert series(registry)["evenkeel_grpc_streams"] == 0


def test_unknown_has_no_series_and_is_never_zero(metrics, registry):
    assert "evenkeel_store_answered_timestamp_seconds" not in names(registry)
    metrics.refresh(make_status(**BALANCE), MORE)
    assert {"evenkeel_balancedness_mean_ratio", "evenkeel_rank_load_share_ratio"} <= names(registry)
    unknown = make_status(
        ranks=(make_rank(0, load_share=None, seconds_per_token=None),),
        step=None,
        last_decision=None,
        **(BALANCE | dict.fromkeys(BALANCE, {Phase.DECODE: None})),
    )
    metrics.refresh(unknown)
    gone = {
        "evenkeel_balancedness_mean_ratio",
        "evenkeel_balancedness_worst_ratio",
        "evenkeel_rank_load_share_ratio",
        "evenkeel_rank_compute_seconds_per_token",
        "evenkeel_newest_step",
        "evenkeel_last_decision_timestamp_seconds",
        "evenkeel_plan_created_timestamp_seconds",
        "evenkeel_frozen_until_timestamp_seconds",
        "evenkeel_newest_step_timestamp_seconds",
    } | {name for name, _, _ in MORE}
    assert not gone & names(registry)
    assert "evenkeel_rank_epoch" in names(registry)


def test_a_cost_model_by_tokens_has_no_figures(metrics, registry):
    by_tokens = make_status(time_balance=None, time_balance_worst=None, cost_model=CostBasis())
    metrics.refresh(by_tokens)
    assert [key for key in series(registry) if "time_balance" in key or "cost_" in key] == [
        "evenkeel_cost_model_info{source=tokens}"
    ]


def test_the_series_of_an_ended_plan_are_removed(metrics, registry):
    metrics.refresh(make_status(active_plan=make_plan()))
    metrics.refresh(make_status())
    assert not [name for name in names(registry) if name.startswith("evenkeel_plan_")]


def test_the_series_of_a_departed_rank_are_removed(metrics, registry):
    exercise(metrics)
    assert [key for key in series(registry) if "rank=1" in key]
    metrics.refresh(make_status(ranks=(make_rank(0),)))
    assert not [key for key in series(registry) if "rank=1" in key]


def test_a_rank_that_departed_while_another_replica_led_has_no_series(metrics, registry):
    exercise(metrics)
    metrics.follow("demo")
    metrics.refresh(make_status(ranks=(make_rank(0),)))
    assert not [key for key in series(registry) if "rank=1" in key]


def test_the_series_of_a_departed_deployment_are_removed(metrics, registry):
    exercise(metrics, "demo")
    exercise(metrics, "other")
    metrics.forget("demo")
    assert of_demo(registry) == []
    assert [key for key in series(registry) if "deployment=other" in key]
    metrics.deployment_added("demo")
    metrics.reports_received("demo", 3)
    assert series(registry)["evenkeel_report_steps_total"] == 3


@pytest.mark.fault("three failures of a new planner", "the alert that counts them did not fire")
def test_counters_that_alerts_count_begin_at_0(metrics, registry):
    before = set(series(registry))
    metrics.deployment_added("demo")
    begun = {
        name for name in set(series(registry)) - before if re.search("_total|_seconds_count", name)
    }
    assert begun == {
        "evenkeel_deployment_failures_total",
        "evenkeel_ranks_displaced_total",
        "evenkeel_report_steps_total",
        "evenkeel_decisions_total{reason=planner_failed}",
        "evenkeel_swap_stall_seconds_count",
    }
    assert {series(registry)[name] for name in begun} == {0}


def test_a_cycle_that_ends_after_its_deployment_left_brings_no_series_back(metrics, registry):
    """On a busy machine the planner ended later than the deployment, and its series stayed."""
    exercise(metrics, "demo")
    metrics.forget("demo")
    metrics.planner_ran("demo", 0.25)
    metrics.cycle_ended("demo", 0.5)
    metrics.decision("demo", Reason.NO_CHANGE)
    metrics.reports_received("demo", 3)
    assert of_demo(registry) == []


def test_a_replica_that_does_not_lead_exports_no_gauges(metrics, registry):
    exercise(metrics)
    metrics.follow("demo")
    found = series(registry)
    assert found["evenkeel_leading"] == 0
    assert "evenkeel_rank_fresh" not in names(registry)
    assert found["evenkeel_moves_total"] == 7
    metrics.refresh(make_status())
    assert series(registry)["evenkeel_leading"] == 1


def test_the_reason_of_a_hold_has_a_series_while_it_lasts(metrics, registry):
    metrics.refresh(make_status(held=True, held_because="gains_not_delivered"))
    assert series(registry)["evenkeel_held_reason{reason=gains_not_delivered}"] == 1
    metrics.refresh(make_status())
    assert "evenkeel_held_reason" not in names(registry)


def test_series_stay_few_at_72_ranks_61_layers_256_experts(metrics, registry):
    shape = ModelShape(61, 256, 72, 4, 8, 44_000_000)
    ranks = tuple(make_rank(rank, load_share=1 / 72) for rank in range(72))
    for reason in Reason:
        metrics.decision("wide", reason)
        metrics.reports_rejected("wide", reason, 1)
    for rank in range(72):
        metrics.steps_dropped("wide", rank, 1)
    metrics.wave_committed("wide", 1.0, 1, 1)
    metrics.swap_stall("wide", 0.01)
    metrics.cycle_ended("wide", 0.5)
    metrics.planner_ran("wide", 0.25)
    metrics.refresh(
        make_status(
            "wide",
            shape=shape,
            ranks=ranks,
            active_plan=make_plan(),
            **{name: dict.fromkeys(Phase, 0.9) for name in BALANCE},
        ),
        [
            (name, (layer,), 0.5)
            for layer in range(5)
            for name in ("evenkeel_layer_balancedness_ratio", "evenkeel_layer_redundant_replicas")
        ],
    )
    # 72 ranks x 7 series, two counters over the closed list of reasons, 5 layers x 2, 28 buckets,
    # and the 30 series of the durations of cycles and planner; the rest are single series. Nothing
    # grows with the 61 x 256 experts.
    assert len(series(registry)) <= 72 * 7 + 2 * len(Reason) + 5 * 2 + 84 + 30


def test_every_family_is_announced_before_it_has_a_value(registry, metrics):
    text = generate_latest(registry).decode()
    assert "# TYPE evenkeel_balancedness_mean_ratio gauge" in text
    assert "# TYPE evenkeel_moves_total counter" in text
    assert "evenkeel_build_info{" in text
    assert not re.search(r"_created[ {]", text)
