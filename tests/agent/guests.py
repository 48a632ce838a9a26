"""A toy engine that copies experts itself, and two ranks of it with their agents."""

from typing import Any

import torch

from evenkeel_moe.agent import AgentConfig, EngineMoves
from evenkeel_moe.protocol.messages import Commit, Vote
from tests.agent.fleet import PortLink, make_agent
from tests.agent.ranks import (
    LEADER,
    Group,
    ToyWeights,
    expert_tensors,
    identity_of,
    prepare_for,
    run_ranks,
    shape_of,
    two_rank_placements,
)
from tests.waiting import deadline, wait_until

OLD, NEW = two_rank_placements()


class ToyEngine:
    """Copies one layer per step; the attributes below make it misbehave."""

    def __init__(self, placement, rank):
        self.map = placement.phy2log.copy()
        self.rank = rank
        self.weights = ToyWeights(placement, rank)
        self.version = 0
        self.agent: Any = None
        self.moves: Any = None
        self.todo: list[int] = []
        self.target: Any = None
        self.broken = ""
        self.no = None
        self.stop_after = None
        self.corrupt = False
        self.forgets = False
        per_rank = placement.slots_per_rank
        # A scale for each slot that the engine does not declare.
        self.scale = 1.0 + placement.phy2log[:, rank * per_rank : (rank + 1) * per_rank]
        self.wrong_map = False
        self.target_map = None

    def refusal(self, prepare, new):
        return self.no

    def begin(self, move):
        self.target, self.todo = move.placement.phy2log, list(range(len(self.map)))
        if self.target_map is not None:
            self.target = self.target_map

    def fault(self):
        return self.broken or None

    def step(self):
        self.switch_layer()
        self.agent.step_boundary()

    def finish(self, move):
        while self.todo and self.stop_after != 0:
            self.switch_layer()

    def switch_layer(self):
        if self.todo and self.stop_after != 0:
            layer = self.todo.pop(0)
            self.stop_after = None if self.stop_after is None else self.stop_after - 1
            self.map[layer] = self.target[layer]
            self._copy(layer)
            self.moves.layer_switched(layer, 0.001)
            if not self.todo:
                if self.wrong_map:
                    self.map[0, 0] = 1
                self.moves.move_finished(self.map)

    def _copy(self, layer):
        per_rank = self.map.shape[1] // 2
        for local in range(per_rank):
            expert = int(self.map[layer, self.rank * per_rank + local])
            if expert >= 0:
                wrong = expert + 1 if self.corrupt else expert
                source = expert_tensors(layer, wrong, self.version)
                for have, want in zip(self.weights.slots[layer, local], source, strict=True):
                    have.copy_(want)
                if not self.forgets:
                    self.scale[layer, local] = 1.0 + expert

    def answer(self, layer, local):
        """Return what the expert in a slot computes for one token."""
        matrix = self.weights.slots[layer, local][0]
        return torch.ones(len(matrix)) @ matrix * float(self.scale[layer, local])

    def load(self, version):
        """Replace the weights in all slots."""
        self.version = version
        for layer in range(len(self.map)):
            self._copy(layer)


class Guests:
    """Two ranks on threads that run steps in lockstep."""

    def __init__(self, old, hooks=(), answers=False, gate=(3, 2), **settings):
        self.old, self.gate = old, gate
        self.hooks = dict(hooks)
        self.answers = answers
        self.group = Group(2)
        self.engines = [ToyEngine(old, rank) for rank in range(2)]
        self.links = [PortLink() for _ in range(2)]
        self.settings = {"stall_after_s": 0.05, "stall_after_steps": 10, **settings}
        for engine in self.engines:
            engine.moves = EngineMoves(engine, **self.settings)
        self.moves = [engine.moves for engine in self.engines]
        self.agents = run_ranks(2, self._make)
        for engine, agent, link in zip(self.engines, self.agents, self.links, strict=True):
            engine.agent = agent
            assert link.ready.wait(deadline(20))
            link.accept()

    def _make(self, rank):
        config = AgentConfig(
            identity=identity_of(rank),
            shape=shape_of(self.old),
            node="node-0",
            staging_bytes=1 << 20,
            poll_every=self.gate[0],
            resolve_after=self.gate[1],
            gate_timeout_s=2.0,
            canary_step_s=1.0,
        )
        return make_agent(
            config,
            self.old,
            self.group,
            self.engines[rank].weights,
            self.moves[rank],
            self.links[rank],
            probe=self.engines[rank].answer if self.answers else None,
            **self.hooks,
        )

    def let(self, **attributes):
        """Set attributes of both engines."""
        for engine in self.engines:
            vars(engine).update(attributes)

    def steps(self, count):
        for _ in range(count):
            run_ranks(2, lambda rank: self.engines[rank].step())

    def steps_until(self, ask):
        """Run steps until the answer is true."""
        wait_until(lambda: ask() or self.steps(1), every_s=0.005)

    def say(self, message):
        for link in self.links:
            link.say(message)

    def order(self, new):
        prepare = prepare_for(self.old, new)
        return prepare, self.send(prepare)

    def send(self, prepare):
        """Send a Prepare, and a Commit after a yes of every rank; return the votes."""
        self.say(prepare)
        votes = [link.expect(Vote) for link in self.links]
        if all(vote.yes for vote in votes):
            self.say(Commit(LEADER, prepare.wave))
        return votes

    def troubles(self):
        return [agent.trouble for agent in self.agents]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for agent in self.agents:
            agent.close()
