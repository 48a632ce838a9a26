"""The contract of weight transports.

It is checked for the transport over real Gloo sockets, and over the simulation's threads and
network.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.adapters.threads import SYSTEM_THREADS
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from tests.agent.ranks import (
    CPU,
    EXPERT_BYTES,
    Group,
    ToyWeights,
    expert_tensors,
    prepare_for,
    run_ranks,
    two_rank_placements,
)
from tests.sim.fabric import Fabric
from tests.sim.run import FleetWorld
from tests.sim.threads import SimThreads
from tests.waiting import deadline


def ignore(done, total):
    return None


class Gloo:
    threads: Any = SYSTEM_THREADS
    run = staticmethod(run_ranks)

    def __init__(self, size):
        self.group = Group(size)

    def connect(self, rank, name):
        return self.group.connect(rank, name)

    def make(self, rank, placement, weights):
        return TorchWeightTransport(
            rank=rank,
            slots_per_rank=placement.slots_per_rank,
            staging_bytes=64 * EXPERT_BYTES,
            tensors_of=weights.tensors,
            sample=weights.tensors(0, 0),
            connect=lambda serial: self.connect(rank, f"transfer-{serial}"),
            device=CPU,
            threads=self.threads,
        )


class Simulated(Gloo):
    """The same transport in virtual time; all ranks are threads of one process."""

    def __init__(self, size):
        self.world = FleetWorld(0)
        self.world.calm = True
        self.threads = SimThreads(self.world)
        self.fabric = Fabric(self.world, size, lambda rank: None)

    def connect(self, rank, name):
        return self.fabric.connect(rank, self.threads, name)

    def run(self, count, work):
        results = {}

        def keep(rank):
            results[rank] = work(rank)

        for rank in range(count):
            self.threads.start(partial(keep, rank), "rank")
        self.world.run_until(1000.0)
        assert len(results) == count, "a rank hangs"
        return [results[rank] for rank in range(count)]


class Barrier:
    """Lets ranks wait for each other."""

    def __init__(self, threads, size):
        self.lock, self.open, self.left = threads.lock(), threads.event(), size

    def wait(self):
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.open.set()
        assert self.open.wait(deadline(30))


@pytest.fixture(params=[Gloo, Simulated], ids=["gloo", "simulated"])
def kind(request):
    return request.param


def staged_bytes_are_right(transport, prepare, rank, per_rank):
    for transfer in prepare.body.transfers:
        if transfer.dst_slot // per_rank != rank:
            continue
        have = transport.staged[transfer.layer, transfer.dst_slot % per_rank]
        want = expert_tensors(transfer.layer, transfer.logical_expert)
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(have, want, strict=True)
        )


def test_every_tensor_arrives_in_staging_and_slots_stay_untouched(kind):
    old, new = two_rank_placements()
    seam, prepare = kind(2), prepare_for(old, new)

    def rank_work(rank):
        weights = ToyWeights(old, rank)
        transport = seam.make(rank, old, weights)
        transport.rebuild(0)
        heard = []
        outcome = transport.stage(
            prepare, seam.threads.event(), lambda done, total: heard.append((done, total))
        )
        assert outcome.ok and not transport.broken
        staged_bytes_are_right(transport, prepare, rank, old.slots_per_rank)
        assert weights.holds(old)
        assert heard[-1][0] == heard[-1][1] == EXPERT_BYTES * len(transport.staged)
        transport.abort()

    seam.run(2, rank_work)


def test_an_expert_is_copied_between_slots_of_one_rank(kind):
    old = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]], np.int32), 2, 4)
    new = Placement(np.array([[0, 1, 1, 2, 3, EMPTY]], np.int32), 2, 4)
    seam, prepare = kind(2), prepare_for(old, new)

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        assert transport.stage(prepare, seam.threads.event(), ignore).ok
        staged_bytes_are_right(transport, prepare, rank, old.slots_per_rank)
        transport.abort()
        return len(transport.staged)

    assert seam.run(2, rank_work) == [1, 0]


def test_a_wave_takes_the_place_of_what_was_staged_before(kind):
    """R11: a swap copies all that is staged."""
    old, new = two_rank_placements()
    seam = kind(2)

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        assert transport.broken and transport.serial == -1
        transport.rebuild(0)
        for layer in range(2):
            part = old.with_rows((layer,), new.phy2log[[layer]])
            prepare = prepare_for(old, part, index=layer)
            assert transport.stage(prepare, seam.threads.event(), ignore).ok
            assert {staged for staged, _ in transport.staged} == {layer}
            staged_bytes_are_right(transport, prepare, rank, old.slots_per_rank)
        transport.abort()

    seam.run(2, rank_work)


def test_four_ranks_move_many_experts_in_one_batch_of_pairs(kind):
    """R10: the batch is larger than one chunk; ranks 0-1 and 2-3 are pairs."""
    per_rank, layers = 8, 4
    row = np.arange(4 * per_rank, dtype=np.int32)
    swapped = row.reshape(2, 2, per_rank)[:, ::-1].reshape(-1)
    old = Placement(np.tile(row, (layers, 1)), 4, len(row))
    new = Placement(np.tile(swapped, (layers, 1)), 4, len(row))
    seam, prepare = kind(4), prepare_for(old, new, one_batch=True)
    assert len(prepare.body.transfers) * 3 > 32 * 4
    through = Barrier(seam.threads, 4)

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        assert transport.stage(prepare, seam.threads.event(), ignore).ok
        staged_bytes_are_right(transport, prepare, rank, per_rank)
        through.wait()  # One pair that hangs up ends the communicator for the other too.
        transport.abort()

    seam.run(4, rank_work)


def test_wrong_checksum_is_named_by_the_receiver_and_peers_get_their_halves(kind):
    """R4: the receiver compares with the registered checksum; the others must not wait for it."""
    old, new = two_rank_placements(layers=1)
    seam, good = kind(2), prepare_for(old, new)
    spoiled = next(i for i, t in enumerate(good.body.transfers) if t.dst_slot // 3 == 0)
    checksums = [value ^ (1 if i == spoiled else 0) for i, value in enumerate(good.checksums)]
    prepare = prepare_for(old, new, checksums=tuple(checksums))

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        outcome = transport.stage(prepare, seam.threads.event(), ignore)
        assert not transport.broken
        transport.abort()
        return outcome

    first, second = seam.run(2, rank_work)
    transfer = good.body.transfers[spoiled]
    assert first.reason is Reason.CHECKSUM_MISMATCH
    assert f"layer {transfer.layer} expert {transfer.logical_expert}" in first.detail
    assert second.ok


@pytest.mark.parametrize("spoiled", range(3))
def test_every_expert_of_a_batch_is_compared(kind, spoiled):
    """R4: two of the three arrive on rank 0, one on rank 1."""
    old, new = two_rank_placements(layers=1)
    seam, good = kind(2), prepare_for(old, new, one_batch=True)
    checksums = [value ^ (1 if i == spoiled else 0) for i, value in enumerate(good.checksums)]
    prepare = prepare_for(old, new, one_batch=True, checksums=tuple(checksums))

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        outcome = transport.stage(prepare, seam.threads.event(), ignore)
        transport.abort()
        return outcome

    outcomes = seam.run(2, rank_work)
    transfer = good.body.transfers[spoiled]
    receiver = transfer.dst_slot // old.slots_per_rank
    assert outcomes[receiver].reason is Reason.CHECKSUM_MISMATCH
    assert f"expert {transfer.logical_expert}" in outcomes[receiver].detail
    assert outcomes[1 - receiver].ok


def test_missing_peer_breaks_the_batch_at_its_deadline_and_a_rebuild_heals(kind):
    """R10: a late batch is aborted. R7: its bytes never reach the staging of the next wave."""
    old, new = two_rank_placements(layers=1)
    seam = kind(2)
    late_wave = prepare_for(old, new, plan="late", batch_deadline_s=0.5)
    next_wave = prepare_for(old, new, plan="next")
    gave_up = seam.threads.event()

    def rank_work(rank):
        # The late rank would send other bytes; the next wave would show if they arrived anywhere.
        weights = ToyWeights(old, rank, version=rank)
        transport = seam.make(rank, old, weights)
        transport.rebuild(0)
        began = seam.threads.monotonic()
        if rank == 1:
            assert gave_up.wait(deadline(20))
        outcome = transport.stage(late_wave, seam.threads.event(), ignore)
        gave_up.set()
        assert not outcome.ok and transport.broken
        assert (
            transport.stage(late_wave, seam.threads.event(), ignore).reason
            is Reason.TRANSFER_FAILED
        )
        waited = seam.threads.monotonic() - began
        weights.slots = ToyWeights(old, rank).slots
        transport.rebuild(1)
        assert not transport.broken and transport.serial == 1
        assert transport.stage(next_wave, seam.threads.event(), ignore).ok
        staged_bytes_are_right(transport, next_wave, rank, old.slots_per_rank)
        transport.abort()
        return outcome.reason, waited

    (first, waited), (second, _) = seam.run(2, rank_work)
    assert first is Reason.TRANSFER_TIMEOUT and 0.4 < waited < 5
    assert second in (Reason.TRANSFER_FAILED, Reason.TRANSFER_TIMEOUT)


def test_cancelled_wave_drains_without_its_throttle_and_leaves_the_transport_usable(kind):
    """R7: on return nothing of the wave is in flight."""
    old, new = two_rank_placements(layers=2)
    seam = kind(2)
    slow = prepare_for(old, new, plan="slow", max_bytes_per_s=EXPERT_BYTES / 2.0)
    after = prepare_for(old, new, plan="after")
    cancel = seam.threads.event()

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        began = seam.threads.monotonic()
        # Throttled, the wave would take 12 seconds; the first batch gone, rank 0 cancels for both.
        transport.stage(slow, cancel, lambda done, total: cancel.set() if rank == 0 else None)
        waited = seam.threads.monotonic() - began
        transport.clear()
        assert not transport.broken and not transport.staged
        assert transport.stage(after, seam.threads.event(), ignore).ok
        staged_bytes_are_right(transport, after, rank, old.slots_per_rank)
        transport.abort()
        return waited

    assert max(seam.run(2, rank_work)) < 5


def test_throttle_slows_a_wave_down(kind):
    old, new = two_rank_placements(layers=1)
    seam = kind(2)
    batches = len(prepare_for(old, new).body.batches)
    prepare = prepare_for(old, new, max_bytes_per_s=EXPERT_BYTES * 10.0)

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        began = seam.threads.monotonic()
        assert transport.stage(prepare, seam.threads.event(), ignore).ok
        waited = seam.threads.monotonic() - began
        transport.abort()
        return waited

    assert min(seam.run(2, rank_work)) >= 0.09 * batches


def test_abort_from_another_thread_ends_a_wait_by_its_deadline(kind):
    old, new = two_rank_placements(layers=1)
    seam = kind(2)
    prepare = prepare_for(old, new, batch_deadline_s=1.5)
    ended, pause = seam.threads.event(), seam.threads.event()

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        if rank == 1:
            assert ended.wait(deadline(30))
            transport.abort()
            return None
        timer = seam.threads.start(lambda: (pause.wait(0.3), transport.abort()), "timer")
        outcome = transport.stage(prepare, seam.threads.event(), ignore)
        ended.set()
        timer.join()
        assert transport.broken
        return outcome

    outcome, _ = seam.run(2, rank_work)
    assert outcome.reason in (Reason.TRANSFER_FAILED, Reason.TRANSFER_TIMEOUT)


def test_a_rank_that_gives_up_releases_the_peers_that_wait_for_it(kind):
    """R10: rank 1 never comes and rank 0 gives up; rank 2 must not wait for a second deadline."""
    old = Placement(np.array([[0, 3, 1, 3, 2, 3]], np.int32), 3, 4)
    new = Placement(np.array([[1, 3, 1, 3, 0, 3]], np.int32), 3, 4)
    seam = kind(3)
    # With a throttle no batch is posted ahead: rank 2 waits for a copy that rank 0 never begins.
    absent = prepare_for(old, new, batch_deadline_s=0.5, max_bytes_per_s=1e9)
    patient = prepare_for(old, new, batch_deadline_s=60.0, max_bytes_per_s=1e9)
    ended = seam.threads.event()

    def rank_work(rank):
        transport = seam.make(rank, old, ToyWeights(old, rank))
        transport.rebuild(0)
        began = seam.threads.monotonic()
        if rank == 1:
            assert ended.wait(deadline(30))
        else:
            outcome = transport.stage(
                absent if rank == 0 else patient, seam.threads.event(), ignore
            )
            assert not outcome.ok
            if rank == 2:
                ended.set()
        transport.abort()
        return seam.threads.monotonic() - began

    assert max(seam.run(3, rank_work)) < 10
