"""One deployment on one rank, with the real agent: what surrounds it, and its stream."""

import dataclasses

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.build import AgentParts
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.network_thread import NetworkThread
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol import messages as msg
from tests.sim.agents.engine import SlotMemory, Tables
from tests.sim.agents.watch import watched
from tests.sim.network import Stream, describe
from tests.sim.rank_stream import RankStream

GATE_TIMEOUT_S = 3.0
"""A poll that takes longer is an error; pauses of a rank can be longer."""
FAILING_SAVES = 0.02
"""Probability that a save fails; the rank goes on without it."""


class SimNetworkThread(NetworkThread):
    """The agent's network thread without an event loop: the site is its link."""

    def __init__(self, link, *arguments) -> None:
        super().__init__(link, *arguments)
        self._loop.close()

    def start(self, listener) -> None:
        self._listener = listener

    def send(self, message, stream) -> None:
        self._link.send(message, stream)


class AgentSite(RankStream):
    """One deployment on one rank: its agent, slots and tables. It is the agent's link."""

    memory_type: type[SlotMemory] = SlotMemory

    def __init__(self, rank, deployment, placement, epoch, version) -> None:
        super().__init__(rank, deployment)
        self.shape = rank.fleet.shapes[deployment]
        self.map = placement
        self.rows = placement.phy2log.tolist()
        self.epoch = epoch
        self.version = version
        self.memory = self.memory_type(self)
        self.memory.fill()
        self.agent: Agent = None  # type: ignore[assignment]
        self.inbox = rank.threads.queue()

    def make_agent(self) -> None:
        """Make the agent, together with the other ranks; on a thread of the rank."""
        rank, fleet, kit = self.rank, self.rank.fleet, self.world.kit
        poll_every, resolve_after = fleet.gate_numbers(rank.rank)
        config = AgentConfig(
            identity=msg.RankIdentity(
                self.deployment, EpRank(rank.rank), rank.generation, rank.incarnation
            ),
            shape=self.shape,
            node="n0",
            weights_version=self.version,
            staging_bytes=fleet.staging_experts * self.shape.bytes_per_expert,
            poll_every=poll_every,
            resolve_after=resolve_after,
            gate_timeout_s=GATE_TIMEOUT_S,
            drop_after_s=fleet.drop_after_s,
            ring_steps=8,
        )
        participant, gate = watched(self, kit.participant, kit.gate)
        parts = AgentParts(
            threads=rank.threads,
            participant=participant,
            gate=gate,
            barrier=kit.barrier,
            worker=kit.worker,
            transport=kit.transport,
            network=SimNetworkThread,
        )
        self.agent = type("Agent", (kit.agent,), {"parts": parts})(
            config,
            self.map,
            self.epoch,
            self.memory,
            self.make_tables(),
            connect=lambda name, _device: fleet.fabric.connect(rank.rank, rank.threads, name),
            device=fleet.device,
            link=self,
            on_swap=self.save,
            **self.hooks(),
        )
        rank.threads.start(self.listen, "link")

    def make_tables(self):
        """Return the router's tables, as the agent gets them."""
        return Tables(self)

    def hooks(self) -> dict:
        """Return what the agent calls after a swap."""
        probe = self.memory.probe if self.world.probes else None
        return {"slots_written": self.swapped, "probe": probe}

    # --- bytes and tables -------------------------------------------------------------------------

    def expert_at(self, layer: int, local: int) -> int:
        """Return the expert that the map has in a slot of this rank; negative for none."""
        return self.rows[layer][self.rank.rank * self.shape.slots_per_rank + local]

    def read(self, layer: int, local: int):
        """Return the (version, layer, expert) whose bytes a slot holds."""
        return self.memory.read(layer, local)

    def fill(self) -> None:
        self.memory.fill()

    def installed(self, layers, rows, epoch) -> None:
        """Switch the router to new rows, inside the boundary."""
        wave = self.agent._participant.wave
        assert wave is not None
        self.world.note(f"rank {self.rank.rank} swaps {wave.plan_id} to {epoch}")
        self.rank.told("rank swaps", self)
        self.map = self.map.with_rows(layers, rows)
        self.rows = self.map.phy2log.tolist()
        self.epoch = epoch
        self.rank.fleet.dirty = True
        self.world.checks.installed(self.deployment, self.rank.generation, epoch, self.map, wave)

    def swapped(self, slots) -> None:
        """Renew what the engine derives from slots; slow or failing in some seeds."""
        world = self.world
        self.memory.renew(slots)
        self.rank.threads.sleep((0.03 if world.calm else world.slow_swaps) * world.rng.random())
        if not world.calm and world.rng.random() < world.failing_swaps:
            raise RuntimeError("injected")

    def save(self, record, placement) -> None:
        """Save the placement of a swap, on the transfer thread; in some seeds slowly or never."""
        world, rank = self.world, self.rank
        rank.threads.sleep((0.02 if world.calm else world.slow_saves) * world.rng.random())
        if not world.calm and world.rng.random() < FAILING_SAVES:
            # The rank reports the epoch all the same; a restart comes back from an earlier one.
            world.checks.saved.add((self.deployment, rank.generation, record.epoch))
            raise OSError("injected")
        rank.fleet.remember(self, record.epoch, placement)

    # --- events of the engine ---------------------------------------------------------------------

    @property
    def participant(self):
        return self.agent._participant

    @property
    def trouble(self) -> str:
        return self.agent.trouble

    def why_refusing(self) -> str:
        return self.agent.trouble

    def disable(self) -> None:
        """Refuse every wave until the group restarts."""
        if self.rank.alive:
            self.agent.disable_migration("injected")
            self.beat()

    def old_news(self) -> list:
        """Return nothing: threads of ended waves report by themselves here."""
        return []

    def feed(self, event) -> None:
        """Ask the agent for a reload."""
        assert isinstance(event, msg.ReloadRequested)
        if self.rank.alive:
            self.rank.threads.start(self.ask_to_reload, "reload")

    def ask_to_reload(self) -> None:
        self.agent.request_reload().wait()
        self.rank.fleet.reload_permitted(self)

    def finish_reload(self) -> None:
        """Register the weights that were loaded; collective, on a thread of the rank."""
        self.agent.finish_reload(self.version)
        self.rank.fleet.loading -= 1

    # --- the stream: this is the agent's link -----------------------------------------------------

    def hello(self) -> msg.Hello:
        return dataclasses.replace(self.agent.hello(), free_bytes=0)

    def connect(self) -> None:
        """Open a stream on the thread of the link."""
        if self.rank.alive:
            self.inbox.put((None, None))

    def take(self, stream: Stream, message) -> None:
        """Queue a controller's message for the thread of the link."""
        if stream is self.stream:
            self.heard_at = self.world.now
        if self.world.trace_lines is not None:
            self.world.note(f"rank {self.rank.rank} <- {describe(message)}")
        self.inbox.put((stream.number, message))

    def listen(self) -> None:
        """Hand messages to the agent, one after another; the thread of the link."""
        while True:
            number, message = self.inbox.get()
            if number is None:
                super().connect()
            else:
                self.agent.received(number, message)

    def send(self, message, stream: int | None) -> None:
        """Send a message on the open stream; drop it if `stream` is another one."""
        if not self.rank.alive or self.stream is None or stream not in (None, self.streaming):
            return
        self.rank.told(f"rank sends {type(message).__name__}", self)
        self.world.network.to_replica(self.stream, message)

    def closed(self, stream: Stream) -> None:
        if self.rank.alive and self.stream is stream:
            self.agent.lost(stream.number)
        super().closed(stream)
