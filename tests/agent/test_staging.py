"""The queue of the transfer thread while a peer does not answer."""

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.adapters.threads import SYSTEM_THREADS, SystemThreads
from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.transport import StageOutcome, TorchWeightTransport
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.agent.staging_progress import StagingReports
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Commit,
    QueryState,
    StagingFinished,
    TransportDrained,
    Vote,
)
from tests.agent.fleet import Fleet
from tests.agent.ranks import (
    CPU,
    EXPERT_BYTES,
    GENERATION,
    LEADER,
    Group,
    ToyMaps,
    ToyWeights,
    prepare_for,
    two_rank_placements,
)
from tests.waiting import deadline, wait_until

OLD, NEW = two_rank_placements()
ALONE = Placement(np.array([[0, 1]], np.int32), 1, 2)
SWAPPED = Placement(np.array([[1, 0]], np.int32), 1, 2)
OPEN = Placement(np.array([[0, 1, -1]], np.int32), 1, 2)
FILLED = Placement(np.array([[0, 1, 0]], np.int32), 1, 2)


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


class Heard:
    """The events of a worker."""

    def __init__(self):
        self.events: list[Any] = []
        self.heard: list[Any] = []

    def feed(self, event):
        self.events.append(event)

    def request_rebuild(self, serial):
        self.events.append(serial)

    def progress(self, wave, done, total):
        self.heard.append((wave, done, total))


class Noting(TorchWeightTransport):
    """Notes fences and aborts, with what the slots hold."""

    def __init__(self, rank, weights, ranks=1, per_rank=2):
        self.weights, self.noted, self.made = weights, [], False
        group = Group(ranks)
        super().__init__(
            rank=rank,
            slots_per_rank=per_rank,
            staging_bytes=4 * EXPERT_BYTES,
            tensors_of=weights.tensors,
            sample=weights.tensors(0, 0),
            connect=lambda serial: group.connect(rank, f"transfer-{serial}"),
            device=CPU,
        )
        if ranks == 1:
            self.rebuild(0)
        self.noted.clear()
        self.made = True

    def fence(self):
        super().fence()
        if self.made:
            self.noted.append(("fence", self.weights.holds(SWAPPED)))

    def stage(self, prepare, cancel, progress):
        outcome = super().stage(prepare, cancel, progress)
        self.noted.append(("staged", outcome.ok))
        return outcome

    def abort(self):
        super().abort()
        self.noted.append(("abort", True))


@contextlib.contextmanager
def working(made=Noting, old=ALONE, rank=0, threads=SYSTEM_THREADS):
    """Yield a worker of a rank, its transport and its events."""
    weights, events = ToyWeights(old, rank), Heard()
    transport = made(rank, weights, old.num_ranks, old.slots_per_rank)
    worker = StagingWorker(rank, transport, weights, ToyMaps(old), events, threads)  # type: ignore[arg-type]
    try:
        yield worker, transport, events
    finally:
        worker.close(deadline(20))
        thread: Any = worker._thread
        assert not thread.is_alive()


SLOW = prepare_for(ALONE, SWAPPED, max_bytes_per_s=1e-3)


def test_a_wave_that_is_cancelled_ends_without_its_throttle_and_leaves_nothing():
    """R7: its bytes can be swapped by no later order, and its memory serves the next wave."""
    with working() as (worker, transport, events):
        for wave in (SLOW, prepare_for(ALONE, SWAPPED, plan="next", max_bytes_per_s=1e-3)):
            worker.stage(wave, ALONE, SWAPPED)
            wait_until(lambda: events.heard)
            worker.cancel(wave.wave)
            wait_until(lambda: TransportDrained(wave.wave) in events.events)  # noqa: B023
            assert transport.staged == {} and worker._cancels == {}
            with pytest.raises(RuntimeError, match="is not staged here"):
                worker.swap(wave.wave)
            events.heard.clear()


def test_a_swap_takes_only_what_its_own_wave_has_staged():
    """R11: the bytes of another wave, though verified, are those of other slots."""
    staged, other = prepare_for(ALONE, SWAPPED, plan="staged"), prepare_for(ALONE, SWAPPED)
    with working() as (worker, transport, events):
        weights, maps = transport.weights, worker._maps
        worker.stage(staged, ALONE, SWAPPED)
        wait_until(lambda: events.events == [StagingFinished(staged.wave)])
        with pytest.raises(RuntimeError, match="is not staged here"):
            worker.swap(other.wave)
        assert weights.holds(ALONE) and maps.epoch == 0
        worker.swap(staged.wave)
        assert weights.holds(SWAPPED) and maps.epoch == 1
        with pytest.raises(RuntimeError, match="is not staged here"):
            worker.swap(staged.wave)


def test_the_next_wave_is_ordered_after_the_copies_of_a_swap():
    with working() as (worker, transport, events):
        wave = prepare_for(ALONE, SWAPPED)
        worker.stage(wave, ALONE, SWAPPED)
        wait_until(lambda: events.events)
        worker.swap(wave.wave)
        assert transport.noted == [("staged", True), ("fence", True)]
        assert worker._cancels == {}


class PatientThread(threading.Thread):
    """A thread that is joined until it has ended, however busy the machine is."""

    def join(self, timeout=None):
        if timeout is None or timeout > 0:
            super().join(deadline(20))


class PatientThreads(SystemThreads):
    def start(self, run, name):
        thread = PatientThread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def test_a_worker_that_closes_lets_a_wave_end_before_it_aborts():
    """The peers wait for their halves; the throttle does not hold the wave up."""
    with working(threads=PatientThreads()) as (worker, transport, events):
        worker.stage(SLOW, ALONE, SWAPPED)
        wait_until(lambda: events.heard)
    assert transport.noted == [("staged", True), ("abort", True)]


class Deaf(Noting):
    """A transport whose wave ends some time after an abort, and at nothing else."""

    def stage(self, prepare, cancel, progress):
        wait_until(lambda: self.broken, within_s=60)
        threading.Event().wait(0.1)
        self.noted.append(("ended", True))
        return StageOutcome(Reason.TRANSFER_FAILED, "aborted")


def test_a_worker_that_closes_aborts_what_does_not_end_and_waits_for_it():
    with working(Deaf) as (worker, transport, events):
        worker.stage(SLOW, ALONE, SWAPPED)
    assert transport.noted == [("abort", True), ("ended", True)]


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_reserves_its_own_slots_only(rank):
    empty = Placement(np.array([[0, 1, 2, -1]], np.int32), 2, 3)
    filled = Placement(np.array([[0, 1, 2, 2]], np.int32), 2, 3)
    with working(old=empty, rank=rank) as (worker, transport, events):
        worker.stage(prepare_for(empty, filled), empty, filled)
        wait_until(lambda: events.events)
        assert transport.weights.reserved == ([(0, 1)] if rank == 1 else [])


def test_what_a_failed_wave_reserved_is_released_at_once():
    """R7: nothing of it is left, whenever its Abort comes."""
    with working(old=OPEN) as (worker, transport, events):
        weights = transport.weights
        assert not transport.staged
        worker.stage(prepare_for(OPEN, FILLED, checksums=(1,)), OPEN, FILLED)
        assert worker.wait_until_idle(deadline(20))
        [failed] = events.events
        assert failed.reason is Reason.CHECKSUM_MISMATCH
        assert weights.released == weights.reserved and len(weights.released) == 1
        assert transport.staged == {}


def test_what_a_staged_wave_reserved_is_released_when_the_worker_closes():
    """The slots may go to an agent of another group."""
    with working(old=OPEN) as (worker, transport, _):
        weights = transport.weights
        right = (checksum(weights.tensors(0, 0)),)
        worker.stage(prepare_for(OPEN, FILLED, checksums=right), OPEN, FILLED)
        assert worker.wait_until_idle(deadline(20))
        assert len(weights.reserved) == 1 and not weights.released
        assert worker.close(deadline(20))
        assert weights.released == weights.reserved


def test_a_new_communicator_ends_the_wave_on_the_old_one():
    """R10: the group agreed to give it up, so no operation on it can still succeed."""
    with working(Deaf) as (worker, transport, events):
        worker.stage(SLOW, ALONE, SWAPPED)
        assert not worker.wait_until_idle(0.01)
        worker.rebuild(1)
        assert worker.wait_until_idle(deadline(20))
        request, failed = events.events
        assert request == 0 and failed.wave == SLOW.wave
        assert transport.serial == 1 and not transport.broken


def test_a_wave_on_a_broken_communicator_is_drained_once_there_is_a_new_one():
    with working() as (worker, transport, events):
        wave = prepare_for(ALONE, SWAPPED)
        worker.stage(wave, ALONE, SWAPPED)
        assert worker.wait_until_idle(deadline(20))
        transport.abort()
        worker.cancel(wave.wave)
        assert worker.wait_until_idle(deadline(20))
        assert events.events == [StagingFinished(wave.wave), 0]
        worker.rebuild(1)
        assert worker.wait_until_idle(deadline(20))
        assert events.events[2:] == [TransportDrained(wave.wave)]


class Connecting(Noting):
    """Notes what it connects; `before` is called first, and may raise."""

    def rebuild(self, serial):
        self.noted.append(("connect", serial))
        self.before(serial)
        super().rebuild(serial)

    def before(self, serial):
        """Nothing, unless the test sets it."""


@pytest.mark.parametrize(
    "case", ["ordered twice", "failed", "ordered as another one begins", "given up"]
)
def test_a_communicator_is_connected_until_the_group_has_the_newest(case):
    """R10: a rank that takes an older one for the newest would wait for the others for ever.

    One that tried each in turn would be late for all, and its queue would grow.
    """
    ready = threading.Event()
    newer = {"ordered as another one begins": [2], "given up": range(2, 99)}

    def before(serial):
        if len([what for what, _ in transport.noted if what == "connect"]) > 1:
            return
        for ordered in newer.get(case, []):
            worker.rebuild(ordered)
        if case in ("failed", "given up"):
            transport.serial = serial
            raise OSError("too many open files")

    with working(Connecting) as (worker, transport, events):
        transport.before = before
        worker.later(lambda: wait_until(ready.is_set))
        worker.rebuild(1)
        if case == "ordered twice":
            worker.rebuild(1)
        ready.set()
        assert worker.wait_until_idle(deadline(20))
        assert events.events == ([1] if case in ("failed", "given up") else [])
        if case == "failed":
            worker.rebuild(1)
        assert worker.wait_until_idle(deadline(20))
        connected = [serial for what, serial in transport.noted if what == "connect"]
        newest = {"ordered twice": [], "failed": [1], "given up": [98]}.get(case, [2])
        assert connected == [1, *newest]
        assert transport.serial == connected[-1] and not transport.broken


# --- staging progress -----------------------------------------------------------------------------


ONE, TWO = (WaveKey(GENERATION, PlanId("plan"), index, 1) for index in range(2))


def test_the_first_and_the_last_progress_of_each_wave_are_passed_on_and_some_between():
    times, heard, also = iter([0.0, 0.125, 0.2, 0.3, 0.375, 0.375, 0.5, 0.6, 0.7]), [], []
    reports = StagingReports(
        lambda: next(times), lambda *one: heard.append(one), None, lambda *one: also.append(one)
    )
    for done in (1, 2, 3, 4, 9):
        reports.report(ONE, done, 9)
    for done in (1, 2, 3, 9):
        reports.report(TWO, done, 9)
    assert heard == [
        *((ONE, done, 9) for done in (1, 3, 9)),
        *((TWO, done, 9) for done in (1, 3, 9)),
    ]
    assert also == heard


def test_the_same_progress_is_passed_on_once_however_many_batches_follow():
    """A rank that receives nothing would otherwise send one message for each batch of the wave."""
    heard = []
    reports = StagingReports(lambda: 0.0, lambda *one: heard.append(one))
    for wave in (ONE, TWO):
        for _ in range(3):
            reports.report(wave, 0, 0)
    assert heard == [(ONE, 0, 0), (TWO, 0, 0)]
