"""A Hugging Face Qwen3-MoE model whose experts are spread over ranks and can move while it runs.

Everything except the experts is the library's own model, the same on every rank. `EpExperts`
replaces the experts of each layer: it holds the experts of this rank's slots, sends the hidden
state of each token to the slots in the table, and adds up the results. `Slots` and `Tables`
implement the interfaces that Evenkeel's agent needs from an engine.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenkeel_moe.agent import Communicator, Placement

ROWS = 16
"""Rows of every matrix product. One shape, so that a token's result does not depend on other
tokens."""


class EpochMismatch(RuntimeError):
    """Two ranks used different maps in a step, so it must not be computed."""


@dataclass(frozen=True)
class Table:
    """One layer's routing: (E, replicas) slots, and the number of valid slots in each row."""

    slots: Tensor
    replicas: Tensor


class Tables:
    """MapInstaller: the routing tables of all layers on this rank."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.epoch = 0
        self.layers = [self._table(row) for row in placement.phy2log]

    def build(self, layers: Sequence[int], rows: np.ndarray, epoch: int) -> Any:
        return list(layers), [self._table(row) for row in rows], epoch

    def install(self, built: Any) -> None:
        layers, tables, epoch = built
        # In place: a captured CUDA graph would keep reading the old tensors.
        for layer, table in zip(layers, tables, strict=True):
            self.layers[layer].slots.copy_(table.slots)
            self.layers[layer].replicas.copy_(table.replicas)
        self.epoch = epoch

    def _table(self, row: np.ndarray) -> Table:
        experts = self.placement.num_logical_experts
        one = Placement(row[None], self.placement.num_ranks, experts)
        # As wide as any placement needs it, so that every table has the same shape.
        slots = np.full((experts, len(row) - experts + 1), -1, np.int64)
        slots[:, : one.log2phy.shape[2]] = one.log2phy[0]
        return Table(torch.from_numpy(slots), torch.from_numpy(one.logcnt[0].astype(np.int64)))


class Slots:
    """ExpertWeights: a pool of buffers for the slots of all layers, each as large as one expert.

    Buffers without an expert are blocks of the KV cache (`serving.py`).
    """

    def __init__(self, buffers: int, hidden: int, inner: int) -> None:
        self.hidden, self.inner = hidden, inner
        self.memory = torch.zeros(buffers, 3 * inner * hidden)
        self.buffer_of: dict[tuple[int, int], int] = {}
        self.free = list(range(buffers))
        self.taking = threading.Lock()  # The agent reserves slots on a thread of its own.

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        buffer = self.memory[self.buffer_of[layer, local_slot]]
        gate_up, down = buffer.split([2 * self.inner * self.hidden, self.inner * self.hidden])
        return gate_up.view(2 * self.inner, self.hidden), down.view(self.hidden, self.inner)

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        buffers = self.take(len(slots))
        self.buffer_of.update(zip(slots, buffers or (), strict=buffers is not None))
        return buffers is not None

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        self.give_back([self.buffer_of.pop(slot) for slot in slots])

    @property
    def free_buffers(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[int] | None:
        with self.taking:
            if count > len(self.free):
                return None
            taken, self.free = self.free[:count], self.free[count:]
            return taken

    def give_back(self, buffers: Sequence[int]) -> None:
        with self.taking:
            self.free += buffers


class EpExperts(nn.Module):
    """Experts of one layer, spread over the ranks."""

    def __init__(
        self, whole: Any, layer: int, rank: int, tables: Tables, slots: Slots, group: Communicator
    ) -> None:
        super().__init__()
        placement = tables.placement
        self.per_rank = placement.slots_per_rank
        self.layer, self.tables, self.group = layer, tables, group
        self.num_experts, self.act = whole.num_experts, whole.act_fn
        self.slots = slots
        held = placement.phy2log[layer, rank * self.per_rank : (rank + 1) * self.per_rank]
        filled = np.flatnonzero(held >= 0).tolist()
        assert slots.reserve([(layer, local) for local in filled])
        for local in filled:
            gate_up, down = slots.tensors(layer, local)
            gate_up.copy_(whole.gate_up_proj.detach()[held[local]])
            down.copy_(whole.down_proj.detach()[held[local]])
        self.counts = np.zeros(self.num_experts, np.int64)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = chosen.shape
        self.counts = np.bincount(chosen.reshape(-1).numpy(), minlength=self.num_experts).astype(
            np.int64
        )
        table = self.tables.layers[self.layer]
        spread = torch.arange(tokens)[:, None] * 2654435769 % 2**32
        slot = table.slots[chosen, spread % table.replicas[chosen]].reshape(-1)
        order = torch.argsort(slot // self.per_rank, stable=True)
        sent = torch.bincount(slot // self.per_rank, minlength=self.group.size)
        received = self._agree(sent)
        rows_in, rows_out = received.tolist(), sent.tolist()
        source = hidden.repeat_interleave(top_k, dim=0)[order].contiguous()
        arrived = torch.empty(sum(rows_in), hidden.shape[1], dtype=hidden.dtype)
        local = torch.empty(sum(rows_in), dtype=torch.int64)
        self.group.all_to_all(arrived, source, rows_in, rows_out)
        self.group.all_to_all(local, (slot % self.per_rank)[order].contiguous(), rows_in, rows_out)
        back = torch.empty_like(source)
        self.group.all_to_all(back, self._compute(arrived, local), rows_out, rows_in)
        result = torch.empty_like(back)
        result[order] = back
        weighted = result.view(tokens, top_k, -1) * weights[..., None]
        total = weighted[:, 0]
        for position in range(1, top_k):  # the same order on every rank and with every map
            total = total + weighted[:, position]
        return total

    def _agree(self, sent: Tensor) -> Tensor:
        """Return the number of rows from each rank; ranks with different epochs stop the step."""
        mine = torch.stack([sent, torch.full_like(sent, self.tables.epoch)], dim=1).contiguous()
        theirs = torch.empty_like(mine)
        self.group.all_to_all(theirs, mine, [1] * self.group.size, [1] * self.group.size)
        if (theirs[:, 1] != self.tables.epoch).any():
            raise EpochMismatch(f"epochs of the ranks: {theirs[:, 1].tolist()}")
        return theirs[:, 0]

    def _compute(self, rows: Tensor, local: Tensor) -> Tensor:
        answer = torch.empty_like(rows)
        for slot in local.unique().tolist():
            where = torch.nonzero(local == slot)[:, 0]
            gate_up, down = self.slots.tensors(self.layer, slot)
            for part in where.split(ROWS):
                block = torch.zeros(ROWS, rows.shape[1], dtype=rows.dtype)
                block[: len(part)] = rows[part]
                gate, up = nn.functional.linear(block, gate_up).chunk(2, dim=-1)
                answer[part] = nn.functional.linear(self.act(gate) * up, down)[: len(part)]
        return answer


def spread_experts(
    model: Any, rank: int, placement: Placement, buffers: int, group: Communicator
) -> tuple[list[EpExperts], Slots, Tables]:
    """Replace the experts of every MoE layer; return the layers and the agent's interfaces."""
    sizes = model.config.hidden_size, model.config.moe_intermediate_size
    tables, slots = Tables(placement), Slots(buffers, *sizes)
    blocks = []
    for layer, block in enumerate(model.model.layers):
        block.mlp.experts = EpExperts(block.mlp.experts, layer, rank, tables, slots, group)
        blocks.append(block.mlp.experts)
    return blocks, slots, tables
