"""Ranks of vLLM's own EPLB under a real controller: loads over gRPC, its own plan, vLLM's copies."""

import json

import numpy as np
import pytest

from tests.engines import ranks
from tests.integration.whole import Served

pytestmark = [pytest.mark.engines, pytest.mark.integration]
SCENARIOS = "tests.engines.vllm.scenarios"
THRESHOLDS = {
    "min_window_steps": 48,
    "cooldown_s": 1,
    "consecutive_windows": 1,
    "plan_below": 0.98,
    "stop_above": 0.99,
}


@pytest.fixture
def controller(tmp_path):
    """`evenkeel serve` on free ports; (gRPC address, REST client)."""
    served = Served(
        tmp_path,
        WINDOW__STEPS=128,
        WINDOW__PLAN_STEPS=128,
        PLANNER__POLICY="keel",
        PLANNER__CYCLE_S=1,
        PLANNER__THRESHOLDS=json.dumps(THRESHOLDS),
    )
    try:
        served.start()
        yield served.grpc_address, served.http
    finally:
        served.http.close()
        served.stop()


@pytest.mark.timeout(300)
def test_a_controllers_own_plan_is_carried_out_by_vllm(controller):
    address, client = controller
    found = ranks.run(SCENARIOS, "controlled", controllers=address, mode="place")
    status = client.get("/v1/deployments/toy").json()
    placement = client.get("/v1/deployments/toy/placement").json()
    decisions = client.get("/v1/deployments/toy/decisions").json()["items"][:3]
    for seen in found:
        assert seen["epoch"] >= 1, f"no plan was carried out: {decisions}"
        assert not np.array_equal(seen["map"], seen["before"])
        assert np.array_equal(seen["map"], np.array(placement["physical_to_logical"]))
        assert seen["wrong"] == []
        assert seen["trouble"] == ""
    assert status["epoch"] == found[0]["epoch"]
    plans = client.get("/v1/deployments/toy/plans").json()["items"]
    assert "committed" in {plan["phase"] for plan in plans}


@pytest.mark.timeout(300)
def test_observing_needs_nothing_but_an_address(controller):
    address, client = controller
    found = ranks.run(SCENARIOS, "controlled", controllers=address, mode="observe")
    for seen in found:
        assert seen["epoch"] == 0
        assert np.array_equal(seen["map"], seen["before"])
    status = client.get("/v1/deployments/toy").json()
    assert status["window_steps"] >= 100
    assert status["balancedness_mean"] < 0.95
    load = client.get("/v1/deployments/toy/load").json()
    assert load
