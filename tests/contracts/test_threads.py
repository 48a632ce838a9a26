"""The contract of threads."""

from collections.abc import Callable
from typing import Any

import pytest

from evenkeel_moe.adapters.threads import SystemThreads
from tests.sim.threads import SimThreads
from tests.sim.world import World
from tests.waiting import deadline


class OfTheSystem:
    """Runs a test on the threads of the operating system."""

    threads = SystemThreads()

    def run(self, main: Callable[[], None]) -> None:
        main()


class Simulated:
    """Runs a test on the simulation's threads, in virtual time."""

    def __init__(self) -> None:
        self.world = World(1)
        self.threads = SimThreads(self.world)

    def run(self, main: Callable[[], None]) -> None:
        thread = self.threads.start(main, "main")
        self.world.run_until(1000.0)
        assert thread.dead, "the test hangs"


@pytest.fixture(params=[OfTheSystem, Simulated])
def system(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_a_queue_gives_its_items_to_a_waiting_thread_in_their_order(system):
    threads, heard = system.threads, []
    jobs, over = threads.queue(), threads.event()

    def work():
        while (item := jobs.get()) is not None:
            heard.append(item)
        over.set()

    def main():
        thread = threads.start(work, "worker")
        for item in (1, 2, None):
            jobs.put(item)
        assert over.wait(deadline(20))
        thread.join(deadline(20))
        assert heard == [1, 2] and jobs.qsize() == 0
        jobs.put(3)
        assert jobs.qsize() == 1

    system.run(main)


def test_a_wait_for_an_event_ends_when_it_is_set_or_after_its_time(system):
    threads = system.threads
    event = threads.event()

    def main():
        began = threads.monotonic()
        assert not event.wait(0.05)
        assert 0.04 < threads.monotonic() - began < deadline(5)
        assert not event.wait(0.0)
        threads.start(event.set, "setter")
        assert event.wait() and event.is_set() and event.wait(0.0)
        event.clear()
        assert not event.is_set() and not event.wait(0.0)

    system.run(main)


def test_one_thread_at_a_time_holds_a_lock(system):
    threads = system.threads
    lock, inside, entered, leave = (threads.lock(), [], threads.event(), threads.event())
    done = threads.event()

    def holder():
        with lock:
            entered.set()
            leave.wait()
            inside.append("holder")

    def second():
        with lock:
            inside.append("second")
        done.set()

    def main():
        threads.start(holder, "holder")
        entered.wait()
        threads.start(second, "second")
        assert not done.wait(0.05)
        leave.set()
        assert done.wait(deadline(20))
        assert inside == ["holder", "second"]
        with pytest.raises(KeyError), lock:
            raise KeyError
        with lock:
            inside.append("again")

    system.run(main)


def test_a_join_returns_after_its_time_or_at_the_end_of_the_thread(system):
    threads = system.threads
    leave = threads.event()

    def main():
        thread = threads.start(leave.wait, "waiter")
        began = threads.monotonic()
        thread.join(0.05)
        assert threads.monotonic() - began >= 0.04
        leave.set()
        thread.join()
        assert threads.monotonic() - began < deadline(20)

    system.run(main)
