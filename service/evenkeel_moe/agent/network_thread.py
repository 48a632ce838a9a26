"""The agent's network thread: an event loop that runs the link and the reporter, and dies alone."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from evenkeel_moe.agent.ports import LinkListener, RankLink
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.agent.reporter import Reporter
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import FromRankLink

__all__ = ["NetworkThread"]

_log = structlog.get_logger(__name__)
_AFTER_MISTAKE_S = 5.0


class NetworkThread:
    """Owns the event loop; other threads only `send`."""

    def __init__(
        self, link: RankLink, recorder: Recorder, identity: RankIdentity, side: CountingSide
    ) -> None:
        self._link = link
        self.reporter = Reporter(recorder, identity, side, link)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def start(self, listener: LinkListener) -> None:
        """Open the stream and keep it open."""
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="evenkeel-link", daemon=True
        )
        self._thread.start()

    def send(self, message: FromRankLink, stream: int | None) -> None:
        """Queue a message from any thread; dropped unless its stream is the open one."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are leaving
            self._loop.call_soon_threadsafe(self._link.send, message, stream)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the loop and its thread."""
        if self._thread is None:
            self._loop.close()
            return
        with contextlib.suppress(RuntimeError):  # it ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    async def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A mistake of ours costs what is in hand, not all that follows."""
        while True:
            try:
                await work()
            except Exception:
                _log.exception(f"{name}_failed")
            await asyncio.sleep(_AFTER_MISTAKE_S)

    def _run(self, listener: LinkListener) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        tasks = [
            loop.create_task(self._keep("link", lambda: self._link.run(listener)), name="link"),
            loop.create_task(self._keep("reporter", self.reporter.run), name="reporter"),
        ]
        for task in tasks:
            task.add_done_callback(_log_end)
        try:
            loop.run_forever()
        finally:
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()


def _log_end(task: asyncio.Task[None]) -> None:
    """An eternal task that ends is an error, and never one the engine should die of."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("agent_task_ended", task=task.get_name(), exc_info=error)
