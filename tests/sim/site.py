"""One deployment on one rank: its participant, weight buffers and stream to a replica."""

from collections import deque

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol import messages as msg
from tests.sim.copies import Job
from tests.sim.rank_stream import RankStream

MENDED_S = 0.004
"""An error of the agent that ends at all does so within this time."""


class Site(RankStream):
    """One deployment on one rank: its buffers, its placement and its copies."""

    def __init__(self, rank, deployment, placement, epoch, version) -> None:
        super().__init__(rank, deployment)
        fleet, world = rank.fleet, rank.world
        self.shape = shape = fleet.shapes[deployment]
        self.version = version
        self.epoch = epoch
        self.staging_experts = fleet.staging_experts
        self.install(placement, epoch)
        pool = shape.pool_slots_per_rank
        self.slot_buffers = pool if pool is not None else shape.num_layers * shape.slots_per_rank
        """The number of buffers for slots; the buffers after them are for staging."""
        self.buffers: list = [None] * (self.slot_buffers + self.staging_experts)
        self.table: dict = {}
        """(layer, local slot) -> buffer."""
        self.lay_out()
        self.job: Job | None = None
        self.barrier = world.kit.barrier()
        self.waves: deque = deque(maxlen=4)
        """The waves whose copies were reported recently, for echoes."""
        self.trouble = ""
        """The reason why this rank refuses every wave; empty if it does not."""
        self.participant = world.kit.participant(
            msg.RankIdentity(deployment, EpRank(rank.rank), rank.generation, rank.incarnation),
            shape,
            placement,
            epoch=epoch,
            weights_version=version,
            checksums=fleet.checksums(deployment, version),
            staging_bytes=self.staging_experts * shape.bytes_per_expert,
            drop_after_s=fleet.drop_after_s,
        )

    # --- bytes ------------------------------------------------------------------------------------

    def install(self, placement, epoch) -> None:
        self.map = placement
        self.rows = placement.phy2log.tolist()
        self.epoch = epoch

    def lay_out(self) -> None:
        """Give every slot of the map a buffer, and load it from the checkpoint."""
        shape, base = self.shape, self.rank.rank * self.shape.slots_per_rank
        self.table.clear()
        for layer in range(shape.num_layers):
            for local in range(shape.slots_per_rank):
                if not shape.pooled or self.rows[layer][base + local] >= 0:
                    self.table[layer, local] = len(self.table)
        self.fill()

    def fill(self) -> None:
        """Load every reachable slot from the checkpoint."""
        base = self.rank.rank * self.shape.slots_per_rank
        for (layer, local), buffer in self.table.items():
            expert = self.rows[layer][base + local]
            self.buffers[buffer] = (self.version, layer, expert) if expert >= 0 else None

    def read(self, layer: int, local: int):
        buffer = self.table.get((layer, local))
        return self.buffers[buffer] if buffer is not None else None

    def buffer_for(self, layer: int, local: int, taken: set, body) -> int | None:
        """Return the buffer for a slot's bytes: staging, or for an empty pooled slot a free buffer.

        If a bad plan leaves no free buffer, a buffer that the wave frees is taken.
        """
        in_use = taken | set(self.table.values())
        if (layer, local) in self.table:
            choices = range(self.slot_buffers, len(self.buffers))
        else:
            choices = range(self.slot_buffers)
        free = next((buffer for buffer in choices if buffer not in in_use), None)
        if free is None and (layer, local) not in self.table:
            base = self.rank.rank * self.shape.slots_per_rank
            for changed, row in zip(body.layers, body.rows.tolist(), strict=True):
                for slot in range(self.shape.slots_per_rank):
                    if row[base + slot] < 0 and (changed, slot) in self.table:
                        return self.table[changed, slot]
        return free

    def swap(self, action: msg.Swap) -> None:
        """Copy staging to slots and install the new placement."""
        placement = self.participant.next_placement
        for key, buffer in (self.job.staged if self.job is not None else {}).items():
            if key in self.table:
                self.buffers[self.table[key]] = self.buffers[buffer]
            else:
                self.table[key] = buffer
        self.install(placement, action.epoch)
        base = self.rank.rank * self.shape.slots_per_rank
        if self.shape.pooled:
            for layer, local in list(self.table):
                if self.rows[layer][base + local] < 0:
                    del self.table[layer, local]
        self.job = None
        self.rank.fleet.dirty = True
        self.world.checks.installed(
            self.deployment, self.rank.generation, action.epoch, placement, action.wave
        )

    def hello(self) -> msg.Hello:
        """Return the first message of a stream."""
        part = self.participant
        epoch, digest = self.barrier.told(part.epoch, part.placement.digest)
        return msg.Hello(
            identity=part.identity,
            shape=self.shape,
            node="n0",
            gpu_uuid="",
            epoch=epoch,
            placement_digest=digest,
            weights_version=part.weights_version,
            checksums_digest=str(part.weights_version),
            free_bytes=0,
            staging_bytes=part.staging_bytes,
            gate_digest=self.rank.gate.digest,
            capabilities=frozenset() if part.observe_only else frozenset({"migrate"}),
            highest_term=part.leader.term if part.leader is not None else 0,
        )

    def why_refusing(self) -> str:
        return self.trouble

    # --- shell ------------------------------------------------------------------------------------

    def feed(self, event) -> None:
        """Give the participant a local event."""
        if not self.rank.alive:
            return
        before = self.participant.state
        self.carry(self.participant.handle(event, self.world.now))
        if self.participant.state is not before:
            self.world.moment(f"rank is {self.participant.state}", rank=self.rank, site=self)

    def disable(self) -> None:
        """Refuse every wave from now on, because of an error of the agent, and tell the leader."""
        if self.rank.alive:
            self.trouble = "injected"
            self.feed(msg.MigrationDisabled())
            self.beat()
            if self.world.rng.random() < 0.8:
                self.world.after(MENDED_S * self.world.rng.random(), self.enable)

    def enable(self) -> None:
        """Take waves again: the error has ended."""
        if self.rank.alive and self.trouble:
            self.trouble = ""
            self.feed(msg.MigrationEnabled())
            self.beat()

    def rebalanced(self, placement) -> None:
        """Follow the engine, which moved experts by itself."""
        self.feed(msg.EngineRebalanced(placement))
        self.install(self.participant.placement, self.participant.epoch)
        self.lay_out()
        self.world.checks.installed(
            self.deployment, self.rank.generation, self.epoch, self.participant.placement
        )
        self.rank.fleet.remember(self, self.epoch, self.map)

    def feed_soon(self, event) -> None:
        """Give the participant an event from another thread: a little later, sometimes twice."""
        world, random = self.world, self.world.rng.random
        if event.wave not in self.waves:
            self.waves.append(event.wave)
        world.after(0.01 * random(), self.feed, event)
        if not world.calm and random() < world.rumours:
            world.after(3.0 * random(), self.feed, event)

    def wants_to_drop(self) -> bool:
        """Return True if the participant would drop its wave together with all others (R6)."""
        part = self.participant
        return part.state in ("prepared", "armed") and part.leaderless(self.world.now)

    def old_news(self) -> list:
        """Return events that threads of ended waves may still report."""
        rng = self.world.rng
        kinds = [
            msg.StagingFinished,
            msg.TransportDrained,
            lambda wave: msg.StagingFailed(wave, Reason.TRANSFER_FAILED),
        ]
        rng.shuffle(kinds)
        return [
            kind(wave) for kind in kinds[:2] for wave in self.waves if wave != self.participant.wave
        ]

    def carry(self, actions) -> None:
        for action in actions:
            match action:
                case msg.SendToController():
                    for answer in self.barrier.outgoing(action):
                        self.send(answer)
                case msg.StartStaging(prepare=prepare):
                    self.job = Job(self, prepare)
                    self.job.advance()
                case msg.CancelStaging(wave=wave):
                    if self.job is not None and self.job.wave == wave:
                        self.job.cancel()
                    else:
                        self.feed_soon(msg.TransportDrained(wave))
                case msg.PermitReload():
                    self.rank.fleet.reload_permitted(self)
                case msg.LeaveGroup(reason=reason, detail=detail):
                    self.rank.leave(f"{reason}: {detail}")
                case msg.Swap(wave=wave):  # only a mutant swaps outside a boundary
                    self.swap(action)
                    self.feed(msg.SwapFinished(wave, self.map.digest))
                case _:
                    raise AssertionError(action)

    def finish_swap(self) -> None:
        """Go on under the new placement, and save it meanwhile; a rank that dies saves nothing."""
        part = self.participant
        wave, placement = part.wave, part.next_placement
        self.barrier.begin(part.epoch, part.placement.digest)
        self.feed(msg.SwapFinished(wave, placement.digest))
        most = 0.02 if self.world.calm else self.world.slow_saves
        self.world.after(most * self.world.rng.random(), self.saved, part.epoch, placement)

    def saved(self, epoch, placement) -> None:
        """Tell the controller what had to wait for the save."""
        if not self.rank.alive:
            return
        self.rank.fleet.remember(self, epoch, placement)
        for answer in self.barrier.end():
            self.send(answer)

    def send(self, action: msg.SendToController) -> None:
        world = self.world
        kind = type(action.message).__name__
        world.moment(f"rank sends {kind}", rank=self.rank, site=self)
        stream = world.network.streams.get(action.stream)
        if stream is not None:
            world.network.to_replica(stream, action.message)
