"""The threads of one simulated process: greenlets, of which one at a time runs, in virtual time.

A thread runs until it waits. The world's heap then decides what goes on, so a seed decides the
order of all threads. Only events of the world resume a thread; a thread resumes no other directly.
"""

from collections import deque

import greenlet

PREEMPTED = 0.1
"""Probability that a thread is held up just before it takes a lock."""
HELD_UP_S = 0.004
"""The longest time of that."""


class SimThread(greenlet.greenlet):  # type: ignore[misc]
    """One thread."""

    def __init__(self, threads: "SimThreads", run, name: str) -> None:
        super().__init__(run)
        self.threads = threads
        self.name = name
        self.waits = 0
        """The waits so far: a wake-up of an earlier one comes too late."""
        self.joining: list = []

    def wake(self, wait: int, result: bool) -> None:
        """End a wait; an event of the world."""
        threads, world = self.threads, self.threads.world
        if threads.ended or self.dead or wait != self.waits:
            return
        if world.now < threads.paused_until:
            world.after(threads.paused_until - world.now, self.wake, wait, result)
            return
        self.waits += 1
        self.parent = greenlet.getcurrent()
        self.switch(result) if self else self.switch()
        if self.dead:
            threads.forget(self)
        if world.checks.found is not None:  # the agent may have caught it
            raise world.checks.found

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""
        if not self.dead:
            self.threads.wait(self.joining, timeout)


class SimLock:
    """A lock, handed over in the order in which threads asked for it."""

    def __init__(self, threads: "SimThreads") -> None:
        self._threads = threads
        self._waiting: deque = deque()
        self.owner: greenlet.greenlet | None = None

    def __enter__(self) -> "SimLock":
        threads, me = self._threads, greenlet.getcurrent()
        assert self.owner is not me, "a thread waits for itself"
        random = threads.world.rng.random
        if random() < PREEMPTED:
            threads.sleep(HELD_UP_S * random())
        if self.owner is None:
            self.owner = me
        else:
            self._waiting.append(me)
            threads.wait(None, None)
        return self

    def __exit__(self, *_: object) -> None:
        self.owner = self._waiting.popleft() if self._waiting else None
        if self.owner is not None:
            self._threads.notify(self.owner)

    @property
    def mine(self) -> bool:
        """Return True if the running thread holds it."""
        return self.owner is greenlet.getcurrent()


class SimEvent:
    """A flag that threads wait for."""

    def __init__(self, threads: "SimThreads") -> None:
        self._threads = threads
        self._set = False
        self._waiting: list = []

    def set(self) -> None:
        self._set = True
        self._threads.notify_all(self._waiting)

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and timeout != 0.0:
            self._threads.wait(self._waiting, timeout)
        return self._set


class SimQueue:
    """A queue without a limit."""

    def __init__(self, threads: "SimThreads") -> None:
        self._threads = threads
        self._items: deque = deque()
        self._waiting: list = []

    def put(self, item) -> None:
        self._items.append(item)
        self._threads.notify_all(self._waiting)

    def get(self):
        while not self._items:
            self._threads.wait(self._waiting, None)
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class SimThreads:
    """All threads of one process; implements `ports.threads.Threads`."""

    def __init__(self, world) -> None:
        self.world = world
        self.ended = False
        self.paused_until = 0.0
        self._threads: dict[SimThread, None] = {}

    def monotonic(self) -> float:
        return self.world.now

    def start(self, run, name: str) -> SimThread:
        thread = SimThread(self, run, name)
        self._threads[thread] = None
        self.world.after(0.0, thread.wake, 0, True)
        return thread

    def lock(self) -> SimLock:
        return SimLock(self)

    def event(self) -> SimEvent:
        return SimEvent(self)

    def queue(self) -> SimQueue:
        return SimQueue(self)

    # --- waits ------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let the running thread wait so long."""
        self.wait(None, seconds)

    def wait(self, waiting: list | None, timeout: float | None) -> bool:
        """Let the running thread wait until it is notified (True) or the time has passed (False).

        Args:
            waiting: gets the thread; `notify_all` notifies those in it.
            timeout: seconds; None waits for ever.
        """
        me = greenlet.getcurrent()
        assert isinstance(me, SimThread), "only a thread of the simulation may wait"
        if timeout is not None:
            self.world.after(timeout, me.wake, me.waits, False)
        if waiting is not None:
            waiting.append((me, me.waits))
        assert me.parent is not None
        return bool(me.parent.switch())

    def notify(self, thread: SimThread) -> None:
        """End the present wait of a thread."""
        self.world.after(0.0, thread.wake, thread.waits, True)

    def notify_all(self, waiting: list) -> None:
        """End the waits in a list, and empty it."""
        for thread, wait in waiting:
            self.world.after(0.0, thread.wake, wait, True)
        waiting.clear()

    # --- the process ------------------------------------------------------------------------------

    def forget(self, thread: SimThread) -> None:
        """Note that a thread has ended."""
        del self._threads[thread]
        self.notify_all(thread.joining)

    def pause(self, seconds: float) -> None:
        """Stop the process for so long."""
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    def end(self) -> None:
        """End the process: no thread of it runs any more."""
        self.ended = True
        self.world.after(0.0, self.unwind)

    def unwind(self) -> None:
        """Free the stacks of a process that has ended."""
        for thread in list(self._threads):
            thread.parent = greenlet.getcurrent()
            thread.throw(greenlet.GreenletExit)
        self._threads.clear()
