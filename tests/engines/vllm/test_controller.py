"""Ranks of vLLM's own EPLB under a real controller: loads over gRPC, its own plan, vLLM's copies."""

import json
import os
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from tests.engines.vllm import ranks

pytestmark = [pytest.mark.engines, pytest.mark.integration]
SCENARIOS = "tests.engines.vllm.scenarios"
TOKEN = "operate-token-0123456789"
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
    grpc, rest, metrics = ranks.free_port(), ranks.free_port(), ranks.free_port()
    (tmp_path / "tokens").write_text(f"tester operate {TOKEN}\n")
    settings = {
        "DATA_DIR": tmp_path / "data",
        "GRPC__PORT": grpc,
        "REST__PORT": rest,
        "REST__TOKEN_FILE": tmp_path / "tokens",
        "METRICS__PORT": metrics,
        "WINDOW__STEPS": 128,
        "WINDOW__PLAN_STEPS": 128,
        "PLANNER__MODE": "auto",
        "PLANNER__POLICY": "keel",
        "PLANNER__CYCLE_S": 1,
        "PLANNER__RECENT_STEPS": 16,
        "PLANNER__THRESHOLDS": json.dumps(THRESHOLDS),
    }
    environment = {**os.environ, **{f"EVENKEEL_{name}": str(value) for name, value in settings.items()}}
    with (tmp_path / "controller.log").open("wb") as log:
        command = [sys.executable, "-m", "evenkeel", "serve"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{rest}", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if client.get("/readyz").is_success:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "the controller does not come up"
            assert process.poll() is None, "the controller ended"
            time.sleep(0.1)
        yield f"127.0.0.1:{grpc}", client
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


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
