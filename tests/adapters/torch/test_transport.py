"""The Gloo transport with experts of 8-bit models: 8-bit floats, block scales and a scalar."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.adapters.torch.streams import is_over
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
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


class LateBackend:
    """A backend whose receives fail at their deadline, and go on writing until waited for again."""

    def __init__(self):
        self.receives: list[LateReceive] = []

    def allgather(self, gathered, sent):
        return LateReceive(None)

    def recv(self, tensors, peer, tag):
        self.receives.append(LateReceive(tensors[0]))
        return self.receives[-1]

    def abort(self):
        for receive in self.receives:
            receive.aborted = True


class LateReceive:
    def __init__(self, tensor):
        self.tensor, self.aborted, self.over = tensor, False, tensor is None

    def wait(self, timeout=None):
        if self.tensor is None:
            return True
        self.over = self.aborted
        raise RuntimeError("timed out")


def test_when_staging_fails_every_operation_in_flight_is_waited_for():
    """R7: the rank calls itself drained, so no late byte may reach the staging memory after that.

    On the host batches are posted ahead, so the operations of several batches are in flight.
    """
    backend = LateBackend()
    communicator = Communicator(backend, 0, 1, CPU)
    transport = TorchWeightTransport(
        rank=0,
        slots_per_rank=2,
        staging_bytes=4 * NBYTES,
        tensors_of=lambda _layer, local: expert(local),
        sample=expert(0),
        connect=lambda _serial: communicator,
        device=CPU,
    )
    transport.rebuild(0)
    batches = tuple(
        (Transfer(0, expert_, expert_, slot, NBYTES),) for expert_, slot in ((2, 0), (3, 1))
    )
    prepare = Prepare(
        LEADER,
        WaveKey(GENERATION, PlanId("late"), 0, 1),
        Epoch(0),
        Wave(0, (0,), np.array([[2, 3, 2, 3]], np.int32), batches),
        (0, 0),
        60.0,
    )
    outcome = transport.stage(prepare, threading.Event(), lambda done, total: None)
    assert outcome.reason is Reason.TRANSFER_FAILED and transport.broken
    assert len(backend.receives) == 2 * len(expert(0))
    assert all(receive.over for receive in backend.receives)
