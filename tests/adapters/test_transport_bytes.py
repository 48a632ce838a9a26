"""Experts as checkpoints of 8-bit models have them: eight-bit floats beside block scales and a scalar, moved as bytes."""

import threading
import time

import numpy as np
import pytest
import torch

from evenkeel.adapters.torch_transport import TorchWeightTransport, checksum, is_over
from evenkeel.errors import Reason
from evenkeel.model.ids import Epoch, PlanId
from evenkeel.model.placement import Placement
from evenkeel.model.plan import Transfer, Wave, WaveKey
from evenkeel.protocol.messages import Prepare
from tests.agent.ranks import CPU, GENERATION, LEADER, Group, run_ranks


def expert(number):
    seed = torch.Generator().manual_seed(number)
    return [
        torch.randn(24, 16, generator=seed).to(torch.float8_e4m3fn),
        torch.randn(16, 12, generator=seed).to(torch.float8_e5m2),
        torch.randn(3, 2, generator=seed),
        torch.randn((), generator=seed).to(torch.bfloat16),
    ]


def test_eight_bit_floats_and_scales_arrive_bit_for_bit():
    """wrong bytes (R4): every tensor of an expert moves, scales too, whatever numbers it holds."""
    old = Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4)
    new = Placement(np.array([[2, 1, 0, 3]], np.int32), 2, 4)
    nbytes = sum(t.numel() * t.element_size() for t in expert(0))
    transfers = (Transfer(0, 2, 2, 0, nbytes), Transfer(0, 0, 0, 2, nbytes))
    prepare = Prepare(
        LEADER,
        WaveKey(GENERATION, PlanId("bytes"), 0, 1),
        Epoch(0),
        Wave(0, (0,), new.phy2log, (transfers,)),
        tuple(checksum(expert(t.logical_expert)) for t in transfers),
        20.0,
    )
    group = Group(2)

    def stage(rank):
        slots = [expert(int(old.phy2log[0, rank * 2 + local])) for local in range(2)]
        transport = TorchWeightTransport(
            rank=rank,
            slots_per_rank=2,
            staging_bytes=4 * nbytes,
            tensors_of=lambda _layer, local: slots[local],
            tensors_per_expert=4,
            min_expert_bytes=nbytes,
            connect=lambda serial: group.connect(rank, f"transfer-{serial}", CPU),
            device=CPU,
        )
        transport.rebuild(0)
        outcome = transport.stage(prepare, threading.Event(), lambda done, total: None)
        staged = dict(transport.staged)
        transport.abort()
        return outcome, staged

    for rank, (outcome, staged) in enumerate(run_ranks(2, stage)):
        assert outcome.ok, outcome.detail
        want = expert(int(new.phy2log[0, rank * 2]))
        for have, must in zip(staged[0, 0], want, strict=True):
            assert have.dtype == must.dtype
            assert torch.equal(have.view(-1).view(torch.uint8), must.view(-1).view(torch.uint8))


def test_tensors_the_engine_does_not_give_break_the_communicator_and_leave_nothing_in_flight():
    """late bytes (R11): what another rank still sends must not land in the next wave's staging."""
    old = Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4)
    new = Placement(np.array([[2, 3, 0, 1]], np.int32), 2, 4)
    nbytes = sum(t.numel() * t.element_size() for t in expert(0))
    slots_of = ((2, 2, 0), (0, 0, 2), (3, 3, 1), (1, 1, 3))
    batches = tuple((Transfer(0, logical, src, dst, nbytes),) for logical, src, dst in slots_of)
    sums = tuple(checksum(expert(logical)) for logical, _, _ in slots_of)
    body = Wave(0, (0,), new.phy2log, batches)
    prepare = Prepare(LEADER, WaveKey(GENERATION, PlanId("gone"), 0, 1), Epoch(0), body, sums, 2.0)
    group = Group(2)

    def stage(rank):
        slots = {local: expert(int(old.phy2log[0, rank * 2 + local])) for local in range(2)}
        if rank == 0:
            del slots[1]
        transport = TorchWeightTransport(
            rank=rank,
            slots_per_rank=2,
            staging_bytes=4 * nbytes,
            tensors_of=lambda _layer, local: slots[local],
            tensors_per_expert=4,
            min_expert_bytes=nbytes,
            connect=lambda serial: group.connect(rank, f"transfer-{serial}", CPU),
            device=CPU,
        )
        transport.rebuild(0)
        outcome = transport.stage(prepare, threading.Event(), lambda done, total: None)
        broken = transport.broken
        transport.abort()
        return outcome, broken

    (first, first_broken), (second, second_broken) = run_ranks(2, stage)
    assert first.reason is Reason.TRANSFER_FAILED
    assert "KeyError(1)" in first.detail
    assert not second.ok
    assert first_broken
    assert second_broken


class Mark:
    """A device's event that is over after so many looks."""

    def __init__(self, looks, fails=False):
        self.looks, self.fails = looks, fails

    def query(self):
        if self.fails:
            raise RuntimeError("unhandled device error")
        self.looks -= 1
        return self.looks <= 0


def test_a_device_is_waited_for_until_the_deadline():
    assert is_over(Mark(3), time.monotonic() + 30)
    assert not is_over(Mark(1 << 30), time.monotonic() + 0.02), "copies that hang must not hang the wave"
    assert is_over(Mark(1), 0.0), "what is done in time is done, however late one looks"
    with pytest.raises(RuntimeError, match="device error"):
        is_over(Mark(1, fails=True), time.monotonic() + 30)
