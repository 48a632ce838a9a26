"""Planner processes: answers, errors, deadlines, and processes that die."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.errors import InfeasiblePlan, Reason, Unavailable
from tests.forked.controller import ForkedPlanner
from tests.waiting import deadline, until

pytestmark = pytest.mark.integration


def double(value):
    return 2 * value


def refuse(value):
    raise InfeasiblePlan(f"{value} does not fit", Reason.POOL_EXCEEDED)


def die(value):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(value):
    threading.Event().wait(60)


def whoami(value):
    return os.getpid()


@pytest.fixture(params=[ForkedPlanner])
def pool(request):
    """A planner; its processes are forked, because a new one takes seconds to load."""
    pool = request.param(1, deadline_s=30)
    yield pool
    pool.close()
    pool.close()


@pytest.mark.parametrize("pool", [PlannerPool], indirect=True)
async def test_answers_and_errors_come_back_as_they_are(pool):
    assert await pool.run(double, 21) == 42
    with pytest.raises(InfeasiblePlan, match="7 does not fit") as caught:
        await pool.run(refuse, 7)
    assert caught.value.reason is Reason.POOL_EXCEEDED
    assert pool.fault == ""


async def test_a_failing_background_process_leaves_the_planner_alone(pool):
    planner, background = await pool.run(whoami, 0), await pool.background.run(whoami, 0)
    assert planner != background
    with pytest.raises(Unavailable, match="died"):
        await pool.background.run(die, 0)
    assert pool.fault == ""
    assert await pool.run(whoami, 0) == planner
    background = await pool.background.run(whoami, 0)
    pool.close()
    psutil.wait_procs([p for p in map(_process, (planner, background)) if p], timeout=deadline(10))
    assert not psutil.pid_exists(planner)
    assert not psutil.pid_exists(background)


def _process(pid):
    return psutil.Process(pid) if psutil.pid_exists(pid) else None


async def test_a_process_that_dies_is_replaced(pool):
    with pytest.raises(Unavailable, match="died") as caught:
        await pool.run(die, 0)
    assert caught.value.reason is Reason.PLANNER_FAILED
    assert "died" in pool.fault
    assert await pool.run(double, 4) == 8
    assert pool.fault == ""


@pytest.mark.parametrize("background", [False, True])
async def test_a_process_that_dies_while_idle_is_replaced_before_anybody_asks(pool, background):
    asked = pool.background if background else pool
    pid = await asked.run(whoami, 0)
    os.kill(pid, signal.SIGKILL)
    # The executor notices the death in its own thread; an earlier call fails and is not repeated.
    await until(lambda: asked._pool._broken, within_s=30)
    assert await asked.run(whoami, 0) != pid
    assert asked.fault == ""


async def test_the_deadline_begins_when_the_kernels_are_loaded():
    """Loading takes seconds: with a deadline from the start no first plan was ever made."""
    pool = PlannerPool(1, deadline_s=deadline(0.5))
    assert await pool.run(double, 3) == 6
    assert pool.begin()
    pool.close()


async def test_a_caller_with_its_own_deadline_can_ask_whether_the_kernels_are_loaded():
    pool = PlannerPool(1, deadline_s=30)
    assert not pool.begin()
    with pytest.raises(Unavailable, match="compiles its kernels") as caught:
        await pool.wait_until_warm(0.01)
    assert caught.value.reason is Reason.PLANNER_STARTING
    await pool.wait_until_warm(deadline(60))
    assert pool.begin()
    pool.close()
    assert not pool.begin(), "a replaced process loads them again"
    pool.close()


async def test_a_call_that_waits_for_the_kernels_is_told_that_the_pool_was_closed():
    pool = PlannerPool(1, deadline_s=30)
    call = asyncio.create_task(pool.run(double, 3))
    await until(lambda: pool._warming is not None)
    pool.close()
    with pytest.raises(Unavailable, match="its processes were ended") as caught:
        await asyncio.wait_for(call, deadline(30))
    assert caught.value.reason is Reason.PLANNER_FAILED


async def test_a_plan_that_takes_too_long_is_given_up_with_its_process():
    pool = ForkedPlanner(1, deadline_s=30)
    worker = await pool.run(whoami, 0)
    pool._deadline_s = 0.1
    with pytest.raises(Unavailable, match="no plan within 0.1 s"):
        await pool.run(hang, 0)
    assert not psutil.pid_exists(worker)
    pool.close()


async def test_a_call_whose_process_was_replaced_for_another_call_says_so():
    pool = ForkedPlanner(2, deadline_s=0.5)
    await pool.warm_up()
    late = asyncio.create_task(pool.run(hang, 0))
    await asyncio.sleep(0.1)
    pool._deadline_s = 30
    other = asyncio.create_task(pool.run(hang, 0))
    with pytest.raises(Unavailable, match="no plan within"):
        await late
    with pytest.raises(Unavailable, match="replaced after another call failed") as caught:
        await other
    assert caught.value.reason is Reason.PLANNER_FAILED
    assert "no plan within" in pool.fault
    pool.close()


def test_a_worker_whose_parent_died_before_it_asked_to_die_with_it_ends():
    """A controller that was killed while its planner loaded left the process behind for ever."""
    orphan = (
        "import os, sys, time\n"
        "from evenkeel_moe.adapters.processes.child_process import die_with_parent\n"
        "parent = int(sys.argv[1])\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "print('orphaned', flush=True)\n"
        "die_with_parent(parent)\n"
        "print('lives on', flush=True)\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {orphan!r}, str(os.getpid())])\n"
        "print('started', flush=True)\n"
    )
    # The pipe closes only when the orphan has ended too.
    done = subprocess.run(
        [sys.executable, "-c", parent],
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["started", "orphaned"]
    assert "lives on" not in done.stdout
