"""Runs the planner in other processes, so that a long plan never blocks the event loop."""

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, TypeVarTuple

import structlog

from evenkeel_moe.adapters.processes.child_process import die_with_parent
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.planning.policies.registry import warm_kernels

_log = structlog.get_logger(__name__)
_WARM_WITHIN_S = 900.0
"""Compiling all kernels takes half a minute on an idle core, and the cores may be busy."""
_REQUEST_WAITS_S = 15.0
"""Clients and proxies often give a request 30 s, and the plan itself takes a part of them."""
_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


class DeadlineMissed(Unavailable):
    """A call exceeded its deadline."""

    default_reason = Reason.PLANNER_FAILED


class PlannerPool:
    """A few planner processes with compiled kernels.

    Args:
        workers: number of processes.
        deadline_s: after this time a call is abandoned and the processes are replaced.
    """

    def __init__(self, workers: int, *, deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._pool: ProcessPoolExecutor | None = None
        self._warming: asyncio.Task[None] | None = None
        self._background: PlannerPool | None = None
        self.fault = ""
        """The error of the last call; empty if it succeeded."""
        self._free = asyncio.Semaphore(workers)

    @property
    def background(self) -> "PlannerPool":
        """A pool of one more process, for work that must neither delay nor break a cycle.

        The process starts when it is first used.
        """
        if self._background is None:
            self._background = type(self)(1, deadline_s=self._deadline_s)
        return self._background

    def begin(self) -> bool:
        """Start the processes if none run; return True if a call would not wait for kernels.

        For callers with a deadline of their own: compiling may take minutes on a busy machine.
        """
        _, warming = self._begin()
        return warming.done()

    async def warm_up(self) -> None:
        """Start the processes and compile or load all kernels; a failure is logged.

        Later calls try again.
        """
        with contextlib.suppress(Unavailable):
            await self._ready()

    async def wait_until_warm(self, within_s: float = _REQUEST_WAITS_S) -> None:
        """Wait for the kernels on behalf of a request, whose caller waits too.

        Raises:
            Unavailable: the kernels are still being compiled (PLANNER_STARTING).
        """
        _, warming = self._begin()
        done, _ = await asyncio.wait({warming}, timeout=within_s)
        if not done:
            raise Unavailable(
                "the planner process is starting and compiles its kernels, for some minutes on a"
                " busy machine",
                Reason.PLANNER_STARTING,
            )

    async def run(self, function: Callable[[*_Arguments], _T], *arguments: *_Arguments) -> _T:
        """Call the function in another process and return its value.

        Function and arguments must be picklable. The deadline begins when the kernels are compiled,
        so that an early call is not charged for them. Errors of the function are raised here.

        Raises:
            DeadlineMissed: the deadline passed.
            Unavailable: the process died, or was replaced after the fault of another call
                (PLANNER_FAILED).
        """
        loop = asyncio.get_running_loop()
        async with self._free:
            executor = await self._ready()
            try:
                try:
                    future = loop.run_in_executor(executor, function, *arguments)
                except BrokenProcessPool:  # a process died while idle
                    self._replace(executor, "a planner process died")
                    executor = await self._ready()
                    future = loop.run_in_executor(executor, function, *arguments)
                async with asyncio.timeout(self._deadline_s):
                    value = await future
            except TimeoutError:
                fault = f"no plan within {self._deadline_s:g} s"
                self._replace(executor, fault)
                raise DeadlineMissed(f"planner: {fault}") from None
            except BrokenProcessPool:
                fault = "a planner process died"
                if not self._replace(executor, fault):
                    fault = "its processes were replaced after another call failed"
                raise Unavailable(f"planner: {fault}", Reason.PLANNER_FAILED) from None
            self.fault = ""
            return value

    async def _ready(self) -> ProcessPoolExecutor:
        """Return the processes once their kernels are compiled.

        Raises:
            Unavailable: the processes do not start, or were ended meanwhile.
        """
        executor, warming = self._begin()
        # Not awaited itself: other calls may wait for it too, and its end by `close` is not theirs.
        await asyncio.wait({warming})
        if self._pool is not executor:
            fault = self.fault or "its processes were ended"
            raise Unavailable(f"planner: {fault}", Reason.PLANNER_FAILED)
        return executor

    def _begin(self) -> tuple[ProcessPoolExecutor, asyncio.Task[None]]:
        if self._pool is None or self._warming is None:
            self._pool = self._start()
            self._warming = asyncio.create_task(self._warm(self._pool), name="planner-warm-up")
        return self._pool, self._warming

    async def _warm(self, executor: ProcessPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WARM_WITHIN_S):
                await asyncio.gather(
                    *(loop.run_in_executor(executor, warm_kernels) for _ in range(self._workers))
                )
        except (TimeoutError, BrokenProcessPool) as error:
            self._warming = None  # this is the current task, which must not cancel itself
            self._replace(executor, f"planner processes do not start: {type(error).__name__}")
            _log.error("planner_does_not_start", error=str(error))
        except Exception as error:  # a policy that does not compile breaks only its own cycles
            self.fault = f"{type(error).__name__}: {error}"
            _log.error("planner_kernels_do_not_compile", error=str(error))
        else:
            _log.info("planner_ready", workers=self._workers)

    def close(self) -> None:
        """End all processes, including the background one, even in the middle of a plan."""
        if self._background is not None:
            self._background.close()
        self._end()

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        warming, self._warming = self._warming, None
        if warming is not None and not warming.done() and not warming.get_loop().is_closed():
            warming.cancel()
        if pool is None:
            return
        processes = list((pool._processes or {}).values())
        for process in processes:
            with contextlib.suppress(ProcessLookupError, ValueError):
                process.kill()
        pool.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers,
            # Forking a process with gRPC threads would copy locks that nobody releases.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
        )

    def _replace(self, executor: ProcessPoolExecutor, fault: str) -> bool:
        """End failed processes; the next call starts new ones. Return False if they had ended."""
        if self._pool is not executor:
            return False
        self.fault = fault
        self._end()
        return True


def _begin_worker() -> None:
    """Ignore Ctrl-C, which only the controller handles, and end together with the controller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with_parent(parent.pid)
