"""A cycle scores by what its ranks told or measured, and an operator can ask for tokens."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase
from evenkeel_moe.controller.cycles.rank_costs import RankCosts
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.policy import CostChoice
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT, SplitModel
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.wire.link import ReplicaCost
from tests.protocol.machines import BASE, SHAPE
from tests.waiting import until

PROFILE = ReplicaCost(1e-5, 1e-7, 2e-6, 0.0, 0.01, 1.8e9)


def costs_of(rig, windows=None, split=EVEN_SPLIT) -> RankCosts:
    member = rig.member
    loads = SimpleNamespace(
        ingest=SimpleNamespace(parts=lambda: windows or {}),
        split=lambda: split,
        times=RankTimes(512),
    )
    return RankCosts(member.control, loads, member.ranks, rig.clock)  # type: ignore[arg-type]


def chosen(costs, rig, mode=CostChoice.AUTO):
    base = PlanBase.current(rig.member.control)
    return costs.choose(base, SHAPE, np.ones((4, 2, 4), np.uint32), mode)


async def test_profiles_are_used_once_every_rank_told_one(rig):
    costs = costs_of(rig)
    with capture_logs() as said:
        assert chosen(costs, rig).source is CostSource.TOKENS
        rig.ranks.sessions[0].received(PROFILE)
        assert "missing: 1" in chosen(costs, rig).detail
        rig.ranks.sessions[1].received(replace(PROFILE, s_per_token=2e-7))
        model = chosen(costs, rig)
        assert chosen(costs, rig, CostChoice.TOKENS).by_tokens
    assert model.source is CostSource.PROFILED
    assert model.curves is not None
    assert model.curves.slope_s_per_token.tolist() == [1e-7, 2e-7]
    assert model.replica.start_tokens == pytest.approx(15.0)
    named = [row["source"] for row in said if row["event"] == "cost_model"]
    assert named == ["tokens", "profiled", "tokens"], "each change is logged once"


async def test_the_dispatcher_in_force_says_if_shared_experts_are_poured(rig):
    base = PlanBase.current(rig.member.control)
    load, shape = np.ones((4, 2, 4), np.uint32), replace(SHAPE, shared_experts=2.0)
    for dispatch, work in ((DispatchModel.EVEN, 0.0), (DispatchModel.WATERFILL, 2 / SHAPE.top_k)):
        costs = costs_of(rig, split=SplitModel(dispatch))
        assert costs.choose(base, shape, load, CostChoice.AUTO).shared_tokens == work


async def test_seconds_that_ranks_report_come_before_their_profiles(rig):
    for session in rig.ranks.sessions:
        session.received(PROFILE)
    rng = np.random.default_rng(1)
    counts = rng.poisson(rng.lognormal(2, 1.5, (64, 2, 4))).astype(np.uint32)
    copies = np.array([(BASE.phy2log[0] == expert).sum() for expert in range(4)])
    shares = np.take_along_axis(counts / copies, BASE.phy2log[None], axis=2)
    by_rank = shares.reshape(64, 2, 2, 3)
    seconds = 1e-6 * by_rank.sum(axis=(1, 3)) + 3e-5 * np.minimum(by_rank, 1).sum(axis=(1, 3))
    seconds[:, 1] *= 1.2
    window = LoadWindow(
        counts,
        np.arange(64),
        np.zeros(64, np.int64),
        np.ones((64, 2), np.int64),
        seconds * rng.lognormal(0, 0.01, seconds.shape),
    )
    costs = costs_of(rig, {Phase.MIXED: [window]})
    model = chosen(costs, rig)
    assert model.source is CostSource.MEASURED
    assert model.curves is not None
    slopes = model.curves.slope_s_per_token
    assert slopes[1] / slopes[0] == pytest.approx(1.2, rel=0.02)
    assert model.replica.start_tokens == pytest.approx(30.0, rel=0.1)
    costs.loads.times.clear()
    costs.loads.ingest = costs_of(rig).loads.ingest
    assert chosen(costs, rig).source is CostSource.PROFILED, "another generation measures anew"


async def test_the_model_in_force_is_the_one_that_a_cycle_scored_by(rig):
    for session in rig.ranks.sessions:
        session.received(PROFILE)
    await rig.load()
    planner = rig.member.planner
    await until(lambda: planner.cost is not None)
    assert planner.cost.source is CostSource.PROFILED
