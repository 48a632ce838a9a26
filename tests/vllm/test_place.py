"""TP=2 with expert parallelism under the controller's plans; the tests run in this order."""

import os
import signal
import time

import numpy as np
import pytest

from tests.integration.whole import DEPLOYMENT, plans
from tests.vllm.rig import FRESH, UNEVEN, rank_settings, started
from tests.vllm.server import TENSOR_PARALLEL, Traffic, VllmServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory, checkpoints, ask_reference):
    folder = tmp_path_factory.mktemp("place")
    with started(folder, checkpoints["a"], ask_reference, TENSOR_PARALLEL, "place") as found:
        yield found


def test_the_controller_moves_experts_by_itself(rig):
    first = rig.server.trace()[0][-1]
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        rig.served.wait(
            lambda: rig.served.status() and plans(rig.served, "committed"), 120, "an automatic plan"
        )
        traffic.wait_for(12)
        rig.served.patch_policy(mode="propose", cycle_s=3600)
        rig.wait_until_settled()
    rig.reference.check_answers(traffic.answers, FRESH)
    assert rig.server.layers_changed(first) > 0
    rig.check()


def test_a_rank_that_computes_twice_is_found_by_its_own_seconds(rig, capsys):
    """The plan before has spread the tokens: a rank with few of them would look slow."""
    rig.served.patch_policy(mode="observe", cycle_s=1)
    with Traffic(rig.server, UNEVEN):
        cost = rig.wait_until_measured()["cost_model"]
        rig.server.call("repeat_experts", rank=1, share=0.8)
        # Of two ranks, the median is in the middle: the root of 1.8 times the time.
        slow = rig.wait_for_slowness(1, 1.2, 2.0)
        rig.served.wait(lambda: '"rank_slow"' in rig.served.log(), 60, "the rank to be named")
        rig.server.call("repeat_experts", rank=1, share=0.0)
        again = rig.wait_for_slowness(1, 0.8, 1.12)
    rig.served.patch_policy(mode="propose", cycle_s=3600)
    with capsys.disabled():
        print(
            f"\nseconds of {cost['detail']}, mean error {cost['fit_error']:.0%}; rank 1 computes"
            f" 1.8 times: {slow:.2f} times as slow as the median rank, then {again:.2f}"
        )


def test_serving_goes_on_during_plans(rig, capsys):
    serves_during_plans(rig, range(4), "asynchronous EPLB", capsys)


def test_weights_are_updated_between_plans(rig, checkpoints):
    rig.move_under_traffic(seed=10)
    update_under_traffic(rig, checkpoints, "b")
    rig.check()
    rig.move_under_traffic(seed=11, updated=True)
    rig.check()


def test_weights_are_updated_in_the_middle_of_a_plan(rig, checkpoints):
    first = rig.server.trace()[0][-1]
    rig.server.call("slow_copies", seconds=2.0)
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        traffic.wait_for(6)
        plan_id = rig.move(20)
        rig.wait_until_moving(first)
        times = rig.server.replace_weights(checkpoints["a"])
        traffic.wait_for(12)
    rig.server.call("slow_copies", seconds=0.0)
    check_around_update(rig, traffic, times, "a")
    rig.check()
    assert rig.server.layers_changed(first) == len(first), rig.plan(plan_id)
    rig.move_under_traffic(seed=21, updated=True)
    rig.check()


def test_the_controller_is_killed_in_the_middle_of_a_plan(rig):
    first, epoch = rig.server.trace()[0][-1], rig.served.get()["epoch"]
    rig.server.call("slow_copies", seconds=1.0)
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        traffic.wait_for(6)
        plan_id = rig.move(30)
        rig.wait_until_moving(first)
        rig.served.kill()
        wait_until(
            lambda: rig.server.layers_changed(first) == len(first),
            within_s=60,
            what="vLLM to end the move without a controller",
        )
        traffic.wait_for(12)
        rig.served.start()
        rig.wait_until_committed(plan_id)
    rig.server.call("slow_copies", seconds=0.0)
    rig.reference.check_answers(traffic.answers, rig.weights)
    rig.check()
    assert rig.served.get()["epoch"] == epoch + 1
    rig.move_under_traffic(seed=31)
    rig.check()


def test_a_killed_rank_ends_vllm_which_starts_again_where_it_was(rig, checkpoints, tmp_path):
    """The engine that starts from the exported map has synchronous EPLB."""
    exported = tmp_path / "map.json"
    rig.served.get("/placement")
    rig.served.export(DEPLOYMENT, exported, "neutral")
    was = rig.server.slots().phy2log
    os.kill(rig.server.rank_process(1).pid, signal.SIGKILL)
    wait_until(lambda: not rig.server.running, within_s=60, what="vLLM to end")
    rig.server.stop()

    settings = rank_settings(rig.served, "place", PLACEMENT=str(exported))
    rig.server = VllmServer(
        tmp_path / "engine", checkpoints["a"], TENSOR_PARALLEL, settings, use_async=False
    )
    rig.weights = FRESH
    rig.server.start()
    assert rig.server.slots().phy2log == was
    rig.reference.check_answers([rig.server.answer(0, rig.reference.prompts[0])], FRESH)
    assert len(np.unique(rig.server.trace()[0], axis=0)) == 1, "no step ran with another map"
    rig.check()


def test_synchronous_eplb_carries_plans_out(rig, capsys):
    serves_during_plans(rig, range(40, 44), "synchronous EPLB", capsys)


def test_a_scale_that_vllm_does_not_move_is_found_and_ends_migration(rig):
    """The kernel of rank 1 reads it in one layer; all bytes that vLLM knows arrive."""
    rig.server.call("scale_layer", rank=1, layer=2, factor=1.01)
    with Traffic(rig.server, rig.reference.prompts):  # A plan needs steps.
        plan = rig.wait_until_committed(rig.move(50))

    def trouble():
        rig.server.greedy(rig.reference.prompts[:1])
        return rig.served.get()["ranks"][1]["trouble"]

    said = rig.served.wait(trouble, 60, "the rank to report an expert")
    assert said.startswith("layer 2 expert ") and "of rank 1 does not answer" in said
    row = rig.answered(plan["plan_id"])
    assert row["moved"] - row["same"] == row["different"] > 0


def update_under_traffic(rig, checkpoints, name):
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        traffic.wait_for(6)
        times = rig.server.replace_weights(checkpoints[name])
        traffic.wait_for(12)
    check_around_update(rig, traffic, times, name)


def check_around_update(rig, traffic, times, name):
    """Check that answers before an update have the old weights, and those after it the new."""
    began, ended = times
    before = [answer for answer in traffic.answers if answer.arrivals[-1] < began]
    after = [answer for answer in traffic.answers if answer.began > ended]
    rig.reference.check_answers(before, rig.weights)
    rig.reference.check_answers(after, name)
    rig.reference.check_answers(traffic.answers, rig.weights, name)
    assert before and after
    rig.weights = name


def serves_during_plans(rig, seeds, what, capsys):
    """Carry plans out; print the 99th percentile of the time between tokens, then and before."""
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        began = time.time()
        traffic.wait_for(60)
        before = [(began, time.time())]
        found = [rig.wait_until_committed(rig.move(seed)) for seed in seeds]
    rig.reference.check_answers(traffic.answers, rig.weights)
    rig.check()
    rig.check_answers_of_moved([plan["plan_id"] for plan in found])
    during = [(plan["created_at"], plan["updated_at"]) for plan in found]
    quiet, busy = traffic.gaps(before), traffic.gaps(during)
    assert len(quiet) > 200 and len(busy) > 50
    p99 = [1000 * float(np.quantile(gaps, 0.99)) for gaps in (quiet, busy)]
    with capsys.disabled():
        print(
            f"\n{what}: p99 between tokens {p99[0]:.0f} ms before plans, {p99[1]:.0f} ms during"
            f" {len(during)} plans, ratio {p99[1] / p99[0]:.2f} ({len(quiet)} and {len(busy)}"
            f" tokens); maps equal on both ranks at {rig.check_trace()} steps"
        )
