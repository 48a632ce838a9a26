"""Protocols of the threads of an agent: their clock, and what they wait in."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

T = TypeVar("T")


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

    def lock(self) -> AbstractContextManager[object]:
        """Return a new lock, which one thread holds at a time."""
        ...

    def event(self) -> Event:
        """Return a new event that is not set."""
        ...

    def queue(self) -> Queue[T]:
        """Return a new empty queue."""
        ...
