"""Controllers, forked, and their planners."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from typing import Any

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from tests.forked.server import CONTEXT, Output, end_with_parent
from tests.waiting import until

_LINE_BYTES = 1 << 24
_MAIN = (
    "from evenkeel_moe.controller import run;"
    " from evenkeel_moe.settings_sources import load_settings;"
    " run(load_settings())"
)


async def start_new(environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start `serve` with these environment variables, and nothing loaded."""
    return await asyncio.create_subprocess_exec(
        *dying_with_parent([sys.executable, "-c", _MAIN]),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_BYTES,
    )


async def start_forked(environment: Mapping[str, str]) -> "ForkedController":
    """Start `serve` with these environment variables, forked from a process that loaded it."""
    read, write = os.pipe()
    reader = asyncio.StreamReader(_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0)
    )
    process = CONTEXT.Process(target=_serve, args=(dict(environment), Output(write)))
    try:
        # In a thread, because the first start waits until the fork server has loaded everything.
        await asyncio.to_thread(process.start)
    finally:
        os.close(write)
    return ForkedController(process, reader)


class ForkedController:
    """A forked process with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, process: Any, output: asyncio.StreamReader) -> None:
        self._process = process
        self.pid: int = process.pid
        self.stdout = output

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await until(lambda: self.returncode is not None, within_s=60.0, every_s=0.01)
        assert self.returncode is not None
        return self.returncode


def _serve(environment: dict[str, str], output: Output) -> None:
    output.use()
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    # This process was forked by the server, which runs already.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # type: ignore[attr-defined]
    from evenkeel_moe.controller.process import serve
    from evenkeel_moe.settings_sources import load_settings

    vars(serve)["PlannerPool"] = ForkedPlanner
    serve.run(load_settings())


class ForkedPlanner(PlannerPool):
    """A planner whose processes are forked, too."""

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers, mp_context=CONTEXT, initializer=_begin_forked_worker
        )


def _begin_forked_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
