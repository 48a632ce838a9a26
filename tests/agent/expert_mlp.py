"""Experts of plain torch layers in the slots of two ranks, and moves that leave things behind."""

from functools import partial

import numpy as np
import torch

from evenkeel_moe.agent.canary_runs import CanaryRuns, canary_token
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from tests.agent.ranks import CPU, GENERATION, Group, run_ranks

HIDDEN, FFN = 32, 48
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.bfloat16,  # computes in bfloat16, from one byte per weight and a scale
}
PARTS = ("w_in", "w_out", "scale", "packed")


class Slots:
    """The slots of one rank: gated experts with a scale, and a layout that is derived at load.

    Args:
        kind: one of DTYPES.
        map_: (L, S) experts.
    """

    def __init__(self, kind, map_, rank, per_rank):
        self.dtype, self.quantized = DTYPES[kind], kind == "float8"
        stored = torch.float8_e4m3fn if self.quantized else self.dtype
        layers = len(map_)
        self.w_in = torch.zeros((layers, per_rank, 2 * FFN, HIDDEN), dtype=stored)
        self.w_out = torch.zeros((layers, per_rank, HIDDEN, FFN), dtype=stored)
        self.scale = torch.ones((layers, per_rank), dtype=torch.float32)
        # What a kernel reads in place of `w_out`: its columns in blocks, as after a swizzle.
        self.packed = torch.zeros((layers, per_rank, FFN, HIDDEN), dtype=stored)
        for layer in range(layers):
            for local in range(per_rank):
                self.load(layer, local, int(map_[layer][rank * per_rank + local]))

    def load(self, layer, local, expert):
        seed = torch.Generator().manual_seed(1000 * layer + expert)
        for name, fan_in in (("w_in", HIDDEN), ("w_out", FFN)):
            target = getattr(self, name)[layer, local]
            target.copy_(torch.randn(target.shape, generator=seed) / fan_in**0.5)
        self.scale[layer, local] = 0.9 + 0.02 * expert
        self.derive(layer, local)

    def derive(self, layer, local):
        self.packed[layer, local] = self.w_out[layer, local].T

    def answer(self, layer, local):
        """Compute one expert as a kernel does: from its packed weights, scaled at the end."""
        token = canary_token(HIDDEN, self.dtype, CPU)
        gate, up = (self.w_in[layer, local].to(self.dtype) @ token).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        return (inner @ self.packed[layer, local].to(self.dtype)) * self.scale[layer, local].to(
            self.dtype
        )

    def take(self, layer, local, source, parts=PARTS):
        """Copy (rank's slots, local) of another rank into a slot."""
        slots, there = source
        for name in parts:
            getattr(self, name)[layer, local].copy_(getattr(slots, name)[layer, there])

    def snapshot(self):
        """Return a copy, from which experts are taken while slots are written."""
        copy = object.__new__(Slots)
        copy.__dict__ = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.__dict__.items()
        }
        return copy


def mlp_ranks(kind, map_, experts):
    """Return two ranks with `Slots`.

    Args:
        kind: one of DTYPES.
        map_: (L, S) the map at the start.
        experts: E.
    """
    per_rank = len(map_[0]) // 2
    return Ranks([Slots(kind, map_, rank, per_rank) for rank in range(2)], map_, experts)


class Ranks:
    """Ranks whose experts trade slots, with a canary on each; moves are done at once.

    Args:
        slots: of each rank; see `Slots`.
        map_: (L, S) the map at the start.
        experts: E.
    """

    def __init__(self, slots, map_, experts):
        self.slots, size = slots, len(slots)
        self.placement = Placement(np.array(map_, np.int32), size, experts)
        self.per_rank = self.placement.slots_per_rank
        self.told, self.alarms, self.waves = [], [], 0
        self.group = Group(size)
        self.groups = run_ranks(size, lambda rank: self.group.connect(rank, "canary"))
        self.canaries = [
            CanaryRuns(
                partial(self._answer, rank),
                rank,
                CPU,
                1.0,
                now=lambda: 0.0,
                later=lambda job: job(),
                tell=self.told.append,
                alarm=self.alarms.append,
            )
            for rank in range(size)
        ]

    def _answer(self, rank, layer, local):
        return self.slots[rank].answer(layer, local)

    def register(self):
        return run_ranks(
            len(self.slots),
            lambda rank: self.canaries[rank].register(self.groups[rank], self.placement),
        )

    def move(self, map_, copy=None):
        """Go to another map; `copy(slots, layer, local, source)` replaces the copy of a slot."""
        old, before = self.placement, [slots.snapshot() for slots in self.slots]
        new = Placement(np.array(map_, np.int32), old.num_ranks, old.num_logical_experts)
        for layer, slot in np.argwhere(old.phy2log != new.phy2log).tolist():
            held = int(np.flatnonzero(old.phy2log[layer] == new.phy2log[layer, slot])[0])
            source = before[held // self.per_rank], held % self.per_rank
            rank, local = divmod(slot, self.per_rank)
            (copy or type(self.slots[rank]).take)(self.slots[rank], layer, local, source)
        wave = WaveKey(GENERATION, PlanId(f"plan-{self.waves}"), 0, 1, Epoch(self.waves))
        self.waves += 1
        self.placement = new
        for canary in self.canaries:
            canary.moved(wave, old, new)

    def move_at_random(self, moves, seed=1):
        """Let experts trade slots until so many have moved and answered as before."""
        random = np.random.default_rng(seed)
        while sum(told.same for told in self.told) < moves:
            self.move(self.placement.phy2log[:, random.permutation(self.placement.num_slots)])
            self.ask()
            assert not self.alarms, self.alarms

    def ask(self):
        for canary in self.canaries:
            canary.ask(self.placement)
