"""Tasks end when they are cancelled, even if they miss the first cancellation."""

import asyncio
import subprocess
import sys

import pytest

from evenkeel_moe.controller.tasks import Spawner, end_tasks
from tests.waiting import deadline


async def hard_of_hearing(lost):
    """Miss two cancellations and note each."""
    while len(lost) < 3:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.append(1)
            if len(lost) == 3:
                raise


async def test_a_lost_cancellation_is_repeated():
    lost: list[int] = []
    task = asyncio.create_task(hard_of_hearing(lost))
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task]), 10)
    assert task.cancelled()
    assert len(lost) == 3


async def test_a_failure_ends_the_group_and_the_rest_is_ended_on_request():
    told: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            spawner = Spawner(group, failed=lambda: told.append("failed"))

            async def fail():
                raise ZeroDivisionError

            spawner.spawn(fail(), "fail")
            await asyncio.Event().wait()
    assert caught.group_contains(ZeroDivisionError)
    assert told == ["failed"]
    async with asyncio.TaskGroup() as group:
        spawner = Spawner(group)

        async def wait():
            await asyncio.Event().wait()

        tasks = [spawner.spawn(wait(), f"wait-{n}") for n in range(3)]
        await asyncio.sleep(0)
        await spawner.end()
    assert all(task.cancelled() for task in tasks)


def test_a_process_that_cannot_end_is_ended():
    stuck = """
import threading
from evenkeel_moe.controller.tasks import ExitTimer
ExitTimer(0.2).arm()
threading.Event().wait(60)
"""
    saved = stuck.replace(
        "ExitTimer(0.2).arm()", "r = ExitTimer(0.2); r.arm(); r.disarm()"
    ).replace("60", "1")
    assert subprocess.run([sys.executable, "-c", stuck], timeout=deadline(60)).returncode == 70
    assert subprocess.run([sys.executable, "-c", saved], timeout=deadline(60)).returncode == 0


async def test_a_failure_ends_a_neighbour_that_misses_its_first_cancellation():
    """The group cancels once, and `asyncio.wait_for` may drop that: the process would live on."""
    lost: list[int] = []

    async def fail():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def serve():
        async with asyncio.TaskGroup() as group:
            spawner = Spawner(group)
            spawner.spawn(hard_of_hearing(lost), "deaf")
            spawner.spawn(fail(), "fail")
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(serve(), 10)
    assert caught.group_contains(ZeroDivisionError)
    assert len(lost) == 3
