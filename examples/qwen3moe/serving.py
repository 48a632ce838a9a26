"""Serves requests with a KV cache of blocks, in the memory that experts leave."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenkeel_moe.engines.reference.requests import (
    Request,
    RunningRequest,
    RunningRequests,
    block_tables,
)
from examples.qwen3moe.ep_model import Slots


class BlockCache:
    """The KV cache that the library's model takes as `past_key_values`, in free buffers of a pool.

    A buffer is a block: keys and values of some tokens of one request, in all layers. Every row of
    a batch is one token, so that a step may have tokens of prompts beside tokens of outputs.
    """

    def __init__(self, slots: Slots, config: Any) -> None:
        heads, size = config.num_key_value_heads, config.head_dim
        self.token_bytes = config.num_hidden_layers * 2 * heads * size * 4
        self.block_tokens = 4 * slots.memory.shape[1] // self.token_bytes
        used = self.block_tokens * self.token_bytes // 4
        self.blocks = slots.memory[:, :used].view(
            -1, config.num_hidden_layers, 2, self.block_tokens, heads, size
        )
        self.table = self.position = torch.empty(0, dtype=torch.int64)

    def begin_step(self, table: Tensor, position: Tensor) -> Tensor:
        """Set the blocks (n, b) and the position (n,) of each row; return their mask."""
        self.table, self.position = table, position
        seen = torch.arange(table.shape[1] * self.block_tokens) <= position[:, None]
        return torch.where(seen, 0.0, -torch.inf)[:, None, None]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keep (n, heads, 1, size) keys and values; return those of each row's request so far."""
        block, at = self.position // self.block_tokens, self.position % self.block_tokens
        own = self.table.gather(1, block[:, None])[:, 0]
        self.blocks[own, layer, 0, at], self.blocks[own, layer, 1, at] = (
            keys[:, :, 0],
            values[:, :, 0],
        )
        found = self.blocks[:, layer][self.table].transpose(1, 2).flatten(2, 3)
        # A block may hold an expert's old weights beyond the last token: zero times those is zero.
        return found[:, 0].transpose(1, 2), found[:, 1].transpose(1, 2)


class Server:
    """Runs requests as far as blocks are free, and keeps their logits for a check."""

    def __init__(
        self, model: Any, slots: Slots, requests: Iterator[Request], most: int, tokens_per_step: int
    ) -> None:
        self.model, self.cache = model, BlockCache(slots, model.config)
        self.kv_tokens = slots.free_buffers * self.cache.block_tokens
        self.requests = RunningRequests(
            slots, requests, most, self.cache.block_tokens, tokens_per_step
        )
        self.logits: dict[RunningRequest, list[Tensor]] = {}
        self.ended: list[tuple[Request, Tensor]] = []
        self.largest_batch = 0

    def step(self, step: int) -> int:
        """Run a step of all requests; return its tokens, 0 where no request waits."""
        self.requests.begin_step()
        running = self.requests.running
        if not running:
            return 0
        rows = [one.rows for one in running]
        table = np.repeat(block_tables(running), rows, axis=0)
        position = torch.from_numpy(np.concatenate([one.span for one in running]))
        ids = torch.from_numpy(np.concatenate([one.request.ids[one.span] for one in running]))
        mask = self.cache.begin_step(torch.from_numpy(table), position)
        answer = self.model(
            ids[:, None],
            attention_mask=mask,
            position_ids=position[:, None],
            past_key_values=self.cache,
        )
        for one, logits in zip(running, answer.logits[:, 0].split(rows), strict=True):
            self.logits.setdefault(one, []).append(logits)
        self.largest_batch = max(self.largest_batch, len(running))
        for one in self.requests.end_step(step):
            self.ended.append((one.request, torch.cat(self.logits.pop(one))))
        return len(ids)

    def summary(self, untouched: Any) -> dict[str, Any]:
        """Return figures of the requests; compare their logits with the library's own model."""
        close = (
            torch.allclose(untouched(torch.from_numpy(request.ids)[None]).logits[0], got, atol=1e-4)
            for request, got in self.ended
        )
        return {
            "requests": len(self.ended),
            "largest_batch": self.largest_batch,
            "kv_tokens_at_start": self.kv_tokens,
            "as_untouched_model": all(close),
        }
