"""The queue of the transfer thread while a peer does not answer."""

import threading
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Commit,
    QueryState,
    StagingFinished,
    Vote,
)
from tests.agent.fleet import Fleet
from tests.agent.ranks import LEADER, ToyMaps, ToyWeights, prepare_for, two_rank_placements
from tests.contracts.memory_transport import Fabric, MemoryTransport
from tests.waiting import deadline, wait_until

OLD, NEW = two_rank_placements()
ALONE = Placement(np.array([[0, 1]], np.int32), 1, 2)
SWAPPED = Placement(np.array([[1, 0]], np.int32), 1, 2)


class Stuck(ToyWeights):
    """`reserve` waits for the test, like a transfer whose peer is silent."""

    def __init__(self, placement, rank):
        super().__init__(placement, rank)
        self.began, self.go_on = threading.Event(), threading.Event()

    def reserve(self, slots):
        self.began.set()
        assert self.go_on.wait(deadline(30))
        return super().reserve(slots)


def test_whatever_a_controller_asks_meanwhile_a_stuck_wave_has_one_job_waiting():
    """That job ends the wave. Every other wave is refused at once, and nothing else is queued."""
    stuck = Stuck(OLD, 0)
    with Fleet(OLD, weights=[stuck, ToyWeights(OLD, 1)]) as fleet:
        held, jobs = prepare_for(OLD, NEW), fleet.agents[0]._worker._jobs
        fleet.say(held, ranks=[0])
        assert stuck.began.wait(deadline(20))
        for number in range(200):
            other = prepare_for(OLD, NEW, plan=f"plan-{number}")
            for message in (
                held,
                Abort(LEADER, held.wave),
                other,
                Commit(LEADER, other.wave),
                Abort(LEADER, other.wave),
                QueryState(LEADER, query=number),
            ):
                fleet.say(message, ranks=[0])
        assert jobs.qsize() == 1
        assert not fleet.links[0].expect(Vote, where=lambda vote: vote.wave == other.wave).yes
        fleet.say(held, ranks=[1])
        fleet.say(Abort(LEADER, held.wave), ranks=[1])
        stuck.go_on.set()
        for link in fleet.links:
            link.expect(
                AbortAnswer, where=lambda answer: answer.wave == held.wave and answer.drained
            )


class SlowToConnect:
    """A transport whose first rebuild waits for the test, and then fails."""

    serial, broken = 0, True

    def __init__(self):
        self.tried: list[int] = []
        self.began, self.go_on = threading.Event(), threading.Event()

    def rebuild(self, serial):
        self.serial = serial
        self.tried.append(serial)
        if serial == 1:
            self.began.set()
            assert self.go_on.wait(deadline(30))
            raise OSError("the others did not come")
        self.broken = False

    def abort(self):
        """Nothing is in flight."""


class Requests:
    def __init__(self):
        self.serials: list[int] = []

    def request_rebuild(self, serial):
        self.serials.append(serial)


def test_communicators_that_the_group_has_given_up_are_not_waited_for():
    """R10: a rank that tried each in turn would be late for all, and the queue would grow."""
    transport: Any = SlowToConnect()
    requests: Any = Requests()
    worker = StagingWorker(0, transport, ToyWeights(OLD, 0), ToyMaps(OLD), requests)
    worker.start()
    try:
        worker.rebuild(1)
        assert transport.began.wait(deadline(20))
        for serial in range(2, 100):
            worker.rebuild(serial)
        done = threading.Event()
        worker.later(done.set)
        transport.go_on.set()
        assert done.wait(deadline(20))
        assert transport.tried == [1, 99] and requests.serials == [1]
    finally:
        worker.close()


class Heard:
    """The events of a worker."""

    def __init__(self):
        self.events: list[Any] = []

    def feed(self, event):
        self.events.append(event)

    def progress(self, wave, done, total):
        """Not of interest here."""


def test_a_swap_takes_only_what_its_own_wave_has_staged():
    """R11: the bytes of another wave, though verified, are those of other slots."""
    staged, other = prepare_for(ALONE, SWAPPED, plan="staged"), prepare_for(ALONE, SWAPPED)
    weights = ToyWeights(ALONE, 0)
    transport = MemoryTransport(Fabric(1), 0, 2, weights.tensors)
    transport.rebuild(0)
    maps, events = ToyMaps(ALONE), Heard()
    worker = StagingWorker(0, transport, weights, maps, events)  # type: ignore[arg-type]
    worker.start()
    try:
        worker.stage(staged, ALONE, SWAPPED)
        wait_until(lambda: events.events == [StagingFinished(staged.wave)])
        with pytest.raises(RuntimeError, match="is not staged here"):
            worker.swap(other.wave)
        assert weights.holds(ALONE) and maps.epoch == 0
        worker.swap(staged.wave)
        assert weights.holds(SWAPPED) and maps.epoch == 1
        with pytest.raises(RuntimeError, match="is not staged here"):
            worker.swap(staged.wave)
    finally:
        worker.close()
