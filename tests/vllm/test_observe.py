"""TP=2 in observe mode: vLLM's own balancer moves experts, and the controller follows."""

import pytest

from tests.integration.whole import plans
from tests.vllm.rig import FRESH, started
from tests.vllm.server import TENSOR_PARALLEL, Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


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
        assert rig.served.get()["balancedness_mean"] < 1
        assert plans(rig.served) == []
