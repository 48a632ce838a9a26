"""Protocols of the threads of an agent: their clock, and what they wait in."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lock(Protocol):
    """A lock that one thread holds at a time."""

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Event(Protocol):
    """A flag that threads wait for, as `threading.Event`."""

    def set(self) -> None:
        """Set the flag and end all waits."""
        ...

    def clear(self) -> None:
        """Take the flag back."""
        ...

    def is_set(self) -> bool:
        """Return True if the flag is set."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most `timeout` seconds; return True if it is set."""
        ...


class Queue(Protocol[T]):
    """A queue without a limit, as `queue.SimpleQueue`."""

    def put(self, item: T) -> None:
        """Append an item; never blocks."""
        ...

    def get(self) -> T:
        """Wait for the first item and remove it."""
        ...

    def qsize(self) -> int:
        """Return the number of items."""
        ...


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""
        ...


class Threads(Protocol):
    """Starts threads, makes what they wait in, and reads their clock."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        ...

    def start(self, run: Callable[[], None], name: str) -> Thread:
        """Run `run` on a new thread, which does not keep the process alive."""
        ...

    def lock(self) -> Lock:
        """Return a new lock that no thread holds."""
        ...

    def event(self) -> Event:
        """Return a new event that is not set."""
        ...

    def queue(self) -> Queue[T]:
        """Return a new empty queue."""
        ...
