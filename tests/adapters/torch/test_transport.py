"""The Gloo transport with experts of 8-bit models: 8-bit floats, block scales and a scalar."""

import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.adapters.threads import SystemThreads
from evenkeel_moe.adapters.torch import transport as module
from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.adapters.torch.streams import is_over
from evenkeel_moe.adapters.torch.transport import StageOutcome, TorchWeightTransport
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey, hash_of
from evenkeel_moe.protocol.messages import Prepare
from tests.agent.ranks import CPU, GENERATION, LEADER, Group, run_ranks
from tests.waiting import deadline, wait_until


def expert(number):
    seed = torch.Generator().manual_seed(number)
    return [
        torch.randn(24, 16, generator=seed).to(torch.float8_e4m3fn),
        torch.randn(16, 12, generator=seed).to(torch.float8_e5m2),
        torch.randn(3, 2, generator=seed),
        torch.randn((), generator=seed).to(torch.bfloat16),
    ]


NBYTES = sum(t.numel() * t.element_size() for t in expert(0))
OLD = Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4)


def staged_by_two(new, batches, deadline_s, missing=()):
    """Return (outcome, staged tensors, True if the communicator broke) of both ranks after a wave.

    Args:
        new: the map after the wave, which begins at OLD.
        missing: (rank, local slot) whose tensors the engine does not return.
    """
    prepare = Prepare(
        LEADER,
        WaveKey(GENERATION, PlanId("bytes"), 0, 1),
        Epoch(0),
        Wave(0, (0,), new.phy2log, batches),
        tuple(checksum(expert(t.logical_expert)) for batch in batches for t in batch),
        deadline_s,
    )
    group = Group(2)

    def stage(rank):
        here = [local for local in range(2) if (rank, local) not in missing]
        slots = {local: expert(int(OLD.phy2log[0, rank * 2 + local])) for local in here}
        transport = TorchWeightTransport(
            rank=rank,
            slots_per_rank=2,
            staging_bytes=4 * NBYTES,
            tensors_of=lambda _layer, local: slots[local],
            sample=expert(0),
            connect=lambda serial: group.connect(rank, f"transfer-{serial}", CPU),
            device=CPU,
        )
        transport.rebuild(0)
        outcome = transport.stage(prepare, threading.Event(), lambda done, total: None)
        found = outcome, dict(transport.staged), transport.broken
        transport.abort()
        return found

    return run_ranks(2, stage)


def test_eight_bit_floats_and_scales_arrive_bit_for_bit():
    """Wrong bytes (R4): every tensor of an expert moves, scales included, for any dtype."""
    new = Placement(np.array([[2, 1, 0, 3]], np.int32), 2, 4)
    batch = (Transfer(0, 2, 2, 0, NBYTES), Transfer(0, 0, 0, 2, NBYTES))
    for rank, (outcome, staged, _) in enumerate(staged_by_two(new, (batch,), 20.0)):
        assert outcome.ok, outcome.detail
        want = expert(int(new.phy2log[0, rank * 2]))
        for have, must in zip(staged[0, 0], want, strict=True):
            assert have.dtype == must.dtype
            assert torch.equal(have.view(-1).view(torch.uint8), must.view(-1).view(torch.uint8))


def test_missing_tensors_break_the_communicator_and_leave_nothing_in_flight():
    """Late bytes (R11): data still sent by another rank must not reach the next wave's staging."""
    new = Placement(np.array([[2, 3, 0, 1]], np.int32), 2, 4)
    slots_of = ((2, 2, 0), (0, 0, 2), (3, 3, 1), (1, 1, 3))
    batches = tuple((Transfer(0, logical, src, dst, NBYTES),) for logical, src, dst in slots_of)
    (first, _, first_broken), (second, _, second_broken) = staged_by_two(
        new, batches, 2.0, missing={(0, 1)}
    )
    assert first.reason is Reason.TRANSFER_FAILED
    assert "KeyError(1)" in first.detail
    assert not second.ok
    assert first_broken
    assert second_broken


class Mark:
    """A device event that is over after a number of queries."""

    def __init__(self, looks, fails=False):
        self.looks, self.fails = looks, fails

    def query(self):
        if self.fails:
            raise RuntimeError("unhandled device error")
        self.looks -= 1
        return self.looks <= 0


def test_a_device_is_waited_for_until_the_deadline():
    assert is_over(Mark(3), time.monotonic() + 30)
    assert not is_over(Mark(1 << 30), time.monotonic() + 0.02), (
        "copies that hang must not hang the wave"
    )
    assert is_over(Mark(1), 0.0), "what is done in time is done, however late one looks"
    with pytest.raises(RuntimeError, match="device error"):
        is_over(Mark(1, fails=True), time.monotonic() + 30)


def transport_of(connect):
    """Return a transport of one slot over what `connect` returns."""
    return TorchWeightTransport(
        rank=0,
        slots_per_rank=1,
        staging_bytes=NBYTES,
        tensors_of=lambda _layer, _local: expert(0),
        sample=expert(0),
        connect=connect,
        device=CPU,
    )


def rebuilt(transport):
    """Rebuild on a thread; return the thread, and the list that gets its error."""
    errors = []

    def rebuild():
        try:
            transport.rebuild(1)
        except Unavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=rebuild, daemon=True)
    thread.start()
    return thread, errors


def test_a_wait_for_a_rank_that_never_comes_can_be_aborted():
    """A hang of the transfer thread (R10): the group may have agreed on another communicator."""
    group, asked = Group(2, timeout_s=deadline(40)), threading.Event()

    def connect(serial):
        asked.set()
        return group.connect(0, f"transfer-{serial}")

    transport = transport_of(connect)
    thread, errors = rebuilt(transport)
    assert asked.wait(deadline(10))
    transport.abort()
    thread.join(deadline(10))
    assert not thread.is_alive()
    assert errors == ["transfer communicator 1: connecting was aborted"]
    assert transport.broken


def test_a_communicator_that_connects_after_the_abort_is_aborted_too():
    group, asked, go = Group(1), threading.Event(), threading.Event()
    made = []

    def connect(serial):
        asked.set()
        assert go.wait(deadline(20))
        made.append(group.connect(0, f"transfer-{serial}"))
        return made[0]

    transport = transport_of(connect)
    thread, errors = rebuilt(transport)
    assert asked.wait(deadline(10))
    transport.abort()
    thread.join(deadline(10))
    assert len(errors) == 1
    go.set()
    wait_until(lambda: made and made[0]._backend is None)
    assert transport.broken
    go.set()
    made.clear()
    transport.rebuild(2)
    assert not transport.broken, "the next attempt is not affected"
    transport.abort()


class Interrupted:
    """A lock; `before` runs once, before the lock is taken."""

    def __init__(self, lock):
        self.lock, self.before = lock, lambda: None

    def __enter__(self):
        before, self.before = self.before, lambda: None
        before()
        self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.__exit__(*error)


def test_an_abort_that_comes_as_the_connection_is_made_is_not_lost():
    """R10: the group may have agreed on another communicator meanwhile."""
    group, made = Group(1), []

    def connect(serial):
        made.append(group.connect(0, f"transfer-{serial}"))
        transport._lock.before = transport.abort if serial == 1 else lambda: None
        return made[-1]

    transport: Any = transport_of(connect)
    transport._lock = Interrupted(transport._lock)
    with pytest.raises(Unavailable, match="transfer communicator 1 was aborted at once") as caught:
        transport.rebuild(1)
    assert caught.value.reason is Reason.TRANSFER_FAILED
    assert transport.broken and made[0]._backend is None
    transport.rebuild(2)
    transport.rebuild(3)
    assert not transport.broken
    assert [communicator._backend is None for communicator in made] == [True, True, False]
    transport.abort()


# --- The deadlines, the pace and the order of a wave's operations, on a clock that they move ------


PER_RANK = 256
KEY = WaveKey(GENERATION, PlanId("times"), 0, 1)
"""Tag of the first chunk of each batch."""
EXPERT = (torch.zeros(8, dtype=torch.uint8),)
CHECKSUM = checksum(EXPERT)


@dataclass
class Backend(SystemThreads):
    """A Gloo backend, the clock, and the event that cancels a wave.

    Args:
        takes: seconds that each operation takes, in the order in which they are waited for.
        failing: the operations of these numbers fail after that.
        now: seconds since an arbitrary start.
    """

    takes: Any = field(default_factory=lambda: itertools.repeat(0.0))
    failing: tuple[int, ...] = ()
    now: float = 100.0
    events: list[tuple[Any, ...]] = field(default_factory=list)
    ended: int = 0

    def monotonic(self):
        return self.now

    def wait(self, timeout):
        self.events.append(("pause", timeout))
        self.now += timeout

    def progress(self, done, total):
        self.events.append(("progress", done, total))

    def allgather(self, gathered, sent):
        return Operation(self, None, over=True)

    def send(self, tensors, peer, tag):
        return self._start("send", peer, tag)

    def recv(self, tensors, peer, tag):
        return self._start("recv", peer, tag)

    def _start(self, what, peer, tag):
        self.events.append((what, peer, tag))
        return Operation(self, tag)

    def abort(self):
        self.events.append(("abort",))


@dataclass
class Operation:
    backend: Backend
    tag: int | None
    over: bool = False

    def wait(self, timeout=None):
        if self.tag is None:
            return
        assert not self.over, "Gloo would wait until the timeout for another operation to end"
        backend = self.backend
        backend.events.append(("wait", self.tag, timeout.total_seconds()))
        number, backend.ended = backend.ended, backend.ended + 1
        backend.now += next(backend.takes)
        if number in backend.failing:
            raise RuntimeError("no route to the peer")
        self.over = True


def copy(source, target, nbytes=1, *, slot=0):
    """Return a transfer from one rank to another."""
    return Transfer(0, 0, source * PER_RANK + slot, target * PER_RANK + slot, nbytes)


def transport_over(backend):
    """Return rank 0's transport, connected over a backend."""
    communicator = Communicator(backend, 0, 1, CPU)
    transport = TorchWeightTransport(
        rank=0,
        slots_per_rank=PER_RANK,
        staging_bytes=3 * EXPERT[0].nbytes,
        tensors_of=lambda _layer, _local: EXPERT,
        sample=EXPERT,
        connect=lambda _serial: communicator,
        device=CPU,
        threads=backend,
    )
    transport.rebuild(0)
    return transport


def tags_of(*batches):
    """Return the tag of each batch's first chunk: it names the wave and its transfers."""
    first = hash_of(f"{KEY.fingerprint} {batches}")
    return [(first + 4096 * batch) % 2**31 for batch in range(len(batches))]


def stage(backend, *batches, transport=None, **changes):
    """Stage a wave on rank 0 with a deadline of 10 s for each batch."""
    count = sum(map(len, batches))
    values = {"checksums": (CHECKSUM,) * count, "batch_deadline_s": 10.0, **changes}
    wave = Wave(0, (0,), np.zeros((1, 4 * PER_RANK), np.int32), batches)
    transport = transport_over(backend) if transport is None else transport
    return transport.stage(
        Prepare(LEADER, KEY, Epoch(0), wave, **values), backend, backend.progress
    )


def test_a_throttle_gives_each_batch_the_time_of_its_busiest_rank():
    """Its deadline allows for ranks that are still in the pause after the batch before."""
    backend = Backend(takes=iter([1.0, 0.5, 0.25, 9.0]))
    batches = (
        (copy(1, 0, 3),),
        (copy(2, 3, 5),),
        (copy(2, 3, 7), copy(1, 0, 2, slot=1), copy(0, 1, 4)),
        (),
        (copy(1, 0, 1, slot=2),),
    )
    assert stage(backend, *batches, max_bytes_per_s=1.0) == StageOutcome()
    tags = tags_of(*batches)
    assert backend.events == [
        ("recv", 1, tags[0]),
        ("wait", tags[0], 10.0),
        ("progress", 3, 6),
        ("pause", 2.0),
        ("progress", 3, 6),
        ("pause", 5.0),
        ("recv", 1, tags[2]),
        ("send", 1, tags[2]),
        ("wait", tags[2], 15.0),
        ("wait", tags[2], 14.5),
        ("progress", 5, 6),
        ("pause", 6.25),
        ("progress", 5, 6),
        ("pause", 0.0),
        ("recv", 1, tags[4]),
        ("wait", tags[4], 10.0),
        ("progress", 6, 6),
        ("pause", 0.0),
    ]


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 4), ("meta", 1)])
def test_batches_are_posted_ahead_on_the_host_and_end_in_their_order(device, ahead):
    """Both ranks of a pair name each chunk of 32 operations by the same tag.

    "meta" stands for a device: its stream runs one batch after the other anyway.
    """
    backend, sends = Backend(), 50
    batches = [tuple(copy(0, 1, slot=slot) for slot in range(sends)) for _ in range(6)]
    transport, tags = transport_over(backend), tags_of(*batches)
    transport._device = torch.device(device)
    assert stage(backend, *batches, transport=transport).ok
    posted = [event[2] for event in backend.events if event[0] == "send"]
    waited = [event[1] for event in backend.events if event[0] == "wait"]
    chunks = [[tag] * 32 + [tag + 1] * 18 for tag in tags]
    assert waited == list(itertools.chain(*chunks))
    assert sorted(posted) == sorted(waited)
    first = next(at for at, event in enumerate(backend.events) if event[0] == "wait")
    assert posted[:first] == [tag for tag in tags[:ahead] for _ in range(32)]
    assert {event[1] for event in backend.events if event[0] == "pause"} == {0.0}
    assert {event[2] for event in backend.events if event[0] == "wait"} == {10.0}


PAIR = (copy(0, 1), copy(0, 1, slot=1))
LATE = 10.0 - 0.001
"""A wait that ends a millisecond early has passed its deadline."""


@pytest.mark.parametrize(
    ("takes", "failing", "reason", "waits"),
    [
        ([9.5, 0.5], [], None, [10.0, 0.5]),
        ([10.0, 0.0], [], Reason.TRANSFER_TIMEOUT, [10.0, 5.0]),
        ([1.0, 1.0, 0.0], [1], Reason.TRANSFER_FAILED, [10.0, 9.0, 5.0]),
        ([np.nextafter(LATE, 0), 0.0, 0.0], [0, 1], Reason.TRANSFER_FAILED, [10.0, 5.0, 5.0]),
        ([LATE, 0.0, 0.0], [0], Reason.TRANSFER_TIMEOUT, [10.0, 5.0, 5.0]),
    ],
)
def test_a_batch_that_fails_is_late_at_its_deadline_and_what_has_ended_is_not_waited_for(
    takes, failing, reason, waits
):
    backend = Backend(takes=iter(takes), failing=tuple(failing), now=0.0)
    transport = transport_over(backend)
    outcome = stage(backend, PAIR, transport=transport)
    assert outcome.reason is reason
    assert [event[2] for event in backend.events if event[0] == "wait"] == waits
    assert (("abort",) in backend.events) == transport.broken == (reason is not None)
    if failing:
        assert outcome.detail == "batch 0: no route to the peer"
    elif reason is not None:
        assert outcome.detail == "batch 0: past its deadline"


def test_when_staging_fails_every_operation_in_flight_is_waited_for():
    """R7: the rank calls itself drained, so no late byte may reach the staging memory after that.

    On the host batches are posted ahead, so the operations of several batches are in flight.
    """
    backend = Backend(failing=(0,))
    batches = (copy(1, 0),), (copy(1, 0, slot=1),)
    assert stage(backend, *batches).reason is Reason.TRANSFER_FAILED
    first, second = tags_of(*batches)
    waited = [event[1] for event in backend.events if event[0] == "wait"]
    assert waited == [first, first, second], "also for the one that failed, which may go on writing"


def test_without_a_connection_no_batch_begins():
    backend = Backend()
    transport = transport_over(backend)
    transport.abort()
    outcome = stage(backend, PAIR, transport=transport)
    told = "a batch could not begin: the communicator is down"
    assert outcome == StageOutcome(Reason.TRANSFER_FAILED, told)


class Endless:
    """Stands for an event of a GPU whose work hangs."""

    def record(self, stream):
        """Mark the work queued so far."""

    def query(self):
        return False


def test_copies_that_hang_on_a_device_end_the_wave_at_its_deadline(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Endless)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    backend = Backend(now=0.0)
    transport = transport_over(backend)
    transport._device = torch.device("cuda")
    outcome = stage(backend, PAIR, transport=transport)
    assert outcome.reason is Reason.TRANSFER_TIMEOUT and transport.broken
    assert outcome.detail == "batch 0: past its deadline on the device"


def test_copies_are_ordered_after_what_the_engine_had_queued_at_the_last_fence(monkeypatch):
    """R11: they read the slots that the engine's stream has written."""
    marks, orders = itertools.count(), []
    monkeypatch.setattr(module, "mark_queued", lambda device: next(marks))
    backend = Backend()
    transport = transport_over(backend)

    @contextmanager
    def after(mark):
        orders.append((mark, "begins"))
        yield
        orders.append((mark, "ended"))

    monkeypatch.setattr(transport._stream, "after", after)
    assert stage(backend, PAIR, transport=transport).ok
    transport.fence()
    assert stage(backend, PAIR, transport=transport).ok
    assert orders == [(mark, when) for mark in range(2) for when in ("begins", "ended")]
