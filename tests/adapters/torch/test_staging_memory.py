"""The staging memory: room for its experts, alignment, and reuse after `clear`."""

import pytest
import torch

from evenkeel_moe.adapters.torch.staging_memory import StagingMemory

CPU = torch.device("cpu")
EXPERT = (
    torch.zeros(5, 3),
    torch.zeros(7, dtype=torch.int8),
    torch.zeros((), dtype=torch.bfloat16),
)
NBYTES = sum(tensor.nbytes for tensor in EXPERT)


def make_memory(experts):
    return StagingMemory(experts * NBYTES, EXPERT, CPU)


def test_all_experts_fit_in_spite_of_alignment_and_share_no_byte():
    memory = make_memory(4)
    rooms = [memory.allocate(0, slot, EXPERT) for slot in range(4)]
    for slot, room in enumerate(rooms):
        for tensor, like in zip(room, EXPERT, strict=True):
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(slot + 1)
    for slot, room in enumerate(rooms):
        assert all((tensor == slot + 1).all() for tensor in room)
        assert memory.staged[0, slot] is room


def test_more_experts_than_it_was_made_for_are_refused():
    memory = make_memory(1)
    memory.allocate(0, 0, EXPERT)
    with pytest.raises(RuntimeError):
        for slot in range(1, 20):
            memory.allocate(0, slot, EXPERT)


def test_the_memory_is_free_again_after_clear():
    memory = make_memory(1)
    first = memory.allocate(0, 0, EXPERT)
    memory.clear()
    assert memory.staged == {}
    assert memory.allocate(1, 0, EXPERT)[0].data_ptr() == first[0].data_ptr()


def test_experts_of_one_byte_fit_and_experts_without_bytes_are_no_error():
    byte = (torch.zeros(1, dtype=torch.int8),)
    memory = StagingMemory(4, byte, CPU)
    assert [memory.allocate(0, slot, byte)[0].numel() for slot in range(4)] == [1] * 4
    assert StagingMemory(0, (torch.zeros(0),), CPU).staged == {}
