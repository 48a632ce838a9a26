"""The Gloo transport with experts of 8-bit models: 8-bit floats, block scales and a scalar."""

import threading
import time

import numpy as np
import pytest
import torch

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport, is_over
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.protocol.messages import Prepare
from tests.agent.ranks import CPU, GENERATION, LEADER, Group, run_ranks


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
