"""The deadlines, the pace and the order of a wave's operations, on a clock that they move."""

import itertools
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
from evenkeel_moe.adapters.torch.transport import StageOutcome, TorchWeightTransport
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey, hash_of
from evenkeel_moe.protocol.messages import Prepare
from tests.agent.ranks import CPU, GENERATION, LEADER

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
