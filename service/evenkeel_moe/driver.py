"""Runs one machine: events in, one at a time; its actions out, in order; every result back as an event.

A batch is what the machine returns for one event. Its persists finish before its first send starts; if
they fail its sends are not carried out, all else is, and the machine hears of it before anything else.
"""

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.ports import Clock
from evenkeel_moe.protocol.control_messages import LeaseLost

__all__ = ["Driver", "Hands", "Machine", "Stage"]

ActionT = TypeVar("ActionT")
ActionT_co = TypeVar("ActionT_co", covariant=True)
ActionT_contra = TypeVar("ActionT_contra", contravariant=True)
ResultT = TypeVar("ResultT")


class Stage(Enum):
    """When in a batch an action's turn is."""

    PERSIST = auto()
    """First, and all of them together."""
    SEND = auto()
    """Only if every persist of the batch is known to be stored."""
    OTHER = auto()
    """In any case."""


class Machine(Protocol[ActionT_co]):
    """A sans-IO machine."""

    def handle(self, event: object, now: float) -> Sequence[ActionT_co]:
        """Take one event; `now` is monotonic seconds."""
        ...


class Hands(Protocol[ActionT_contra]):
    """What carries a machine's actions out."""

    def stage(self, action: ActionT_contra) -> Stage:
        """The action's turn."""
        ...

    async def persist(self, actions: Sequence[ActionT_contra]) -> Sequence[object]:
        """Store all of them, in order; the events to tell of those not known to be stored. Never raises."""
        ...

    def perform(self, action: ActionT_contra) -> None:
        """Carry one other action out, or start it; its result comes back by `Driver.post`. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Call(Generic[ActionT]):
    """Something asked of the machine by a caller who waits until what it leads to is carried out."""

    ask: Callable[[float], tuple[Any, Sequence[ActionT]]]
    answer: "asyncio.Future[Any]"
    context: contextvars.Context
    """The caller's: log lines on the way say whose request they are about."""


class Driver(Generic[ActionT]):
    """The loop around one machine.

    Args:
        machine: only this loop calls it.
        hands: see `Hands`.
        clock: its monotonic time is the machine's `now`.
        tick: the event that says time passed.
        tick_s: between two of them.
        after: called when a batch was carried out, for what follows the machine's state.
    """

    def __init__(
        self,
        machine: Machine[ActionT],
        hands: Hands[ActionT],
        clock: Clock,
        *,
        tick: object,
        tick_s: float,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine = machine
        self._hands = hands
        self._clock = clock
        self._tick = tick
        self._tick_s = tick_s
        self._after = after
        self._inbox: deque[object] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def post(self, event: object) -> None:
        """Give the machine an event; those of one poster keep their order."""
        self._inbox.append(event)
        self._wake.set()

    async def call(self, ask: Callable[[float], tuple[ResultT, Sequence[ActionT]]]) -> ResultT:
        """Ask the machine something between two events, and wait until its actions are carried out.

        Args:
            ask: given `now`, returns its answer and the actions that go with it; what it raises is raised
                here and has led to no action.

        Raises:
            Unavailable: the actions are not known to be stored. The machine keeps them and tries again, unless the
                lease is lost (LEASE_LOST).
        """
        if self._ended:
            raise Unavailable("the controller is stopping")
        answer: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self.post(_Call(ask, answer, contextvars.copy_context()))
        return await answer

    async def run(self) -> None:
        """Drive until cancelled."""
        tick_at = self._clock.monotonic()
        try:
            while True:
                now = self._clock.monotonic()
                if now >= tick_at:
                    # Late ticks are not made up for: they would only say the same again.
                    tick_at = max(tick_at + self._tick_s, now)
                    await self._handle(self._tick)
                elif self._inbox:
                    await self._handle(self._inbox.popleft())
                else:
                    self._wake.clear()
                    # Not wait_for: it forgets a cancellation that comes together with an event.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(tick_at - now):
                            await self._wake.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        for waiting in self._inbox:
            if isinstance(waiting, _Call) and not waiting.answer.done():
                waiting.answer.set_exception(Unavailable("the controller is stopping"))
        self._inbox.clear()

    async def _handle(self, event: object) -> None:
        if isinstance(event, _Call):
            await asyncio.create_task(self._respond(event), name="call", context=event.context)
        else:
            await self._carry_out(self._machine.handle(event, self._clock.monotonic()))

    async def _respond(self, event: _Call[ActionT]) -> None:
        try:
            result, actions = event.ask(self._clock.monotonic())
        except Exception as error:
            if not event.answer.done():
                event.answer.set_exception(error)
            return
        try:
            failures = await self._carry_out(actions)
        except BaseException:
            event.answer.cancel()
            raise
        if event.answer.done():
            return
        if failures:
            event.answer.set_exception(_not_stored(failures))
        else:
            event.answer.set_result(result)

    async def _carry_out(self, actions: Sequence[ActionT]) -> Sequence[object]:
        """One batch; the events that told the machine of persists not known to be stored."""
        turns = [(self._hands.stage(action), action) for action in actions]
        persists = [action for turn, action in turns if turn is Stage.PERSIST]
        failures = await self._hands.persist(persists) if persists else ()
        for turn, action in turns:
            if turn is Stage.OTHER or (turn is Stage.SEND and not failures):
                self._hands.perform(action)
        self._after()
        for failure in failures:
            await self._carry_out(self._machine.handle(failure, self._clock.monotonic()))
        return failures


def _not_stored(failures: Sequence[object]) -> Unavailable:
    """What a caller is told of actions that may yet be carried out, by this replica or the next leader."""
    if any(isinstance(failure, LeaseLost) for failure in failures):
        return Unavailable(
            "the lease was lost: what the store has not taken of it is not tried again",
            Reason.LEASE_LOST,
        )
    return Unavailable("the store did not take it; it is tried again while this replica leads")
