"""The status and the gauges leave out what is over and what is not known."""

from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.api.convert import deployment_out
from evenkeel_moe.controller.operations.gauges import GaugeLimits, GaugeReader
from evenkeel_moe.controller.operations.status import live_view
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol.control_messages import LeaseLost
from evenkeel_moe.protocol.messages import ParticipantState
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.wire.link import Heartbeat
from tests.controller.operations.test_gauges import measured_plan
from tests.controller.replicas import DEMO, feed, replicas
from tests.waiting import until

BY_WINDOW = {
    "evenkeel_rank_load_share_ratio",
    "evenkeel_rank_compute_seconds_per_token",
    "evenkeel_rank_slowness_ratio",
}
"""Series of a rank by the steps of the window."""


def series(view):
    registry = CollectorRegistry()
    ControllerMetrics(registry).refresh(view.status(), view.balance())
    lines = generate_latest(registry).decode().splitlines()
    return {line.split("{")[0] for line in lines if not line.startswith("#")}


async def test_a_leader_whose_ranks_have_not_reported_their_state_reports_no_epoch():
    async with replicas("a") as (one, _):
        sessions = await one.lead()
        view = live_view(one.member)
        assert view.status().epoch == 0
        assert "evenkeel_epoch" in series(view)
        for session in sessions:
            session.lost()
        one.member.keeper.drop("a test")
        one.member.driver.post(LeaseLost())
        one.member.keeper.want()
        await until(lambda: one.member.keeper.leading and one.member.control.leader is not None)
        assert one.member.control.epoch is None, "or nothing is tested"
        assert deployment_out(view.status()).epoch is None
        assert "evenkeel_epoch" not in series(view)
        assert "evenkeel_term" in series(view)


async def test_what_a_rank_without_a_stream_told_at_its_start_is_unknown():
    async with replicas("a") as (one, _):
        sessions = await one.lead()
        view = live_view(one.member)
        assert [rank.epoch for rank in view.status().ranks] == [0, 0]
        sessions[1].lost()
        here, lost = deployment_out(view.status()).ranks or []
        assert (here.epoch, lost.epoch) == (0, None)
        assert here.free_bytes is not None
        assert lost.free_bytes is None


async def test_the_loss_of_one_rank_and_one_node_is_told_of_the_placement():
    async with replicas("a") as (one, _):
        await one.lead()
        view = live_view(one.member)
        placement = view.placement()
        assert placement is not None
        (by_rank,) = deployment_out(view.status()).coverage or []
        alone = np.bincount(placement.only_rank[placement.only_rank >= 0], minlength=2)
        assert (by_rank.domain, by_rank.most_lost) == ("rank", alone.max())
        assert by_rank.experts == placement.only_rank.size == by_rank.covered + alone.sum()
        assert by_rank.words.startswith("losing any one rank loses")


async def test_a_state_that_a_rank_told_within_a_wave_is_not_shown_when_the_wave_is_over():
    async with replicas("a") as (one, _):
        await one.lead()
        control, view = one.member.control, live_view(one.member)
        for member in control.membership.members.values():
            member.state = replace(member.state, state=ParticipantState.STAGING)
        assert {rank.state for rank in view.status().ranks} == {"idle"}
        control.state = ControlState.RECOVERING
        assert {rank.state for rank in view.status().ranks} == {"staging"}


async def test_a_group_that_stopped_as_planned_is_neither_ready_nor_balanced_nor_lost(monkeypatch):
    async with replicas("a") as (one, _):
        sessions = await one.lead()
        view = live_view(one.member)
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
        assert set(view.balance().values()) == {(None, None)}
        assert not BY_WINDOW & series(view), (
            "a slow rank that has stopped would keep its alert firing"
        )
        gauges = GaugeReader(
            one.member.control, one.member.loads, one.member.clock, GaugeLimits(8, 0),
            one.member.planner,
        ).read()  # fmt: skip
        assert gauges.live_replicas is None and gauges.down_to_one is None
        with pytest.raises(Unavailable, match=r"ranks \[0, 1\] stopped as planned"):
            await one.operations.recommendation(DEMO, None)


async def test_the_time_balance_is_that_of_the_newest_cycle_and_absent_without_one():
    async with replicas("a") as (one, _):
        await one.lead()
        assert live_view(one.member).status().cost_model is None
        assert "evenkeel_cost_model_info" not in series(live_view(one.member))
        numbers = {"time_balance": 0.8, "time_balance_worst": 0.7}
        one.member.decisions.append({"at": 1.0, "reason": "no_change", "numbers": numbers})
        cost = CostModel(CostCurves.linear(np.ones(2)), source=CostSource.PROFILED)
        view = replace(live_view(one.member), cost=cost)
        status = view.status()
        assert (status.time_balance, status.time_balance_worst) == (0.8, 0.7)
        assert status.cost_model == cost.basis
        assert {"evenkeel_time_balance_ratio", "evenkeel_cost_model_info"} <= series(view)
        assert "evenkeel_cost_model_fit_error_ratio" not in series(view)
        one.member.decisions.append({"at": 2.0, "reason": "store_unavailable", "numbers": {}})
        assert "evenkeel_time_balance_ratio" not in series(view)


async def test_what_alerts_look_at_is_in_the_status_too():
    async with replicas("a") as (one, _):
        await one.lead()
        view = live_view(one.member)
        status = view.status()
        assert status.plan_aborted_unix is status.plans_lost_time is None
        by_phase = {phase: mean for phase, (mean, _) in view.balance().items()}
        assert status.balancedness_by_phase == by_phase
        records = one.member.control.records
        for name, at in (("old", 5.0), ("new", 9.0)):
            record = measured_plan(name, at, -0.1)
            records.by_id[record.plan.plan_id] = replace(
                record, phase=PlanPhase.ABORTED, updated_at=at
            )
        shown = deployment_out(view.status())
        assert (shown.plan_aborted_unix, shown.plans_lost_time) == (9.0, 2)


async def test_a_freeze_is_reported_until_it_ends():
    async with replicas("a") as (one, _):
        await one.lead()
        await one.operations.freeze(DEMO, 0.5, "eve")
        view = live_view(one.member)
        assert view.status().frozen_until_unix is not None
        await until(lambda: view.status().frozen_until_unix is None, within_s=5)
        assert "evenkeel_frozen_until_timestamp_seconds" not in series(view)
