"""TP=2 in observe mode: vLLM's own balancer moves experts, and the controller follows."""

import pytest

from tests.integration.whole import plans
from tests.vllm.rig import FRESH, started
from tests.vllm.server import TENSOR_PARALLEL, Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.fault(
    "a vLLM whose ranks only observe",
    "the controller began a plan that the ranks refused",
)
def test_observing_changes_nothing_and_follows_vllms_own_moves(tmp_path, checkpoints, reference):
    with started(
        tmp_path, checkpoints["a"], reference, TENSOR_PARALLEL, "observe", step_interval=400
    ) as rig:
        with Traffic(rig.server, reference.prompts) as traffic:

            def moved():
                status = rig.served.status()
                return status and (status["epoch"] or 0) >= 2 and status["window_steps"] >= 64

            rig.served.wait(moved, 180, "two rearrangements of vLLM's own")
        reference.check_answers(traffic.answers, FRESH)
        rig.check()
        status = rig.served.get()
        assert status["balancedness_mean"] < 1
        assert (status["mode"], status["reason"]) == ("auto", "observe_only")
        assert status["last_decision"]["reason"] == "observe_only"
        assert plans(rig.served) == []
