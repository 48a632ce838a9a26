"""Counts that an engine leaves on its device arrive as `Agent.record` would take them."""

import pytest
import structlog
import torch

from evenkeel_moe.agent import DeviceRecorder, Phase
from evenkeel_moe.agent.recorder import Recorder


def recorder_of(width, capacity=16):
    kept = Recorder(capacity, 1, width)

    def record(step, counts, *, epoch, tokens, phase, dummy=False, compute_s=None):
        kept.record(step, counts, epoch, tokens, phase, dummy, compute_s)

    return kept, DeviceRecorder(record, 3)


def test_a_step_arrives_with_all_that_was_said_of_it():
    kept, device = recorder_of(4)
    counts = torch.tensor([[5, 1, 2, 4]], dtype=torch.int32)
    device.record(7, counts, epoch=2, tokens=12, phase=Phase.DECODE, compute_s=0.25)
    counts.zero_()  # The engine fills its counters again at once.
    device.record(8, counts, epoch=2, tokens=0, phase=Phase.PREFILL, dummy=True)
    device.finish()
    taken = kept.take(10)
    assert taken is not None and taken.counts.tolist() == [[[5, 1, 2, 4]], [[0, 0, 0, 0]]]
    first, second = taken.steps
    assert (first["step"], first["epoch"], first["tokens"], first["compute_s"]) == (7, 2, 12, 0.25)
    assert (second["step"], bool(second["dummy"])) == (8, True)


def test_counts_by_slot_are_summed_by_expert_with_the_map_of_their_step():
    kept, device = recorder_of(3)
    by_slot = torch.tensor([[5, 1, 2, 4]])
    for step, phy2log in enumerate(([[0, 1, 2, 0]], [[2, 1, -1, 0]])):
        device.record(
            step, by_slot, epoch=step, tokens=12, phase=Phase.DECODE, phy2log=torch.tensor(phy2log)
        )
    taken = kept.take(10)
    assert taken is not None and taken.counts.tolist() == [[[9, 1, 2]], [[4, 1, 5]]]


def test_a_step_that_cannot_be_counted_is_logged_and_ends_nothing():
    kept, device = recorder_of(3)
    with structlog.testing.capture_logs() as said:
        for step in range(4):
            wrong = torch.zeros((2, 5), dtype=torch.int64)
            device.record(
                step, torch.ones(1, 4), epoch=0, tokens=1, phase=Phase.DECODE, phy2log=wrong
            )
    assert [line["event"] for line in said] == ["counting_failed"] * 3
    assert kept.waiting == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_copies_from_a_device_arrive_in_order_while_the_device_is_busy():
    """More steps than copies may be pending: the oldest is waited for, and none is lost."""
    kept, device = recorder_of(3, capacity=64)
    matrix = torch.randn(4096, 4096, device="cuda")
    counts = torch.zeros((1, 3), dtype=torch.int64, device="cuda")
    for step in range(40):
        matrix @ matrix
        counts.fill_(step)
        device.record(step, counts, epoch=0, tokens=1, phase=Phase.DECODE)
    device.finish()
    taken = kept.take(64)
    assert taken is not None
    assert taken.counts[:, 0, 0].tolist() == taken.steps["step"].tolist() == list(range(40))
