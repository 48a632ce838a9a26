"""The threads of the operating system."""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from evenkeel_moe.ports.threads import Event, Queue, Thread

T = TypeVar("T")


class SystemThreads:
    """Implements `ports.threads.Threads`."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        return time.monotonic()

    def start(self, run: Callable[[], None], name: str) -> Thread:
        """Run `run` on a new daemon thread."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def lock(self) -> threading.Lock:
        """Return a new lock that no thread holds."""
        return threading.Lock()

    def event(self) -> Event:
        """Return a new event that is not set."""
        return threading.Event()

    def queue(self) -> Queue[T]:
        """Return a new empty queue."""
        return queue.SimpleQueue()


SYSTEM_THREADS = SystemThreads()
