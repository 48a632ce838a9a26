"""TP=2 with expert parallelism under the controller's plans; the tests run in this order."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.integration.whole import DEPLOYMENT, plans
from tests.vllm.rig import FRESH, rank_settings, started
from tests.vllm.server import TENSOR_PARALLEL, Traffic, VllmServer
from tests.waiting import deadline, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory, checkpoints, reference):
    folder = tmp_path_factory.mktemp("place")
    with started(folder, checkpoints["a"], reference, TENSOR_PARALLEL, "place") as found:
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


def test_serving_goes_on_during_plans(rig, capsys):
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        began = time.time()
        traffic.wait_for(60)
        before = [(began, time.time())]
        found = [rig.wait_until_committed(rig.move(seed)) for seed in range(4)]
    rig.reference.check_answers(traffic.answers, rig.weights)
    rig.check()
    during = [(plan["created_at"], plan["updated_at"]) for plan in found]
    report("asynchronous EPLB", traffic, before, during, rig.check_trace(), capsys)


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
    export(rig, exported)
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
    with Traffic(rig.server, rig.reference.prompts) as traffic:
        began = time.time()
        traffic.wait_for(60)
        before = [(began, time.time())]
        found = [rig.wait_until_committed(rig.move(seed)) for seed in range(40, 44)]
    rig.reference.check_answers(traffic.answers, rig.weights)
    rig.check()
    during = [(plan["created_at"], plan["updated_at"]) for plan in found]
    report("synchronous EPLB", traffic, before, during, rig.check_trace(), capsys)


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


def export(rig, path):
    """Run `evenkeel placement export` as an operator does."""
    where = [
        "--address",
        str(rig.served.http.base_url),
        "--token-file",
        rig.served.folder / "tokens",
    ]
    command = [
        sys.executable,
        "-m",
        "evenkeel_moe",
        "placement",
        "export",
        "-d",
        DEPLOYMENT,
        "--out",
        path,
    ]
    rig.served.get("/placement")
    done = subprocess.run(
        [*command, "-f", "neutral", *where],
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr


def report(what, traffic, before, during, steps, capsys):
    """Print the 99th percentile of the time between tokens, during plans and before."""
    quiet, busy = traffic.gaps(before), traffic.gaps(during)
    assert len(quiet) > 200 and len(busy) > 50
    p99 = [1000 * float(np.quantile(gaps, 0.99)) for gaps in (quiet, busy)]
    with capsys.disabled():
        print(
            f"\n{what}: p99 between tokens {p99[0]:.0f} ms before plans, {p99[1]:.0f} ms during"
            f" {len(during)} plans, ratio {p99[1] / p99[0]:.2f} ({len(quiet)} and {len(busy)}"
            f" tokens); maps equal on both ranks at {steps} steps"
        )
