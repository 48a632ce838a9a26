"""The status and the gauges leave out what is over and what is not known."""

from prometheus_client import CollectorRegistry, generate_latest

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.api.convert import deployment_out
from evenkeel_moe.controller.operations.status import live_view
from evenkeel_moe.protocol.control_messages import LeaseLost
from tests.controller.replicas import DEMO, replicas
from tests.waiting import until


def series(view):
    registry = CollectorRegistry()
    ControllerMetrics(registry).refresh(view.status(), view.balance())
    return {line.split("{")[0] for line in generate_latest(registry).decode().splitlines()}


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


async def test_a_freeze_is_reported_until_it_ends():
    async with replicas("a") as (one, _):
        await one.lead()
        await one.operations.freeze(DEMO, 0.5, "eve")
        view = live_view(one.member)
        assert view.status().frozen_until_unix is not None
        await until(lambda: view.status().frozen_until_unix is None, within_s=5)
        assert "evenkeel_frozen_until_timestamp_seconds" not in series(view)
