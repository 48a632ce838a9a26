"""Ranks of vLLM's own EPLB under a real controller: loads over gRPC, a plan, vLLM's copies."""

import threading

import numpy as np
import pytest

from tests.engines import ranks
from tests.waiting import deadline

pytestmark = [pytest.mark.engines, pytest.mark.integration]
SCENARIOS, FAULTS = "tests.engines.vllm.scenarios", "tests.engines.vllm.faults"


@pytest.mark.timeout(300)
def test_a_controllers_own_plan_is_carried_out_by_vllm(controller):
    client = controller.http
    found = ranks.run(SCENARIOS, "controlled", controllers=controller.grpc_address)
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
def test_a_move_that_vllm_stopped_without_a_word_is_seen_at_the_controller(controller, tmp_path):
    seen, found = tmp_path / "seen", []
    options = {"controllers": controller.grpc_address, "seen": seen}
    fleet = threading.Thread(
        target=lambda: found.extend(ranks.run(FAULTS, "controlled_until_it_stalls", **options))
    )
    fleet.start()
    try:
        plan = controller.wait(lambda: stalled_plan(controller.http), 100, "a stalled plan")
        troubles = controller.wait(
            lambda: troubles_of_both(controller.http), 30, "the trouble of both ranks"
        )
    finally:
        seen.touch()
        fleet.join(deadline(200))
    assert plan["reason"] == "abort_deadline" and plan["waves_committed"] == 0
    assert any("asynchronous EPLB worker has ended" in trouble for trouble in troubles)
    assert [rank["wrong"] for rank in found] == [[], []]


def ranks_of(client):
    return client.get("/v1/deployments/toy").json()["ranks"]


def troubles_of_both(client):
    troubles = [rank["trouble"] for rank in ranks_of(client)]
    return troubles if len(troubles) == 2 and all(troubles) else None


def stalled_plan(client):
    answer = client.get("/v1/deployments/toy/plans")
    items = answer.json()["items"] if answer.is_success else []
    return next((plan for plan in items if plan["phase"] == "stalled"), None)
