"""A toy MoE engine with expert parallelism, and the two objects that Evenkeel needs of it.

Every rank has some tokens. In each layer all ranks gather all tokens, compute those of their own
experts, and gather the results: the simplest exchange there is. A real engine sends each token only
to the ranks of its experts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenkeel_moe.agent import Communicator, Placement

LAYERS, EXPERTS, TOP_K, D_MODEL, D_FFN, WORDS, BATCH = 4, 8, 2, 16, 32, 256, 24


def checkpoint(layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of an expert as they are in the checkpoint: two matrices and a scale."""
    made = torch.Generator().manual_seed(1000 * layer + expert)
    up = torch.randn(D_MODEL, D_FFN, generator=made)
    down = torch.randn(D_FFN, D_MODEL, generator=made)
    return up, down, torch.rand((), generator=made) + 0.5


BYTES_PER_EXPERT = sum(tensor.nbytes for tensor in checkpoint(0, 0))


def expert_ffn(rows: Tensor, up: Tensor, down: Tensor, alpha: Tensor) -> Tensor:
    """Return (n, D) outputs of rows that each have an expert of their own: (n, D, F), ..., (n,)."""
    hidden = torch.relu(torch.bmm(rows[:, None], up))
    return torch.bmm(hidden, down)[:, 0] * alpha[:, None]


class ExpertSlots:
    """The experts of this rank: the interface `ExpertWeights`. Here every slot owns its memory."""

    def __init__(self, placement: Placement, rank: int) -> None:
        here = placement.phy2log.reshape(LAYERS, placement.num_ranks, -1)[:, rank]
        shape = here.shape
        self.up = torch.zeros(*shape, D_MODEL, D_FFN)
        self.down = torch.zeros(*shape, D_FFN, D_MODEL)
        self.scale = torch.zeros(shape)
        for layer, slot in np.argwhere(here >= 0).tolist():
            for target, value in zip(
                self.tensors(layer, slot), checkpoint(layer, int(here[layer, slot])), strict=True
            ):
                target.copy_(value)
        # Computed once from the scales, as engines fuse their scales: it has to follow them.
        self.alpha = self.scale / D_FFN

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        return [tensor[layer, local_slot] for tensor in (self.up, self.down, self.scale)]

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        return True

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        pass

    def fuse(self, slots: Sequence[tuple[int, int]]) -> None:
        for layer, slot in slots:
            self.alpha[layer, slot] = self.scale[layer, slot] / D_FFN

    def probe(self, layer: int, local_slot: int) -> Tensor:
        one = [tensor[layer, local_slot][None] for tensor in (self.up, self.down, self.alpha)]
        return expert_ffn(torch.ones(1, D_MODEL), *one)


class RoutingTables:
    """The slots of every expert: the interface `MapInstaller`."""

    def __init__(self, placement: Placement, epoch: int) -> None:
        self._ranks = placement.num_ranks
        self._width = placement.num_slots - EXPERTS + 1  # as wide as any map needs it
        self.epoch = epoch
        self.slots, self.replicas = self._made_of(placement.phy2log)

    def build(self, layers: Sequence[int], rows: np.ndarray, epoch: int) -> Any:
        return list(layers), *self._made_of(rows), epoch

    def install(self, built: Any) -> None:
        layers, slots, replicas, self.epoch = built
        self.slots[layers] = slots  # in place: a captured CUDA graph would keep the old tensors
        self.replicas[layers] = replicas

    def _made_of(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (n, E, width) slots, padded with -1, and (n, E) replicas."""
        maps = Placement(rows, self._ranks, EXPERTS)
        slots = np.full((len(rows), EXPERTS, self._width), -1, np.int64)
        slots[:, :, : maps.log2phy.shape[2]] = maps.log2phy
        return torch.from_numpy(slots), torch.from_numpy(maps.logcnt.astype(np.int64))


class ToyEngine:
    """The model on one rank: embedding and gates are the same everywhere, experts are not."""

    def __init__(self, rank: int, experts: ExpertSlots, tables: RoutingTables, group: Communicator):
        made = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(WORDS, D_MODEL, generator=made)
        self.gates = torch.randn(LAYERS, D_MODEL, EXPERTS, generator=made)
        self.rank, self.experts, self.tables, self.group = rank, experts, tables, group
        self.counts = torch.zeros(experts.scale.shape, dtype=torch.int64)
        """(L, slots per rank) tokens that the slots of this rank got in the last step."""

    def step(self, words: Tensor, *, alone: bool = False) -> Tensor:
        """Return the outputs of (BATCH,) words, -1 for padding; all ranks call it for each step.

        Args:
            words: all padding for a rank without requests, which then runs a dummy pass.
            alone: compute with the checkpoint's experts and without the other ranks.
        """
        x = self.embedding[words.clamp(min=0)]
        for layer in range(LAYERS):
            chosen = (x @ self.gates[layer]).topk(TOP_K).indices
            if alone:
                tensors = [checkpoint(layer, one) for one in chosen.reshape(-1).tolist()]
                up, down, scale = (torch.stack(parts) for parts in zip(*tensors, strict=True))
                rows = x.repeat_interleave(TOP_K, dim=0)
                routed = expert_ffn(rows, up, down, scale / D_FFN).reshape(BATCH, TOP_K, D_MODEL)
            else:
                place = torch.arange(BATCH)[:, None] + self.rank
                tables = self.tables
                turn = place % tables.replicas[layer][chosen]
                slots = torch.where(words[:, None] < 0, -1, tables.slots[layer][chosen, turn])
                routed = self._exchange(layer, x, slots)
            x = torch.tanh(x + routed.sum(dim=1))
        return x

    def _exchange(self, layer: int, x: Tensor, slots: Tensor) -> Tensor:
        """Return (BATCH, TOP_K, D) results of this rank's tokens from the ranks of their slots."""
        epochs = self.group.all_gather(torch.tensor(self.tables.epoch))
        if (epochs != self.tables.epoch).any():
            raise RuntimeError(f"the ranks route by different maps, of epochs {epochs.tolist()}")
        all_x, all_slots = self.group.all_gather(x), self.group.all_gather(slots)
        per_rank = self.counts.shape[1]
        local = all_slots - self.rank * per_rank
        mine = (local >= 0) & (local < per_rank)
        self.counts[layer] = torch.bincount(local[mine], minlength=per_rank)
        done = torch.zeros(*all_slots.shape, D_MODEL)
        rows = all_x[:, :, None].expand_as(done)[mine]
        tensors = (self.experts.up, self.experts.down, self.experts.alpha)
        done[mine] = expert_ffn(rows, *(tensor[layer][local[mine]] for tensor in tensors))
        # Each result was computed on one rank; all others have zeros there.
        return self.group.all_gather(done)[:, self.rank].sum(dim=0)
