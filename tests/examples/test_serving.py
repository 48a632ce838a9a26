"""The Qwen3-MoE example's experts and KV cache share one pool of buffers."""

from types import SimpleNamespace

import numpy as np
import torch

from examples.qwen3moe.ep_model import Slots
from examples.qwen3moe.serving import BlockCache

HIDDEN, INNER, LAYERS, HEADS, SIZE = 4, 8, 2, 1, 2
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=SIZE)
EXPERTS = [(0, 0), (0, 3), (1, 1)]


def filled(buffers):
    """Return a pool with three experts, and the values of their weights."""
    slots = Slots(buffers, HIDDEN, INNER)
    assert slots.reserve(EXPERTS)
    for number, slot in enumerate(EXPERTS):
        for tensor in slots.tensors(*slot):
            tensor.fill_(number + 0.5)
    return slots


def test_experts_get_buffers_that_no_request_has_and_all_come_back():
    slots = filled(5)
    blocks = slots.take(2)
    assert blocks is not None and slots.take(1) is None
    assert not slots.reserve([(1, 0)])
    slots.give_back(blocks)
    assert slots.reserve([(1, 0), (1, 2)]) and slots.free_buffers == 0
    slots.release([(0, 3)])
    assert slots.free_buffers == 1 and (0, 3) not in slots.buffer_of


def test_rows_read_what_their_own_request_wrote_and_no_expert_is_overwritten():
    slots = filled(9)
    cache = BlockCache(slots, CONFIG)
    assert (cache.token_bytes, cache.block_tokens) == (32, 12)
    tables = [slots.take(2), slots.take(3)]
    assert all(tables)
    lengths, rng = (20, 30), np.random.default_rng(3)
    written = [
        torch.from_numpy(rng.normal(size=(LAYERS, 2, n, HEADS, SIZE))).float() for n in lengths
    ]
    done = [0, 0]
    while done != list(lengths):
        rows = [min(int(rng.integers(1, 8)), n - at) for n, at in zip(lengths, done, strict=True)]
        owner = np.repeat([0, 1], rows)
        position = np.concatenate([at + np.arange(n) for at, n in zip(done, rows, strict=True)])
        table = torch.tensor([(tables[one] + tables[one][:1])[:3] for one in owner])
        mask = cache.begin_step(table, torch.from_numpy(position))
        for layer in range(LAYERS):
            mine = torch.stack(
                [written[one][layer, :, at] for one, at in zip(owner, position, strict=True)]
            )
            found = cache.update(mine[:, 0, :, None], mine[:, 1, :, None], layer)
            for row, (one, at) in enumerate(zip(owner, position, strict=True)):
                seen = mask[row, 0, 0] == 0
                assert seen.sum() == at + 1
                for kind in (0, 1):
                    read = found[kind][row, :, seen].transpose(0, 1)
                    assert torch.equal(read, written[one][layer, kind, : at + 1])
        done = [at + n for at, n in zip(done, rows, strict=True)]
    for number, slot in enumerate(EXPERTS):
        assert all((tensor == number + 0.5).all() for tensor in slots.tensors(*slot))
