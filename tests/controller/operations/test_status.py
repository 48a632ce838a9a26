import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.api.convert import deployment_out
from evenkeel_moe.controller.operations.gauges import (
    GaugeLimits,
    GaugeReader,
    RealisedGain,
    live_replicas,
    losses_in_a_row,
    measured_gauges,
)
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT
from evenkeel_moe.protocol.control_messages import LeaseLost
from evenkeel_moe.protocol.messages import ParticipantState
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.telemetry.balance import Balance
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.wire.link import Heartbeat
from tests.api.fakes import make_plan
from tests.controller.replicas import DEMO, feed, replicas
from tests.waiting import until

PLACEMENT = Placement(np.array([[0, 1, 2, 0], [0, 1, 2, 2]], np.int32), 2, 3)
"""Two layers, two ranks of two slots: expert 0 of layer 0 is on both ranks, the rest on one."""


def window(counts, first=0, epoch=4):
    steps = len(counts)
    return LoadWindow(
        np.asarray(counts, np.uint32),
        np.arange(first, first + steps),
        np.full(steps, epoch),
        np.ones((steps, 2), np.int64),
        np.full((steps, 2), np.nan),
    )


def all_pairs(placement, live):
    """The slow, simple count: which ranks hold each expert."""
    counts, down = [0, 0, 0], 0
    for row in placement.phy2log.tolist():
        for expert in range(placement.num_logical_experts):
            slots = [slot for slot, held in enumerate(row) if held == expert]
            ranks = {slot // placement.slots_per_rank for slot in slots}
            alive = sum(bool(live[rank]) for rank in ranks)
            counts[min(alive, 2)] += 1
            down += alive == 1 and len(ranks) > 1
    return tuple(counts), down


@pytest.mark.parametrize("seed", range(20))
def test_live_replicas_are_those_of_a_slow_count(seed):
    rng = np.random.default_rng(seed)
    placement = Placement(rng.integers(-1, 5, (3, 12)).astype(np.int32), 4, 5)
    live = tuple(rng.random(4) < 0.6)
    for _ in range(2):
        assert live_replicas(placement, live) == all_pairs(placement, live)


def test_live_replicas_of_a_map_of_many_ranks_take_little_memory():
    """One row with as many ranks as slots: a table of experts and ranks would take 1 GB."""
    row = np.zeros((1, 60_000), np.int32)
    row[0, :20_000] = np.arange(20_000)
    tracemalloc.start()
    counts, _ = live_replicas(Placement(row, 60_000, 20_000), (True,) * 60_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == (0, 19_999, 1) and peak < 20 << 20


def test_layers_by_rank_fit_whole_under_the_cap():
    assert GaugeLimits(5, 0).layers_by_rank(72) == 0
    assert GaugeLimits(5, 4392).layers_by_rank(72) == 61
    assert GaugeLimits(5, 4391).layers_by_rank(72) == 60


def test_realised_gain_compares_target_and_base_on_the_same_later_steps():
    record = make_plan(phase=PlanPhase.COMMITTED)
    plan = record.plan
    final = plan.base_epoch + len(plan.waves)
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 50, (12, plan.target.num_layers, plan.target.num_logical_experts))
    realised = RealisedGain()
    realised.update(record, {Phase.DECODE: [window(counts[:6], 0, plan.base_epoch)]}, EVEN_SPLIT)
    assert realised.gain is None
    assert realised.balancedness is None
    later = window(counts[6:], 6, final)
    realised.update(record, {Phase.DECODE: [later]}, EVEN_SPLIT)
    old = moe_time.predicted_time(later.counts, plan.base)
    new = moe_time.predicted_time(later.counts, plan.target)
    assert realised.gain == pytest.approx(1 - new / old)
    expected = metrics.balancedness_mean(metrics.rank_load(later.counts, plan.target))
    assert realised.balancedness == pytest.approx(expected)


def test_realised_gain_is_of_time_under_the_cost_model():
    record = make_plan(phase=PlanPhase.COMMITTED)
    plan = record.plan
    final = plan.base_epoch + len(plan.waves)
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 50, (12, plan.target.num_layers, plan.target.num_logical_experts))
    later = window(counts, 0, final)
    seconds = np.full(plan.base.num_ranks, 1e-6)
    seconds[0] = 3e-6
    slow = CostModel(CostCurves.linear(seconds), source=CostSource.MEASURED)
    realised = RealisedGain()
    realised.update(record, {Phase.DECODE: [later]}, EVEN_SPLIT)
    by_tokens = realised.gain
    # The steps are counted again in the new unit; times of two units are never added.
    realised.update(record, {Phase.DECODE: [later]}, EVEN_SPLIT, slow)
    old = moe_time.predicted_time(later.counts, plan.base, slow)
    new = moe_time.predicted_time(later.counts, plan.target, slow)
    assert realised.gain == pytest.approx(1 - new / old)
    assert realised.gain != pytest.approx(by_tokens)


def test_a_step_counts_once_and_another_plan_starts_at_zero():
    record = make_plan(phase=PlanPhase.COMMITTED)
    final = record.plan.base_epoch + len(record.plan.waves)
    shape = record.plan.target.num_layers, record.plan.target.num_logical_experts
    skewed = np.broadcast_to(np.arange(1, shape[1] + 1) ** 3, (4, *shape))
    realised = RealisedGain()
    seen = {Phase.DECODE: [window(skewed, 0, final)]}
    realised.update(record, seen, EVEN_SPLIT)
    first = realised.gain
    grown = {Phase.DECODE: [window(np.concatenate([skewed, np.ones((40, *shape))]), 0, final)]}
    realised.update(record, grown, EVEN_SPLIT)
    assert realised.gain != first
    again = realised.gain
    realised.update(record, grown, EVEN_SPLIT)
    assert realised.gain == again
    realised.update(make_plan("p-2", phase=PlanPhase.COMMITTED), seen, EVEN_SPLIT)
    assert realised.gain == pytest.approx(first)


BOUNDS = ("estimate", "lower", "upper")


def values(series):
    """Return known gauges as {(name, *labels): value}."""
    return {(name, *labels): value for name, labels, value in series if value is not None}


def measured_plan(name, at, gain, numbers=None):
    record = make_plan(name, phase=PlanPhase.COMMITTED)
    record.plan.numbers.update(numbers or {})
    if gain is None:
        return replace(record, delivered=DeliveredGain(at, unknown_because="why"))
    return replace(record, delivered=DeliveredGain(at, gain, 0.01, gain - 0.02, gain + 0.02))


def test_the_newest_measured_plan_is_shown_and_losses_are_counted_back_to_the_last_gain():
    for unmeasured in (make_plan(phase=PlanPhase.COMMITTED), measured_plan("p", 1.0, None)):
        assert not [*measured_gauges([unmeasured])] and losses_in_a_row([unmeasured]) is None
    records = [
        measured_plan("lost", 3.0, -0.1, {"gain": 0.2}),
        measured_plan("unknown", 4.0, None),
        measured_plan("lost-too", 2.0, -0.2),
        measured_plan("gained", 1.0, 0.1),
        measured_plan("lost-before", 0.0, -0.1),
    ]
    found = values(measured_gauges(records))
    assert found["evenkeel_plan_promised_gain_ratio",] == 0.2
    assert [found["evenkeel_plan_delivered_gain_ratio", bound] for bound in BOUNDS] == (
        pytest.approx([-0.1, -0.12, -0.08])
    )
    assert losses_in_a_row(records) == 2
    assert losses_in_a_row([measured_plan("lost", 3.0, -0.1)]) == 1


@pytest.mark.parametrize("kind", [PlanKind.ROLLBACK, PlanKind.EVACUATION])
def test_a_plan_that_seeks_no_gain_and_a_loss_within_its_interval_are_not_counted_as_losses(kind):
    lost, rolled_back = measured_plan("lost", 1.0, -0.1), measured_plan("back", 3.0, -2.5)
    rolled_back = replace(rolled_back, plan=replace(rolled_back.plan, kind=kind))
    rough = replace(lost, delivered=DeliveredGain(2.0, -1.1, 4.0, -9.5, 0.6))
    assert losses_in_a_row([rolled_back, rough, lost]) == 1
    found = values(measured_gauges([rolled_back, rough, lost]))
    assert found["evenkeel_plan_delivered_gain_ratio", "estimate"] == -2.5, "the newest is shown"


def test_balance_by_layer_is_what_the_summary_is_made_of():
    balance = Balance(capacity=8)
    assert balance.by_layer() is None
    counts = np.array([[[4, 4, 4], [0, 0, 0]]] * 3)
    balance.update({Phase.DECODE: [window(counts)]}, PLACEMENT)
    by_layer = balance.by_layer()
    assert by_layer is not None
    assert by_layer[0] == pytest.approx(1.0)
    assert np.isnan(by_layer[1])
    mean, worst = balance.summary()
    assert mean == pytest.approx(1.0)
    assert worst == pytest.approx(1.0)


# --- The status and the gauges leave out what is over and what is not known -----------------------


BY_WINDOW = {
    "evenkeel_rank_load_share_ratio",
    "evenkeel_rank_compute_seconds_per_token",
    "evenkeel_rank_slowness_ratio",
}
"""Series of a rank by the steps of the window."""


def series(view):
    registry = CollectorRegistry()
    ControllerMetrics(registry).refresh(view.status())
    lines = generate_latest(registry).decode().splitlines()
    return {line.split("{")[0] for line in lines if not line.startswith("#")}


@pytest.fixture
async def one():
    """A replica that leads two ranks."""
    async with replicas("a") as (one, _):
        await one.lead()
        yield one


@pytest.fixture
def view(one):
    return LiveView(one.member)


async def test_a_leader_whose_ranks_have_not_reported_their_state_reports_no_epoch(one, view):
    sessions = [*one.member.ranks.registered()]
    assert view.status().epoch == 0
    assert "evenkeel_epoch" in series(view)
    for session in sessions:
        session.lost()
    one.member.keeper.drop("a test")
    one.member.driver.post(LeaseLost())
    one.member.keeper.want()
    await until(lambda: one.member.keeper.leading and one.member.control.leader is not None)
    assert one.member.control.epoch is None, "or nothing is tested"
    unknown: Any = deployment_out(view.status())
    assert unknown.epoch is None
    assert "evenkeel_epoch" not in series(view)
    assert "evenkeel_term" in series(view)


async def test_what_a_rank_without_a_stream_told_at_its_start_is_unknown(one, view):
    sessions = [*one.member.ranks.registered()]
    assert [rank.epoch for rank in view.status().ranks] == [0, 0]
    sessions[1].lost()
    shown: Any = deployment_out(view.status())
    here, lost = shown.ranks
    assert (here.epoch, lost.epoch) == (0, None)
    assert here.free_bytes is not None
    assert lost.free_bytes is None


async def test_the_loss_of_one_rank_and_one_node_is_told_of_the_placement(one, view):
    placement = view.placement()
    assert placement is not None
    shown: Any = deployment_out(view.status())
    (by_rank,) = shown.coverage
    alone = np.bincount(placement.only_rank[placement.only_rank >= 0], minlength=2)
    assert (by_rank.domain, by_rank.most_lost) == ("rank", alone.max())
    assert by_rank.experts == placement.only_rank.size == by_rank.covered + alone.sum()
    assert by_rank.words.startswith("losing any one rank loses")


async def test_a_state_that_a_rank_told_within_a_wave_is_not_shown_when_wave_or_rank_is_gone(
    one, view
):
    control = one.member.control
    for member in control.membership.members.values():
        member.state = replace(member.state, state=ParticipantState.STAGING)
    assert {rank.state for rank in view.status().ranks} == {"idle"}
    control.state = ControlState.RECOVERING
    assert {rank.state for rank in view.status().ranks} == {"staging"}
    _, other = control.membership.members.values()
    other.stopped = True
    assert [rank.state for rank in view.status().ranks] == ["staging", "unknown"]


async def test_a_group_that_stopped_as_planned_is_neither_ready_nor_balanced_nor_lost(
    one, view, monkeypatch
):
    sessions = [*one.member.ranks.registered()]
    numbers = {"time_balance": 0.8, "time_balance_worst": 0.7}
    one.member.decisions.append({"at": 1.0, "reason": "no_change", "numbers": numbers})
    assert (view.status().state, view.status().time_balance) == ("ready", 0.8)
    feed(one, 0, 8)
    monkeypatch.setattr(RankTimes, "seconds_per_token", lambda _: np.ones(2))
    monkeypatch.setattr(RankTimes, "speed_factors", lambda _: np.full(2, 1.5))
    assert view.status().ranks[0].slowness == 1.5
    assert BY_WINDOW < series(view)
    for session in sessions:
        session.received(Heartbeat(5, 1, 1, stopping=True))
        session.lost()
    status = view.status()
    assert (status.state, status.reason) == ("waiting_for_ranks", Reason.GROUP_STOPPED)
    assert [(rank.fresh, rank.stopped) for rank in status.ranks] == 2 * [(False, True)]
    assert status.time_balance is status.balancedness_mean is None
    assert status.balancedness_by_phase == status.balancedness_worst_by_phase == {}
    assert not BY_WINDOW & series(view), "a slow rank that has stopped would keep its alert firing"
    gauges = values(GaugeReader(one.member.planner, GaugeLimits(8, 0)).read())
    assert not [key for key in gauges if key[0].startswith(("evenkeel_experts", "evenkeel_layer"))]
    assert gauges["evenkeel_redundant_replicas_per_layer", "min"] >= 0
    with pytest.raises(Unavailable, match=r"ranks \[0, 1\] stopped as planned"):
        await one.operations.recommendation(DEMO, None)


async def test_the_time_balance_is_that_of_the_newest_cycle_and_absent_without_one(one):
    assert LiveView(one.member).status().cost_model is None
    assert "evenkeel_cost_model_info" not in series(LiveView(one.member))
    numbers = {"time_balance": 0.8, "time_balance_worst": 0.7}
    one.member.decisions.append({"at": 1.0, "reason": "no_change", "numbers": numbers})
    cost = CostModel(CostCurves.linear(np.ones(2)), source=CostSource.PROFILED)
    view = LiveView(one.member)
    view.cost = cost
    status = view.status()
    assert (status.time_balance, status.time_balance_worst) == (0.8, 0.7)
    assert status.cost_model == cost.basis
    assert {"evenkeel_time_balance_ratio", "evenkeel_cost_model_info"} <= series(view)
    assert "evenkeel_cost_model_fit_error_ratio" not in series(view)
    one.member.decisions.append({"at": 2.0, "reason": "store_unavailable", "numbers": {}})
    assert "evenkeel_time_balance_ratio" not in series(view)


async def test_what_alerts_look_at_is_in_the_status_too(one, view):
    status = view.status()
    assert status.plan_aborted_unix is status.plans_lost_time is None
    shown_by_phase = zip(
        status.balancedness_by_phase.values(),
        status.balancedness_worst_by_phase.values(),
        strict=True,
    )
    balance = one.member.loads.balance
    assert list(shown_by_phase) == [balance.summary(phase) for phase in Phase]
    records = one.member.control.records
    for name, at in (("old", 5.0), ("new", 9.0)):
        record = measured_plan(name, at, -0.1)
        records.by_id[record.plan.plan_id] = replace(record, phase=PlanPhase.ABORTED, updated_at=at)
    shown: Any = deployment_out(view.status())
    assert (shown.plan_aborted_unix, shown.plans_lost_time) == (9.0, 2)


async def test_the_alert_about_proposals_sees_those_made_by_hand_and_the_oldest_of_all(one, view):
    records = one.member.control.records
    reader = GaugeReader(one.member.planner, GaugeLimits(8, 0))
    made_at = ("evenkeel_proposal_created_timestamp_seconds",)
    expires_at = ("evenkeel_proposal_expires_timestamp_seconds",)
    assert made_at not in values(reader.read())
    for name, kind, made, ends in (
        ("hand", PlanKind.MANUAL, 100.0, 900.0),
        ("auto", PlanKind.AUTOMATIC, 200.0, 800.0),
        ("kept", PlanKind.ROLLBACK, 300.0, None),
    ):
        record = make_plan(name)
        plan = replace(record.plan, kind=kind, created_at=made, expires_at=ends)
        records.by_id[plan.plan_id] = replace(record, plan=plan)
        found = values(reader.read())
        assert (found[made_at], found[expires_at]) == (100.0, min(ends or 800.0, 900.0))
    assert len(view.status().proposals) == 3


async def test_a_freeze_is_reported_until_it_ends(one, view):
    await one.operations.freeze(DEMO, 0.5, "eve")
    assert view.status().frozen_until_unix is not None
    await until(lambda: view.status().frozen_until_unix is None, within_s=5)
    assert "evenkeel_frozen_until_timestamp_seconds" not in series(view)
