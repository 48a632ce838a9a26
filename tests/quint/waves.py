"""Real Prepares and placements for the waves of a model's run."""

import random
from typing import Any

import numpy as np

from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Leader, Prepare
from tests.quint.values import Record
from tests.sim.copies import checksum

_EXPERTS, _SLOTS_PER_RANK = 8, 6


class Waves:
    """The waves and placements of one run.

    A wave writes every slot that is not the first of its expert, from the first one. So its copies
    fit every placement, and a rank can only refuse it for its epoch (R3), weights or generation.

    Args:
        ranks: the number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.shape = ModelShape(1, _EXPERTS, ranks, _SLOTS_PER_RANK, 1, bytes_per_expert=8)
        spare = self.shape.num_slots - _EXPERTS
        row = np.array([[*range(_EXPERTS), *[0] * spare]], np.int32)
        self.placements = {0: Placement(row, ranks, _EXPERTS)}
        """By the model's name of a placement."""
        self.places = {self.placements[0].digest: 0}
        """The names by digest."""
        self._waves: dict[int, tuple[WaveKey, Epoch, Wave]] = {}

    def begin(self, wave: Record, generation: int) -> None:
        """Make the real wave that a leader of the model begins.

        Args:
            wave: the model's wave.
            generation: the generation that the leader knows.
        """
        name, epoch = wave["id"], Epoch(wave["base"])
        plan = PlanId(f"w{name}")
        key = WaveKey(Generation(f"g{generation}"), plan, 0, wave["version"], epoch)
        rng, placement = random.Random(name), self.placements[0]
        while placement.digest in self.places:
            new = placement.phy2log[0].tolist()
            new[_EXPERTS:] = [rng.randrange(_EXPERTS) for _ in new[_EXPERTS:]]
            row = np.array([new], np.int32)
            placement = placement.with_rows((0,), row)
        self.placements[name], self.places[placement.digest] = placement, name
        batches = tuple(
            (Transfer(0, expert, expert, slot, self.shape.bytes_per_expert),)
            for slot, expert in enumerate(new)
            if slot >= _EXPERTS
        )
        self._waves[name] = key, epoch, Wave(0, (0,), row, batches)

    def key(self, name: int) -> WaveKey:
        """Return the real key of a wave."""
        return self._waves[name][0]

    def prepare(self, name: int, leader: Leader) -> Prepare:
        """Return the Prepare of a wave."""
        key, epoch, body = self._waves[name]
        sums = tuple(
            checksum((key.weights_version, t.layer, t.logical_expert)) for t in body.transfers
        )
        return Prepare(leader, key, epoch, body, sums, batch_deadline_s=1.0)

    def checksums(self, version: int) -> tuple[int, ...]:
        """Return what a rank registers after the load of a weights version."""
        return tuple(checksum((version, 0, expert)) for expert in range(_EXPERTS))

    def named(self) -> dict[Any, int]:
        """Return the model's name of each wave's key."""
        return {key: name for name, (key, _epoch, _body) in self._waves.items()}
