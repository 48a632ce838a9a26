"""DP=2 under the controller's plans: ranks with different requests, and no steps without any."""

import pytest

from tests.integration.whole import EAGER
from tests.vllm.rig import FRESH, UNEVEN, started
from tests.vllm.server import DATA_PARALLEL, Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory, checkpoints, ask_reference):
    folder = tmp_path_factory.mktemp("data_parallel")
    with started(folder, checkpoints["a"], ask_reference, DATA_PARALLEL, "place") as found:
        yield found


def test_plans_move_experts_of_data_parallel_ranks(rig):
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        rig.served.wait(lambda: has_load(rig.served.status()), 60, "a window to plan from")
        rig.served.patch_policy(mode="propose", cycle_s=3600)
        rig.wait_until_settled()
        found = [rig.wait_until_committed(rig.move(seed)) for seed in range(3)]
    rig.reference.check_answers(traffic.answers, FRESH)
    rig.check()
    rig.check_answers_of_moved([plan["plan_id"] for plan in found])


def test_the_seconds_of_data_parallel_ranks_are_the_cost_model(rig):
    rig.served.patch_policy(mode="observe", cycle_s=1)
    with Traffic(rig.server, UNEVEN):
        status = rig.wait_until_measured()
    rig.served.patch_policy(mode="propose", cycle_s=3600)
    assert status["cost_model"]["unit"] == "s"
    assert all(rank["seconds_per_token"] > 0 for rank in status["ranks"])


def test_a_plan_waits_while_no_request_comes(rig):
    first = rig.server.trace()[0][-1]
    rig.server.call("slow_copies", seconds=1.0)
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        traffic.wait_for(6)
        plan_id = rig.move(10)
        rig.wait_until_moving(first)
    rig.served.wait(lambda: rig.plan(plan_id)["phase"] == "paused", 60, "the plan to be paused")
    moved = rig.server.layers_changed(first)
    assert 0 < moved < len(first), "the move waits"
    assert rig.plan(plan_id)["reason"] == "no_steps"
    with Traffic(rig.server, rig.reference.prompts) as later:
        rig.wait_until_committed(plan_id)
    rig.server.call("slow_copies", seconds=0.0)
    rig.reference.check_answers(traffic.answers + later.answers, FRESH)
    assert rig.server.layers_changed(first) == len(first)
    rig.check()


def has_load(status):
    return status is not None and status["window_steps"] >= EAGER["min_window_steps"]
