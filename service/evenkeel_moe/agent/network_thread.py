"""The agent's network thread: an event loop that runs the link and the reporter.

An error in either must never end the engine.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from evenkeel_moe.adapters.grpc.rank_link import LinkListener
from evenkeel_moe.agent.ports import ClockReader, RankLink
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.agent.reporter import Reporter
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.protocol.messages import ControllerMessage, RankIdentity
from evenkeel_moe.wire.link import (
    DeviceClock,
    FlowControl,
    FromRankLink,
    NotLeader,
    RankFact,
    Registration,
    ReportAck,
    ToRankLink,
)

_log = structlog.get_logger(__name__)
_RESTART_AFTER_S = 5.0
_LAST_MESSAGE_S = 1.0
"""Longest wait for the controller to take the last message."""


_CLOCK_EVERY_S = 5.0
_CLOCK_CHANGE = 0.02
"""Change of the ratio that is told: smaller ones are the ripple of the driver's own control."""


class NetworkThread:
    """Owns the event loop. Other threads only call `send` and `tell`."""

    def __init__(
        self,
        link: RankLink,
        recorder: Recorder,
        identity: RankIdentity,
        side: CountingSide,
        clock: ClockReader | None = None,
    ) -> None:
        self._link = link
        self._clock = clock
        self.reporter = Reporter(recorder, identity, side, link)
        self._facts: dict[type, RankFact] = {}
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._listener: LinkListener | None = None

    def start(self, listener: LinkListener) -> None:
        """Open the stream and keep it open."""
        self._listener = listener
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="evenkeel-link", daemon=True
        )
        self._thread.start()

    def send(self, message: FromRankLink, stream: int | None) -> None:
        """Queue a message from any thread; it is dropped unless its stream is the open one."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent is shutting down
            self._loop.call_soon_threadsafe(self._link.send, message, stream)

    def tell(self, fact: RankFact) -> None:
        """Send a fact now, and again on each new stream; a newer one of its type replaces it."""
        self._facts[type(fact)] = fact
        self.send(fact, None)

    def take_telemetry(self, stream: int, message: ToRankLink) -> ControllerMessage | None:
        """Handle a message about reports; return every other message to the caller."""
        match message:
            case Registration():
                self._registered(stream, message)
            case ReportAck(highest_step=highest_step):
                self.reporter.acknowledged(highest_step)
            case FlowControl():
                self.reporter.paced(message)
            case NotLeader():
                pass  # the link itself follows the redirect
            case _:
                return message
        return None

    def close(self, *, planned: bool = False, timeout_s: float = 5.0) -> None:
        """End the loop and its thread.

        Args:
            planned: tell the controller first that the rank stops as planned.
            timeout_s: longest wait for the thread.
        """
        if self._thread is None:
            self._loop.close()
            return
        if planned and self._listener is not None and self._thread.is_alive():
            with contextlib.suppress(Exception):  # the rank ends, whether the controller hears it
                last = replace(self._listener.heartbeat(), stopping=True)
                sending = asyncio.run_coroutine_threadsafe(self._link.finish(last), self._loop)
                sending.result(_LAST_MESSAGE_S)
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _registered(self, stream: int, answer: Registration) -> None:
        self.reporter.registered(answer.flow, answer.highest_step)
        for fact in list(self._facts.values()):
            self.send(fact, stream)
        if answer.reason is not None:
            _log.warning(
                "registered", outcome=answer.outcome, reason=answer.reason, detail=answer.detail
            )

    async def _keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task for ever, and start it again after an error."""
        while True:
            try:
                await work()
            except Exception:  # The rank serves on whatever fails here; telemetry starts again.
                _log.exception(f"{name}_failed")
            await asyncio.sleep(_RESTART_AFTER_S)

    def _run(self, listener: LinkListener) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        works = {"link": lambda: self._link.run(listener), "reporter": self.reporter.run}
        if self._clock is not None:
            reader = self._clock
            works["clock"] = lambda: watch_clock(reader, self.tell)
        tasks = [
            loop.create_task(self._keep_running(name, work), name=name)
            for name, work in works.items()
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
    """Log the end of a task that should run for ever; the engine continues."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("agent_task_ended", task=task.get_name(), exc_info=error)


async def watch_clock(
    reader: ClockReader, tell: Callable[[DeviceClock], None], every_s: float = _CLOCK_EVERY_S
) -> None:
    """Read the clock every few seconds, and tell it at first and whenever it has changed."""
    told: DeviceClock | None = None
    while True:
        clock = await asyncio.to_thread(reader.read)
        if clock is not None and (
            told is None
            or abs(clock.ratio - told.ratio) >= _CLOCK_CHANGE
            or clock.limited_by != told.limited_by
        ):
            tell(clock)
            told = clock
        await asyncio.sleep(every_s)
