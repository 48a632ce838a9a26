"""A rank's experts in pooled buffers, and the routing tables that lead to all experts."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.reference.model import original_expert
from evenkeel_moe.errors import InfeasiblePlan, Reason
from evenkeel_moe.model.placement import EMPTY, Placement


class PooledWeights:
    """One pool of buffers for all layers of a rank; each filled slot owns one buffer.

    A buffer that no slot owns may hold a block of the KV cache.

    The engine's thread reads `tensors` while the agent's transfer thread reserves buffers for empty
    slots, so the two never use the same slot.
    """

    def __init__(
        self,
        layers: int,
        slots_per_rank: int,
        buffers: int,
        d_model: int,
        d_ffn: int,
        device: torch.device,
    ) -> None:
        self._w_in = torch.zeros(buffers, d_model, d_ffn, device=device)
        self._w_out = torch.zeros(buffers, d_ffn, d_model, device=device)
        self._scale = torch.zeros(buffers, d_ffn, device=device)
        self._buffer_of = np.full((layers, slots_per_rank), EMPTY, np.int64)
        self._free = list(range(buffers))
        self.expected = 0
        """Slots that experts are to fill."""
        self.loaded_bytes = 0
        """Bytes of experts that `load` has copied from the checkpoint."""
        self._taking = threading.Lock()

    @property
    def free_buffers(self) -> int:
        """The number of buffers that no slot owns."""
        return len(self._free)

    @property
    def missing(self) -> int:
        """The number of experts that are still to come."""
        return max(self.expected - int((self._buffer_of != EMPTY).sum()), 0)

    def tensors(self, layer: int, local_slot: int) -> tuple[Tensor, ...]:
        """Return (w_in, w_out, scale) of a filled or reserved slot, as views of its buffer.

        Raises:
            InfeasiblePlan: the slot has no buffer.
        """
        buffer = int(self._buffer_of[layer, local_slot])
        if buffer == EMPTY:
            raise InfeasiblePlan(f"layer {layer} slot {local_slot} is empty", Reason.NO_SOURCE)
        return self._w_in[buffer], self._w_out[buffer], self._scale[buffer]

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Give each (layer, local slot) a free buffer; return False if too few are free."""
        buffers = self.take(len(slots))
        if buffers is None:
            return False
        for (layer, local_slot), buffer in zip(slots, buffers, strict=True):
            assert self._buffer_of[layer, local_slot] == EMPTY, (
                f"slot {layer}, {local_slot} has a buffer"
            )
            self._buffer_of[layer, local_slot] = buffer
        return True

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Take back the buffers of slots that no map uses any more."""
        self.give_back([int(self._buffer_of[slot]) for slot in slots])
        for slot in slots:
            self._buffer_of[slot] = EMPTY

    def take(self, count: int) -> list[int] | None:
        """Return so many free buffers, which are then taken; None if fewer are free."""
        with self._taking:
            if count > len(self._free):
                return None
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give_back(self, buffers: Sequence[int]) -> None:
        """Make buffers free again."""
        with self._taking:
            self._free += buffers

    def kv_blocks(self) -> tuple[Tensor, Tensor]:
        """Return the memory of all buffers as blocks of a KV cache.

        Returns:
            keys and values, (buffers, L, tokens, D) each, with F // L tokens in a block.
        """
        buffers, d_model, d_ffn = self._w_in.shape
        layers = len(self._buffer_of)
        tokens = d_ffn // layers
        used = layers * tokens * d_model
        keys, values = (
            tensor.view(buffers, -1)[:, :used].view(buffers, layers, tokens, d_model)
            for tensor in (self._w_in, self._w_out)
        )
        return keys, values

    def load(
        self,
        placement: Placement,
        rank: int,
        seed: int,
        held: NDArray[np.int32] | None = None,
        make_room: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Fill this rank's slots of a placement with the checkpoint's experts.

        Args:
            placement: of the group.
            rank: this one.
            seed: of the checkpoint.
            held: (L, slots_per_rank) experts in the slots now, which stay; None if all are empty.
            make_room: frees buffers until so many are free, if it can.

        Returns:
            the number of experts that were loaded.

        Raises:
            InfeasiblePlan: the placement needs more buffers than the pool has.
        """
        mine = placement.phy2log.reshape(placement.num_layers, placement.num_ranks, -1)[:, rank]
        before = np.full_like(mine, EMPTY) if held is None else held
        changed = [(int(layer), int(local)) for layer, local in np.argwhere(mine != before)]
        self.release([slot for slot in changed if before[slot] != EMPTY])
        filled = [slot for slot in changed if mine[slot] != EMPTY]
        make_room(len(filled))
        if not self.reserve(filled):
            raise InfeasiblePlan(
                f"{len(filled)} slots to fill, {self.free_buffers} buffers", Reason.POOL_EXCEEDED
            )
        _, d_model, d_ffn = self._w_in.shape
        for layer, local in filled:
            expert = original_expert(seed, layer, int(mine[layer, local]), d_model, d_ffn)
            for tensor, value in zip(self.tensors(layer, local), expert, strict=True):
                tensor.copy_(value)
                self.loaded_bytes += value.nbytes
        return len(filled)


@dataclass(frozen=True, eq=False, slots=True)
class KvBlocks:
    """The buffers that experts leave, as blocks of a KV cache; a `requests.BlockPool`.

    A rank that has joined a group is empty. Blocks leave room for the experts that are to come, or
    it might never get any.
    """

    weights: PooledWeights

    @property
    def free_buffers(self) -> int:
        """The number of blocks that nobody has."""
        return max(self.weights.free_buffers - self.weights.missing, 0)

    def take(self, count: int) -> list[int] | None:
        """Return so many free blocks, which are then taken; None if fewer are free."""
        return self.weights.take(count) if count <= self.free_buffers else None

    def give_back(self, buffers: Sequence[int]) -> None:
        """Make blocks free again."""
        self.weights.give_back(buffers)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """The slots of each expert of one layer."""

    slots: Tensor
    """(E, X) int64 global slots in slot order, padded with the first one."""
    replicas: Tensor
    """(E,) int64 number of slots without the padding."""


class Router:
    """The routing tables of this rank, one per layer, and their epoch."""

    def __init__(self, placement: Placement, epoch: int, device: torch.device) -> None:
        self._device = device
        self.num_ranks = placement.num_ranks
        self._num_experts = placement.num_logical_experts
        self.epoch = epoch
        self.phy2log: NDArray[np.int32] = placement.phy2log.copy()
        """(L, S) installed map."""
        self.tables = [self._table(row) for row in self.phy2log]

    def build(
        self, layers: Sequence[int], rows: NDArray[np.int32], epoch: int
    ) -> tuple[tuple[int, ...], NDArray[np.int32], list[RouteTable], int]:
        """Prepare the input of `install`, outside the step."""
        return tuple(layers), rows.copy(), [self._table(row) for row in rows], epoch

    def install(
        self, built: tuple[tuple[int, ...], NDArray[np.int32], list[RouteTable], int]
    ) -> None:
        """Use the new rows from the next step on."""
        layers, rows, tables, epoch = built
        for layer, row, table in zip(layers, rows, tables, strict=True):
            self.phy2log[layer] = row
            self.tables[layer] = table
        self.epoch = epoch

    def destinations(self, layer: int, chosen: Tensor, token_hash: Tensor) -> Tensor:
        """Return the slot of each choice; a hash of the token's index chooses the replica.

        Args:
            layer: the layer.
            chosen: (n, k) int64 experts.
            token_hash: (n,) int64 >= 0.

        Returns:
            (n, k) int64 global slots.
        """
        table = self.tables[layer]
        replica = token_hash[:, None] % table.replicas[chosen]
        return table.slots[chosen, replica]

    def misrouted(self) -> list[tuple[int, int, int]]:
        """Return (layer, expert, slot) of each table entry whose slot does not have the expert."""
        wrong = []
        for layer, table in enumerate(self.tables):
            slots = table.slots.cpu().numpy()
            held = self.phy2log[layer][slots]
            for expert, choice in np.argwhere(held != np.arange(self._num_experts)[:, None]):
                if choice < int(table.replicas[expert]):
                    wrong.append((layer, int(expert), int(slots[expert, choice])))
        return wrong

    def _table(self, row: NDArray[np.int32]) -> RouteTable:
        single = Placement(row[None, :], self.num_ranks, self._num_experts)
        slots, replicas = single.log2phy[0].astype(np.int64), single.logcnt[0].astype(np.int64)
        slots = np.where(slots < 0, slots[:, :1], slots)
        return RouteTable(
            torch.from_numpy(slots).to(self._device), torch.from_numpy(replicas).to(self._device)
        )
