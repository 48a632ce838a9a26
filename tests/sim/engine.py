"""An engine's memory for experts and its tables, with real bytes in real tensors."""

import numpy as np
import torch

HEAD_BYTES, TAIL = 4, 3


def expert_tensors(version: int, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 10 bytes of an expert, in two tensors that each name it."""
    head = torch.tensor([version % 256, layer, expert, (version + layer + expert) % 256])
    tail = torch.tensor([version, 100 + layer, 200 + expert])
    return head.to(torch.uint8), tail.to(torch.int16)


def expert_of(tensors) -> tuple:
    """Return (version, layer, expert) of an expert's tensors; ("corrupt",) for any other bytes."""
    head, tail = (tensor.tolist() for tensor in tensors)
    version, layer, expert = tail[0], tail[1] - 100, tail[2] - 200
    same = head == [version % 256, layer, expert, (version + layer + expert) % 256]
    return (version, layer, expert) if same else ("corrupt",)


class SlotMemory:
    """The slots of one rank; implements `ExpertWeights`. A pool gives empty slots no memory."""

    def __init__(self, rank) -> None:
        self.rank = rank
        shape = rank.shape
        pool = shape.pool_slots_per_rank
        count = pool if pool is not None else shape.num_layers * shape.slots_per_rank
        self.buffers = [
            (torch.zeros(HEAD_BYTES, dtype=torch.uint8), torch.zeros(TAIL, dtype=torch.int16))
            for _ in range(count)
        ]
        self.table: dict = {}
        """(layer, local slot) -> buffer."""
        self.derived: dict = {}
        """(layer, local slot) -> what the engine derived from the bytes there."""
        self.free = list(range(count))
        slots = [
            (layer, local)
            for layer in range(shape.num_layers)
            for local in range(shape.slots_per_rank)
        ]
        self.reserve([slot for slot in slots if not shape.pooled or rank.expert_at(*slot) >= 0])

    def tensors(self, layer: int, local_slot: int):
        return self.buffers[self.table[layer, local_slot]]

    def reserve(self, slots) -> bool:
        new = [slot for slot in slots if slot not in self.table]
        if len(new) > len(self.free):
            return False
        for slot in new:
            self.table[slot] = self.free.pop(0)
        return True

    def release(self, slots) -> None:
        """Free slots, at a swap or after a cancelled wave."""
        for slot in slots if self.rank.shape.pooled else ():
            self.free.append(self.table.pop(slot))

    def renew(self, slots) -> None:
        """Derive what the engine derives from the bytes of slots."""
        for slot in slots:
            self.derived[slot] = expert_of(self.tensors(*slot))

    def probe(self, layer: int, local_slot: int) -> torch.Tensor:
        """Return what the expert in a slot computes, from its bytes and what is derived."""
        head, tail = self.tensors(layer, local_slot)
        derived = self.derived[layer, local_slot]
        return torch.cat([head.to(torch.int64), tail.to(torch.int64), torch.tensor(derived[1:])])

    def read(self, layer: int, local_slot: int) -> tuple | None:
        """Return the (version, layer, expert) of a slot; other words if its content is wrong."""
        if (layer, local_slot) not in self.table:
            return None
        found = expert_of(self.tensors(layer, local_slot))
        return found if found == self.derived.get((layer, local_slot)) else (*found, "not renewed")

    def fill(self) -> None:
        """Load every slot of the map from the checkpoint."""
        for layer, local in self.table:
            self.load(layer, local)

    def load(self, layer: int, local: int, version: int | None = None) -> None:
        """Load the expert that the map has in a slot, if it has one, from the checkpoint.

        `version` is that of the weights; None for the present one.
        """
        expert = self.rank.expert_at(layer, local)
        if expert >= 0:
            version = self.rank.version if version is None else version
            loaded = expert_tensors(version, layer, expert)
            for tensor, value in zip(self.tensors(layer, local), loaded, strict=True):
                tensor.copy_(value)
            self.renew([(layer, local)])


class Tables:
    """The router's rows on one rank; implements `MapInstaller`."""

    def __init__(self, rank) -> None:
        self.rank = rank

    def build(self, layers, rows, epoch: int):
        """Build the tables, which takes time: the engine goes on meanwhile."""
        self.rank.threads.sleep(0.01 * self.rank.world.rng.random())
        return tuple(layers), np.array(rows, np.int32), epoch

    def install(self, built) -> None:
        self.rank.installed(*built)
