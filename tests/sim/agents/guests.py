"""Ranks with real agents in an engine that copies its experts itself, one layer at each step."""

from functools import partial
from typing import Any

import torch

from evenkeel_moe.errors import Reason, Unavailable
from tests.sim.agents.engine import HEAD_BYTES, TAIL, SlotMemory
from tests.sim.agents.fleet import AgentFleet
from tests.sim.agents.rank import AgentRank
from tests.sim.agents.run import AgentWorld, run_agent_seed
from tests.sim.agents.site import AgentSite

REFUSES = 0.05
"""Probability that the engine of one rank refuses a wave."""
STALLS = 0.05
"""Probability that the engines of all ranks stop a move half way, until the group restarts."""


class OwnedMemory(SlotMemory):
    """Slots of which each owns its memory."""

    def __init__(self, site) -> None:
        shape = site.shape
        self.site = site
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


class GuestSite(AgentSite):
    """One deployment on one rank. It is the engine's balancer too, a `HostEngine`."""

    memory_type = OwnedMemory

    def make_tables(self):
        self.goal: Any = None
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
        self.world.note(f"rank {self.rank.rank} moves {move.wave.plan_id}")
        self.rank.told("rank swaps", self)
        stray = self.rank.fleet.stray_map(self.deployment, self.participant)
        self.goal = move.placement if stray is None else stray
        self.todo = list(move.layers)

    def fault(self) -> str | None:
        return None

    def finish(self, move) -> None:
        while self.todo:
            self.switch_layer()

    # --- the engine's own steps -------------------------------------------------------------------

    def switch_layer(self) -> None:
        """Copy and switch one layer; the last one ends the move, on all ranks at this step."""
        layer = self.todo.pop(0)
        self.show(self.map.with_rows((layer,), self.goal.phy2log[layer : layer + 1]))
        for local in range(self.shape.slots_per_rank):
            self.memory.load(layer, local)
        self.moves.layer_switched(layer, 0.001)
        if not self.todo:
            self.end_move()

    def show(self, placement) -> None:
        """Route by another map from now on."""
        self.map, self.rows = placement, placement.phy2log.tolist()
        self.rank.fleet.dirty = True

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
            self.rank.fleet.remember(self, self.epoch, self.map)

    def went_to(self, epoch, wave) -> None:
        self.epoch = epoch
        checks, generation = self.world.checks, self.rank.generation
        checks.installed(self.deployment, generation, epoch, self.map, wave)

    # --- reloads ----------------------------------------------------------------------------------

    def replace_weights(self, version: int) -> None:
        """Load other weights; collective, on a thread of the rank between two steps."""
        try:
            self.moves.begin_reload()
        except Unavailable as error:  # GateFailed is one of them.
            self.rank.leave(f"no reload: {error}")
            return
        self.version = version
        self.fill()
        self.moves.end_reload()
        self.rank.fleet.loading -= 1


class GuestRank(AgentRank):
    """A rank whose engine switches a layer before the agent's boundary."""

    site_type = GuestSite

    def take_step(self, site) -> None:
        if site.todo and not self.fleet.is_stalled(site.moves.move.wave):
            site.switch_layer()
        super().take_step(site)


class GuestFleet(AgentFleet):
    """The engine of `GuestRank`s."""

    rank_type = GuestRank

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self._stalled: dict = {}

    def is_stalled(self, wave) -> bool:
        """Return True if the engines of all ranks go no further with a wave."""
        key = self.generation, wave
        if key not in self._stalled:
            self._stalled[key] = not self.world.calm and self.world.rng.random() < STALLS
        return self._stalled[key]

    def begin_reload(self, deployment, announced: bool) -> None:
        """Load before the next step: `EngineMoves.begin_reload` asks by itself."""
        del announced
        if not self.loading and not self.restarting and not self._unasked:
            self._unasked.append(deployment)

    def load(self, deployment, announced: bool) -> None:
        if not all(rank.alive for rank in self.ranks):
            return
        self.versions[deployment] += 1
        for rank in self.ranks:
            self.loading += 1
            load = partial(rank.sites[deployment].replace_weights, self.versions[deployment])
            rank.threads.start(load, "engine")
        self.dirty = True


class GuestWorld(AgentWorld):
    """A whole deployment of an engine that moves its experts itself."""

    fleet_type = GuestFleet


run_guest_seed = partial(run_agent_seed, world_type=GuestWorld)
