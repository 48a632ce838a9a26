"""Ranks in an engine that copies its experts itself, one layer at each step."""

from functools import partial
from typing import Any

import torch

from evenkeel_moe.errors import Reason, Unavailable
from tests.sim.engine import HEAD_BYTES, TAIL, SlotMemory
from tests.sim.fabric import OperationFailed
from tests.sim.fleet import Fleet
from tests.sim.rank import SimRank
from tests.sim.run import FleetWorld, run_seed

REFUSES = 0.05
"""Probability that the engine of one rank refuses a wave."""
STALLS = 0.05
"""Probability that the engines of all ranks stop a move half way, until the group restarts."""
STRAYS = 0.1
"""Probability that the engines of all ranks end a move with another map than the agreed one."""


class OwnedMemory(SlotMemory):
    """Slots of which each owns its memory."""

    def __init__(self, rank) -> None:
        shape = rank.shape
        self.rank = rank
        self.derived: dict = {}
        slots = [
            (n, local) for n in range(shape.num_layers) for local in range(shape.slots_per_rank)
        ]
        self.table = {slot: index for index, slot in enumerate(slots)}
        self.buffers = [
            (torch.zeros(HEAD_BYTES, dtype=torch.uint8), torch.zeros(TAIL, dtype=torch.int16))
            for _ in slots
        ]

    def reserve(self, slots) -> bool:
        return True

    def release(self, slots) -> None:
        pass


class GuestRank(SimRank):
    """A rank whose engine switches a layer before the agent's boundary.

    It is the engine's balancer too, a `HostEngine`.
    """

    memory_type = OwnedMemory

    def make_tables(self):
        self.goal: Any = None
        self.copied_version = self.version
        self.todo: list[int] = []
        self.moves = self.world.kit.moves(self, stall_after_s=1.0, stall_after_steps=8)
        return self.moves

    def hooks(self) -> dict:
        return {}

    # --- HostEngine -------------------------------------------------------------------------------

    def refusal(self, prepare, new):
        refuses = not self.world.calm and self.world.rng.random() < REFUSES
        return (Reason.UNSUPPORTED, "injected") if refuses else None

    def begin(self, move) -> None:
        self.world.note(f"rank {self.rank} moves {move.wave.plan_id}")
        self.told("rank swaps")
        self.goal = self.fleet.goal_of(move, self.map)
        # Its copies may arrive after other weights were loaded.
        self.copied_version = self.version
        self.todo = list(move.layers)

    def fault(self) -> str | None:
        return None

    def finish(self, move) -> None:
        while self.todo:
            self.switch_layer()

    # --- the engine's own steps -------------------------------------------------------------------

    def take_step(self) -> None:
        if self.todo and not self.fleet.is_stalled(self.moves.move.wave):
            self.switch_layer()
        super().take_step()

    def switch_layer(self) -> None:
        """Copy and switch one layer; the last one ends the move, on all ranks at this step."""
        layer = self.todo.pop(0)
        self.map = self.map.with_rows((layer,), self.goal.phy2log[layer : layer + 1])
        self.rows = self.map.phy2log.tolist()
        self.fleet.dirty = True
        for local in range(self.shape.slots_per_rank):
            self.memory.load(layer, local, self.copied_version)
        self.moves.layer_switched(layer, 0.001)
        if not self.todo:
            self.end_move()

    def end_move(self) -> None:
        move = self.moves.move
        assert move is not None
        before = self.agent.epoch
        wave = move.wave if self.map == move.placement else None
        if wave is not None:
            # Before the agent tells the controller.
            self.went_to(before + 1, wave)
        self.moves.move_finished(self.map.phy2log)
        if wave is None and self.agent.epoch != before:
            self.went_to(self.agent.epoch, None)
            self.fleet.remember(self, self.epoch, self.map)

    def went_to(self, epoch, wave) -> None:
        self.epoch = epoch
        self.world.checks.installed(self.generation, epoch, self.map, wave)

    # --- reloads ----------------------------------------------------------------------------------

    def replace_weights(self, version: int) -> None:
        """Load other weights; collective, on a thread of the rank between two steps."""
        try:
            self.moves.begin_reload()
            self.version = version
            self.memory.fill()
            self.moves.end_reload()
        except (Unavailable, OperationFailed) as error:  # GateFailed is one of the first.
            self.leave(f"no reload: {error}")
            return
        self.fleet.loading -= 1


class GuestFleet(Fleet):
    """The engine of `GuestRank`s."""

    rank_type = GuestRank
    ranks: list[GuestRank]  # type: ignore[assignment]

    may_resize = False

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self._stalled: dict = {}
        self._goals: dict = {}
        self._calm = False

    def step(self, generation) -> None:
        self._calm = self.world.calm  # It begins for all ranks before the same step.
        super().step(generation)

    def is_stalled(self, wave) -> bool:
        """Return True if the engines of all ranks go no further with a wave, until the calm."""
        key = self.generation, wave
        if key not in self._stalled:
            self._stalled[key] = self.world.rng.random() < STALLS
        return self._stalled[key] and not self._calm

    def goal_of(self, move, present):
        """Return the map at the end of a move; it is the same on all ranks.

        A stray one is the present map, or that with one layer switched.
        """
        key = self.generation, move.wave
        if key not in self._goals:
            self._goals[key], random = move.placement, self.world.rng.random
            if not self.world.calm and random() < STRAYS:
                layer = move.layers[0]
                rows = move.placement.phy2log[layer : layer + 1]
                self._goals[key] = present.with_rows((layer,), rows) if random() < 0.5 else present
        return self._goals[key]

    def begin_reload(self, announced: bool) -> None:
        """Load before the next step: `EngineMoves.begin_reload` asks by itself."""
        del announced
        if not self.loading and not self.restarting:
            self.unasked = True

    def load(self) -> None:
        if not all(rank.alive for rank in self.ranks):
            return
        self.version += 1
        for rank in self.ranks:
            self.loading += 1
            rank.threads.start(partial(rank.replace_weights, self.version), "engine")
        self.dirty = True


class GuestWorld(FleetWorld):
    """A whole deployment of an engine that moves its experts itself."""

    fleet_type = GuestFleet


run_guest_seed = partial(run_seed, world_type=GuestWorld)
