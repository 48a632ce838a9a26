"""A process of one rank: the real agent, what surrounds it in an engine, and its stream.

It is the agent's link: it takes what the agent sends, and hands it what a controller sends.
"""

import dataclasses

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.build import AgentParts
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.network_thread import NetworkThread
from evenkeel_moe.agent.ports import GateFailed
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol import messages as msg
from tests.sim.checks import AGENT_ERROR, NO_LOCK
from tests.sim.engine import SlotMemory, Tables
from tests.sim.network import Beat, NotLeading, Stream, describe
from tests.sim.threads import SimThreads


def watched(rank, participant_type: type, gate_type: type) -> tuple[type, type]:
    """Return both machines, changed for one rank.

    A thread that uses them without the agent's lock may see half of what another thread does.
    """
    world = rank.world

    def check(what: str) -> None:
        if rank.agent is not None and not rank.agent._lock.mine:
            world.checks.fail(NO_LOCK, f"rank {rank.rank} calls {what} without the agent's lock")

    class WatchedParticipant(participant_type):  # type: ignore[misc]
        def handle(self, event, now):
            check("Participant.handle")
            before = self.state
            actions = super().handle(event, now)
            if self.state is not before:
                rank.told(f"rank is {self.state}")
            return actions

        def snapshot(self, now):
            check("Participant.snapshot")
            return super().snapshot(now)

    class WatchedGate(gate_type):  # type: ignore[misc]
        def begin_poll(self, now):
            check("Gate.begin_poll")
            state = rank.agent._participant.state
            rank.told("rank polls armed" if state == "armed" else "rank polls")
            vector = super().begin_poll(now)
            if vector[-1] == 1:
                rank.told("rank polls to drop")
            return vector

        def handle(self, event, now):
            check("Gate.handle")
            return super().handle(event, now)

        def request_rebuild(self, serial):
            check("Gate.request_rebuild")
            super().request_rebuild(serial)

    return WatchedParticipant, WatchedGate


GATE_TIMEOUT_S = 3.0
"""A poll that takes longer is an error; pauses of a rank can be longer."""
FAILING_SAVES = 0.02
"""Probability that a save fails; the rank goes on without it."""
SILENCE_S = 1.5
"""A rank that hears nothing for this long on a stream opens another one."""


class SimNetworkThread(NetworkThread):
    """The agent's network thread without an event loop: the rank is its link."""

    def __init__(self, link, *arguments) -> None:
        super().__init__(link, *arguments)
        self._loop.close()

    def start(self, listener) -> None:
        self._listener = listener

    def send(self, message, stream) -> None:
        self._link.send(message, stream)


class SimRank:
    """One rank: its threads, its agent, its engine's slots and tables, its stream."""

    memory_type: type[SlotMemory] = SlotMemory

    def __init__(self, fleet, rank: int, incarnation: int, placement, epoch, version: int) -> None:
        self.fleet = fleet
        self.world = fleet.world
        self.rank = rank
        self.generation = fleet.generation
        self.incarnation = incarnation
        self.alive = True
        self.left = False
        """True if it ended by itself, because the result of a poll is unknown to it."""
        self.leaves_out = 0
        """The next boundaries that the engine leaves out by mistake."""
        self.threads = SimThreads(self.world)
        self.shape = fleet.shape
        self.map = placement
        self.rows = placement.phy2log.tolist()
        self.epoch = epoch
        self.version = version
        self.memory = self.memory_type(self)
        self.memory.fill()
        self.agent: Agent = None  # type: ignore[assignment]
        self.inbox = self.threads.queue()
        self.stream: Stream | None = None
        self.heard_at = 0.0
        self.wants = 0
        """The replica to connect to next."""

    def make_agent(self) -> None:
        """Make the agent together with the other ranks; on a thread of the rank."""
        fleet, kit = self.fleet, self.world.kit
        poll_every, resolve_after = fleet.gate_numbers(self.rank)
        config = AgentConfig(
            identity=msg.RankIdentity(
                self.world.deployment, EpRank(self.rank), self.generation, self.incarnation
            ),
            shape=self.shape,
            node="n0",
            lineage=fleet.lineages[self.rank] if fleet.lineages else None,
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
            threads=self.threads,
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
            connect=lambda name, _device: fleet.fabric.connect(self.rank, self.threads, name),
            device=fleet.device,
            link=self,
            on_swap=self.save,
            **self.hooks(),
        )
        self.threads.start(self.listen, "link")
        fleet.arrived(self)

    def make_tables(self):
        """Return the router's tables, as the agent gets them."""
        return Tables(self)

    def hooks(self) -> dict:
        """Return what the agent calls after a swap."""
        probe = self.memory.probe if self.world.probes else None
        return {"slots_written": self.swapped, "probe": probe}

    def told(self, moment: str) -> None:
        """Report a moment once the running thread waits."""
        self.world.after(0.0, self.tell, moment)

    def tell(self, moment: str) -> None:
        if self.alive:
            self.world.moment(moment, rank=self)

    @property
    def participant(self):
        return self.agent._participant

    @property
    def comm_serial(self) -> int:
        """The number of the transfer communicator on which the gate agreed."""
        return self.agent._gate.transport_serial

    # --- bytes and tables -------------------------------------------------------------------------

    def expert_at(self, layer: int, local: int) -> int:
        """Return the expert that the map has in a slot of this rank; negative for none."""
        return self.rows[layer][self.rank * self.shape.slots_per_rank + local]

    def installed(self, layers, rows, epoch) -> None:
        """Switch the router to new rows, inside the boundary."""
        wave = self.participant.wave
        assert wave is not None
        self.world.note(f"rank {self.rank} swaps {wave.plan_id} to {epoch}")
        self.told("rank swaps")
        self.map = self.map.with_rows(layers, rows)
        self.rows = self.map.phy2log.tolist()
        self.epoch = epoch
        self.fleet.dirty = True
        self.world.checks.installed(self.generation, epoch, self.map, wave)

    def swapped(self, slots) -> None:
        """Renew what the engine derives from slots; slow or failing in some seeds."""
        world = self.world
        self.memory.renew(slots)
        self.threads.sleep((0.03 if world.calm else world.slow_swaps) * world.rng.random())
        if not world.calm and world.rng.random() < world.failing_swaps:
            raise RuntimeError("injected")

    def save(self, record, placement) -> None:
        """Save the placement of a swap, on the transfer thread; in some seeds slowly or never."""
        world = self.world
        self.threads.sleep((0.02 if world.calm else world.slow_saves) * world.rng.random())
        if not world.calm and world.rng.random() < FAILING_SAVES:
            # The rank reports the epoch all the same; a restart comes back from an earlier one.
            world.checks.saved.add((self.generation, record.epoch))
            raise OSError("injected")
        self.fleet.remember(self, record.epoch, placement)

    # --- step boundary ----------------------------------------------------------------------------

    def boundary(self) -> None:
        """Pass the step boundary, on the engine's thread."""
        if self.alive:
            self.threads.start(self.pass_boundary, "engine")

    def pass_boundary(self) -> None:
        try:
            if not self.leaves_boundary_out(self.agent._gate):
                self.take_step()
        except GateFailed as error:
            self.leave(f"{error.reason}: {error}")
            return
        self.fleet.boundary_done(self)

    def take_step(self) -> None:
        self.agent.step_boundary(self.fleet.steps)

    def leaves_boundary_out(self, gate) -> bool:
        """Return True if the engine leaves this boundary out by mistake.

        Never that of a swap: then only an engine whose exchange carries the epoch notices (R8).
        """
        if not self.leaves_out or (gate.polling and gate.calls + 1 >= gate.next_due):
            return False
        self.leaves_out -= 1
        return True

    # --- events of the engine ---------------------------------------------------------------------

    def disable(self) -> None:
        """Refuse every wave until the group restarts."""
        if self.alive:
            self.agent.disable_migration("injected")
            self.beat()

    def request_reload(self) -> None:
        """Ask the agent for a reload, on a thread of the engine."""
        if self.alive:
            self.threads.start(self.wait_for_reload, "reload")

    def wait_for_reload(self) -> None:
        self.agent.request_reload().wait()
        self.fleet.reload_permitted(self)

    def finish_reload(self) -> None:
        """Register the weights that were loaded; collective, on a thread of the rank."""
        self.agent.finish_reload(self.version)
        self.fleet.loading -= 1

    # --- the stream -------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open a stream, on the thread of the link."""
        if self.alive:
            self.inbox.put((None, None))

    def on_message(self, stream: Stream, message) -> None:
        """Queue a controller's message for the thread of the link, also after its stream broke."""
        if not self.alive:
            return
        if isinstance(message, NotLeading):
            self.on_stream_closed(stream)
            return
        if stream is self.stream:
            self.heard_at = self.world.now
        if self.world.trace_lines is not None:
            self.world.note(f"rank {self.rank} <- {describe(message)}")
        self.inbox.put((stream.number, message))

    def listen(self) -> None:
        """Hand messages to the agent, one after another; the thread of the link."""
        while True:
            number, message = self.inbox.get()
            if number is None:
                self.say_hello()
            else:
                self.agent.received(number, message)

    def say_hello(self) -> None:
        """Open a stream to a replica and say hello; repeat until it works."""
        world = self.world
        if not self.alive or self.stream is not None:
            return
        replica = world.replicas[self.wants % len(world.replicas)]
        if not replica.alive or (self.rank, replica.name) in world.network.cuts:
            self.wants += 1
            world.after(0.2 + 0.2 * world.rng.random(), self.connect)
            return
        # The agent may wait for its lock, and send meanwhile.
        hello = dataclasses.replace(self.agent.hello(), free_bytes=0)
        if not self.alive or self.stream is not None:
            return
        self.stream = world.network.open(self, replica)
        world.network.to_replica(self.stream, hello)
        self.heard_at = world.now
        world.after(SILENCE_S, self.watch, self.stream)

    def send(self, message, stream: int | None) -> None:
        """Send a message on the open stream; drop it if `stream` is another one."""
        if not self.alive or self.stream is None or stream not in (None, self.stream.number):
            return
        self.told(f"rank sends {type(message).__name__}")
        self.world.network.to_replica(self.stream, message)

    def beat(self, stopping: bool = False) -> None:
        """Send telemetry."""
        if self.stream is not None:
            beat = Beat(self.world.now, self.agent.trouble, stopping)
            self.world.network.send(self.stream, self.stream.replica.on_message, beat)

    def abandon(self) -> None:
        """Connect to another replica; the old stream stays open for a while."""
        if self.stream is not None:
            self.world.after(4.0 * self.world.rng.random(), self.world.network.cut, self.stream)
            self.stream = None
            self.wants += 1
            self.world.after(0.2 * self.world.rng.random(), self.connect)

    def watch(self, stream: Stream) -> None:
        """Connect to another replica if nothing was heard for long, not even heartbeats."""
        if self.stream is not stream or not self.alive:
            return
        if self.world.now - self.heard_at >= SILENCE_S:
            self.abandon()
        else:
            self.beat()
            self.world.after(SILENCE_S, self.watch, stream)

    def on_stream_closed(self, stream: Stream) -> None:
        """Note that a stream has ended, and open another one."""
        uses = self.alive and self.stream is stream
        if uses:
            self.agent.lost(stream.number)
        stream.broken = True
        self.world.network.streams.pop(stream.number, None)
        if uses:
            self.stream = None
            self.wants += 1
            self.world.after(0.05 + 0.2 * self.world.rng.random(), self.connect)

    # --- ends -------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Stop the process for so long, as a debugger or a full disk does."""
        if self.alive:
            self.world.note(f"rank {self.rank} is paused for {seconds:.1f} s")
            self.threads.pause(seconds)

    def leave(self, why: str) -> None:
        """Leave the group; the engine restarts it."""
        if self.alive:
            if "could not take" in why:
                self.world.checks.fail(AGENT_ERROR, f"rank {self.rank}: {why}")
            self.world.note(f"rank {self.rank} leaves: {why}")
            self.left = True
            self.die()

    def die(self, planned: bool = False) -> None:
        """End the process; if planned, its last heartbeat says so, and may be lost."""
        if not self.alive:
            return
        self.alive = False
        self.threads.end()
        if planned:
            self.beat(stopping=True)
        if self.stream is not None:
            self.world.network.cut(self.stream)
        self.fleet.fabric.died(self.rank)
        self.fleet.broken()
