"""Starts named tasks in one group, and ends them reliably."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

_log = structlog.get_logger(__name__)
_RETRY_S = 0.2
_EXIT_STUCK = 70

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Runs a coroutine in a task with a name; a failure of the task ends the controller."""


class ExitTimer:
    """Ends the process by force when it does not end by itself in time.

    A process that is stuck while it stops must not look alive.

    Args:
        after_s: seconds from `arm` to the forced exit.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._timer: threading.Timer | None = None

    def arm(self) -> None:
        """Start the timer, if it does not run yet."""
        if self._timer is None:
            self._timer = threading.Timer(self._after_s, os._exit, (_EXIT_STUCK,))
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        """Stop the timer: the process ends by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Spawner:
    """Starts tasks in a group. A failed task is a bug of ours: it is logged and ends the group.

    Args:
        tasks: the group.
        failed: called when a task failed.
    """

    def __init__(self, tasks: asyncio.TaskGroup, failed: Callable[[], None] = lambda: None) -> None:
        self._tasks = tasks
        self._failed = failed
        self._ending: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in a task of its own."""
        task = self._tasks.create_task(self._guard(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception:  # It is a bug of ours: the whole group ends, and the error is raised.
            _log.exception("task_failed", task=name)
            self._failed()
            # The group cancels the other tasks once. A task that loses this cancellation would keep
            # the process half alive, serving ranks that it no longer leads.
            if self._ending is None:
                self._ending = asyncio.get_running_loop().create_task(self.end(), name="end-others")
            raise

    async def end(self) -> None:
        """Cancel all running tasks and wait for them."""
        await end_tasks(self._running - {asyncio.current_task()})


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are done.

    A cancellation can get lost: on this Python `asyncio.wait_for` drops one that arrives together
    with its result, and libraries use it. So the cancellation is repeated until the task ends.
    """
    waiting = set(tasks)
    while waiting := {task for task in waiting if not task.done()}:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=_RETRY_S)
