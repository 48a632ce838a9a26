"""The device checksum: compared with a plain Python version, and what it must distinguish."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.adapters.torch import checksum as module
from evenkeel_moe.adapters.torch.checksum import checksum, device_checksum

WRAP = 2**64
SPREAD, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def plain(tensors):
    """Compute the checksum with Python integers, one word at a time."""

    def mixed(word, position):
        value = (word ^ (position * SPREAD % WRAP)) * MIX % WRAP
        value ^= value >> 32
        value = value * SPREAD % WRAP
        return value ^ (value >> 29)

    total, position = 0, 1
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        total += mixed(len(data), position)
        position += 1
        for first in range(0, len(data), 8):
            total += mixed(
                int.from_bytes(data[first : first + 8].ljust(8, b"\0"), "little"), position
            )
            position += 1
    return total % WRAP


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4))
def test_it_equals_the_plain_version(parts):
    tensors = [torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in parts]
    assert device_checksum(tensors) == plain(tensors)


def test_experts_on_a_device_have_its_own_checksum_and_others_that_of_the_host(monkeypatch):
    monkeypatch.setattr(module, "device_checksum", lambda tensors: 7)
    there: Any = SimpleNamespace(device=torch.device("cuda"))
    assert checksum([there]) == 7
    assert checksum([torch.tensor([1, 2], dtype=torch.uint8)]) == xxhash.xxh3_64_intdigest(b"\1\2")
    assert checksum([]) == xxhash.xxh3_64_intdigest(b"")


def test_pieces_make_no_difference(monkeypatch):
    tensors = [torch.randn(333, 7), torch.randint(0, 255, (41,), dtype=torch.uint8)]
    whole = device_checksum(tensors)
    monkeypatch.setattr(module, "_WORDS", 16)
    assert device_checksum(tensors) == whole == plain(tensors)


def test_every_single_bit_counts():
    tensor = torch.zeros(24, dtype=torch.uint8)
    found = {device_checksum([tensor])}
    for byte in range(24):
        for bit in range(8):
            other = tensor.clone()
            other[byte] = 1 << bit
            found.add(device_checksum([other]))
    assert len(found) == 1 + 24 * 8


def test_order_length_and_seams_count():
    rows = torch.arange(64, dtype=torch.float32).view(8, 8)
    swapped = rows[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert device_checksum([rows]) != device_checksum([swapped])
    assert device_checksum([rows[:4], rows[4:]]) != device_checksum([rows])
    assert device_checksum([torch.zeros(8)]) != device_checksum([torch.zeros(9)])
    assert device_checksum([rows.t()]) == device_checksum([rows.t().contiguous()])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int8])
def test_number_types_are_bytes(dtype):
    tensor = torch.randn(5, 16).to(dtype)
    as_bytes = tensor.view(torch.uint8).clone()
    assert device_checksum([tensor]) == device_checksum([as_bytes])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_number():
    tensors = [torch.randn(777, 5), torch.randn(3).to(torch.bfloat16)]
    assert device_checksum([t.cuda() for t in tensors]) == device_checksum(tensors)
