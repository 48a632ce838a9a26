"""Runs a control machine: gives it events one at a time and carries out its actions in order.

The results of actions come back as events. A batch is the list of actions that the machine returns
for one event. All its persist actions finish before its first send action starts. If they fail, the
sends are dropped, the other actions are carried out, and the failures are the machine's next
events.
"""

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol.control_messages import (
    ControlAction,
    LeaseLost,
    PersistAction,
    SendToRank,
)

ResultT = TypeVar("ResultT")


class Machine(Protocol):
    """A state machine without I/O."""

    def handle(self, event: object, now: float) -> Sequence[ControlAction]:
        """Take one event and return its actions; `now` is in monotonic seconds."""
        ...


class Executor(Protocol):
    """Carries out the actions of the machine."""

    async def persist(self, actions: Sequence[PersistAction]) -> Sequence[object]:
        """Store all, in order; never raise. Return events for those not known to be stored."""
        ...

    def perform(self, action: ControlAction) -> None:
        """Carry out or start another action. `Driver.post` takes its result. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the machine whose caller waits until its actions are carried out."""

    ask: Callable[[float], tuple[Any, Sequence[ControlAction]]]
    answer: "asyncio.Future[Any]"
    context: contextvars.Context
    """The caller's context, so that log lines have its trace id."""

    def fail(self, error: Exception) -> None:
        """Raise the error at the caller, unless it has its answer or waits no more."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Driver:
    """The event loop of one machine.

    Args:
        machine: called only by this loop.
        executor: carries out its actions.
        clock: its monotonic time is the machine's `now`.
        tick: the event for passed time.
        tick_s: seconds from the end of a tick to the next.
        after: called after each batch.
    """

    def __init__(
        self,
        machine: Machine,
        executor: Executor,
        clock: Clock,
        *,
        tick: object,
        tick_s: float,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine = machine
        self._executor = executor
        self._clock = clock
        self._tick = tick
        self._tick_s = tick_s
        self._after = after
        self._inbox: deque[tuple[object, Callable[[], None] | None]] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def post(self, event: object, processed: Callable[[], None] | None = None) -> None:
        """Queue an event. Events of one caller keep their order.

        Args:
            event: for the machine.
            processed: called once the event waits no more; at once if the driver has ended.
        """
        if self._ended:
            if processed is not None:
                processed()
            return
        self._inbox.append((event, processed))
        self._wake.set()

    async def call(
        self, ask: Callable[[float], tuple[ResultT, Sequence[ControlAction]]]
    ) -> ResultT:
        """Call the machine between two events and wait until its actions are carried out.

        Args:
            ask: takes `now`, returns the result and the actions. If it raises, there are no
                actions, and the error is raised here.

        Raises:
            Unavailable: the actions are not known to be stored. The machine keeps them and tries
                again, unless the lease is lost (LEASE_LOST).
        """
        if self._ended:
            raise Unavailable("the controller is stopping")
        answer: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self.post(_Call(ask, answer, contextvars.copy_context()))
        return await answer

    async def run(self) -> None:
        """Run until cancelled."""
        tick_at = self._clock.monotonic()
        try:
            while True:
                now = self._clock.monotonic()
                if now >= tick_at:
                    await self._handle(self._tick)
                    # From its end, so that slow ticks leave time for events. Missed ones are not
                    # made up for: they would add nothing.
                    tick_at = self._clock.monotonic() + self._tick_s
                elif self._inbox:
                    event, processed = self._inbox.popleft()
                    if processed is not None:
                        processed()
                    await self._handle(event)
                else:
                    self._wake.clear()
                    # Not wait_for, which loses a cancellation that comes together with an event.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(tick_at - now):
                            await self._wake.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Take no more events and calls, and give back those that wait.

        For who cancels `run`, which may not have begun.
        """
        self._ended = True
        for waiting, processed in self._inbox:
            if processed is not None:
                processed()
            if isinstance(waiting, _Call):
                waiting.fail(Unavailable("the controller is stopping"))
        self._inbox.clear()

    async def _handle(self, event: object) -> None:
        if isinstance(event, _Call):
            try:
                await asyncio.create_task(self._respond(event), name="call", context=event.context)
            finally:
                event.fail(Unavailable("the controller is stopping"))
        else:
            await self._carry_out(self._machine.handle(event, self._clock.monotonic()))

    async def _respond(self, event: _Call) -> None:
        try:
            result, actions = event.ask(self._clock.monotonic())
        except Exception as error:
            event.fail(error)
            return
        failures = await self._carry_out(actions)
        if failures:
            event.fail(_not_stored(failures))
        elif not event.answer.done():
            event.answer.set_result(result)

    async def _carry_out(self, actions: Sequence[ControlAction]) -> Sequence[object]:
        """Carry out one batch. Return the events for persist actions not known to be stored."""
        persists = [action for action in actions if isinstance(action, PersistAction)]
        failures = await self._executor.persist(persists) if persists else ()
        for action in actions:
            if isinstance(action, PersistAction):
                continue
            # Questions go out in any case, so that ranks hear their leader without the store.
            if not (failures and isinstance(action, SendToRank) and action.needs_store):
                self._executor.perform(action)
        self._after()
        for failure in failures:
            await self._carry_out(self._machine.handle(failure, self._clock.monotonic()))
        return failures


def _not_stored(failures: Sequence[object]) -> Unavailable:
    """Return the error for actions that this replica or the next leader may still carry out."""
    if any(isinstance(failure, LeaseLost) for failure in failures):
        return Unavailable(
            "the lease was lost; changes that are not stored yet are not tried again",
            Reason.LEASE_LOST,
        )
    return Unavailable("the store did not take it; it is tried again while this replica leads")
