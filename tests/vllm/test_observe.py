"""TP=2 in observe mode: vLLM's own balancer moves experts, and the controller follows."""

import pytest

from tests.integration.whole import plans
from tests.vllm.rig import FRESH, started
from tests.vllm.server import TENSOR_PARALLEL, TOKENS, Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory, checkpoints, ask_reference):
    folder = tmp_path_factory.mktemp("observe")
    options = {"start_method": "spawn", "step_interval": 400}
    with started(
        folder, checkpoints["a"], ask_reference, TENSOR_PARALLEL, "observe", **options
    ) as found:
        yield found


@pytest.mark.fault(
    "who serves with vLLM or SGLang",
    "the passes of the engine's start were in the first window",
)
def test_the_first_window_holds_the_steps_of_the_first_answer_only(rig):
    steps = rig.check_trace()

    def reported():
        status = rig.served.status()
        return status if status and status["step"] == steps - 1 else None

    status = rig.served.wait(reported, 60, "the steps of the first answer")
    assert steps > TOKENS, "vLLM has warmed up"
    assert status["window_steps"] == TOKENS


@pytest.mark.fault(
    "a vLLM whose ranks only observe",
    "the controller began a plan that the ranks refused",
)
def test_observing_changes_nothing_and_follows_vllms_own_moves(rig):
    with Traffic(rig.server, rig.reference.prompts) as traffic:

        def moved():
            status = rig.served.status()
            return status and (status["epoch"] or 0) >= 2 and status["window_steps"] >= 64

        rig.served.wait(moved, 180, "two rearrangements of vLLM's own")
    rig.reference.check_answers(traffic.answers, FRESH)
    rig.check()
    status = rig.served.get()
    assert status["balancedness_mean"] < 1
    assert (status["mode"], status["reason"]) == ("auto", "observe_only")
    assert status["last_decision"]["reason"] == "observe_only"
    assert plans(rig.served) == []
