"""A real controller in `auto` plans for a slow rank, although tokens are balanced."""

import numpy as np
import pytest

from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.wire.link import CostCurve
from tests.integration.controller_rig import Controller, Group
from tests.waiting import until

pytestmark = pytest.mark.integration

SHAPE = ModelShape(1, 8, 4, 2, 2, 1024)
POPULARITY = np.array([1.24, 1.16, 1.08, 1.0, 1.0, 0.92, 0.84, 0.76]) / 8
SLOW_RANK = 3
SLOWNESS = 1.12


class EvenGroup(Group):
    """Two experts of different popularity on each rank, which add up to the same load."""

    def __init__(self) -> None:
        super().__init__(shape=SHAPE)
        self.popularity = POPULARITY[None]
        self.placement = Placement(np.array([[0, 7, 1, 6, 2, 5, 3, 4]], np.int32), 4, 8)
        for rank in self.ranks:
            rank.placement = self.placement

    def route(self, num_steps: int, tokens: int = 512) -> list[LoadReport]:
        return super().route(num_steps, tokens)


def curve(rank: int) -> CostCurve:
    """Seconds that rise by equal steps with every eight tokens."""
    per_token = 1e-6 * (SLOWNESS if rank == SLOW_RANK else 1.0)
    return CostCurve(8, tuple(8 * per_token * np.arange(1, 257)), per_token)


async def test_a_slow_rank_is_planned_for_once_all_ranks_told_their_curves(tmp_path):
    environment = {"PLANNER__MODE": "auto", "PLANNER__POLICY": "keel"}
    async with Controller(tmp_path, **environment) as controller, EvenGroup() as group:
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        await until(lambda: controller.events("planner_ready"), within_s=120)
        group.serve_on()

        async def decided(reason):
            rows = await controller.decisions()
            return next((row for row in rows if row["reason"] == reason), None)

        by_tokens = await until(lambda: decided("balance_above_threshold"), within_s=60)
        assert by_tokens["numbers"]["balancedness_mean"] > 0.93
        status = await controller.status()
        assert (status["cost_model"]["source"], status["time_balance"]) == ("tokens", None)

        for rank in group.ranks:
            await rank.send(curve(rank.rank))
        start = await until(lambda: decided("plan_started"), within_s=60)
        assert start["numbers"]["balancedness_mean"] > 0.93
        assert start["numbers"]["time_balance"] < 0.93
        assert start["numbers"]["gain_lower"] > 0

        async def improved():
            found = await controller.status()
            balance = found["time_balance"]
            return group.epoch > 0 and balance and balance > start["numbers"]["time_balance"] + 0.02

        await until(improved, within_s=60)
        load = POPULARITY[group.placement.phy2log.reshape(4, 2)].sum(axis=1)
        assert load.argmin() == SLOW_RANK
        status = await controller.status()
        assert status["cost_model"]["source"] == "profiled"
        assert status["cost_model"]["unit"] == "s"
        series = await controller.metrics()
        assert series['evenkeel_cost_model_info{deployment="demo",source="profiled"}'] == 1
        assert 0 < series['evenkeel_time_balance_ratio{deployment="demo"}'] <= 1
