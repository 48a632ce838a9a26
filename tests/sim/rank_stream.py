"""One deployment's stream of a rank to a replica: opened, watched, and opened again."""

from abc import ABC, abstractmethod

from evenkeel_moe.protocol.messages import Hello
from tests.sim.network import Beat, Stream

SILENCE_S = 1.5
"""A rank that hears nothing for this long on a stream opens another one."""


class RankStream(ABC):
    """The stream of one deployment on one rank."""

    def __init__(self, rank, deployment) -> None:
        self.rank = rank
        self.world = rank.world
        self.deployment = deployment
        self.stream: Stream | None = None
        self.heard_at = 0.0
        self.wants = 0
        """The replica to connect to next."""

    @abstractmethod
    def hello(self) -> Hello:
        """Return the first message of a stream."""

    @abstractmethod
    def why_refusing(self) -> str:
        """Return the reason why this rank refuses every wave; empty if it does not."""

    @property
    def streaming(self) -> int:
        """The number of the stream in use; 0 for none."""
        return self.stream.number if self.stream is not None else 0

    def connect(self) -> None:
        """Open a stream to a replica and say hello; repeat until it works."""
        rank, world = self.rank, self.world
        if not rank.alive or self.stream is not None:
            return
        replica = world.replicas[self.wants % len(world.replicas)]
        if not replica.alive or (rank.rank, replica.name) in world.network.cuts:
            self.wants += 1
            world.after(0.2 + 0.2 * world.rng.random(), self.connect)
            return
        hello = self.hello()  # An agent may wait for its lock, and send meanwhile.
        if not rank.alive or self.stream is not None:
            return
        self.stream = world.network.open(rank, replica, self.deployment)
        world.network.to_replica(self.stream, hello)
        self.heard_at = world.now
        world.after(SILENCE_S, self.watch, self.stream)

    def beat(self, stopping: bool = False) -> None:
        """Send telemetry."""
        if self.stream is not None:
            replica = self.stream.replica
            beat = Beat(self.world.now, self.why_refusing(), stopping)
            self.world.network.send(self.stream, replica.on_message, beat)

    def abandon(self) -> None:
        """Connect to another replica; the old stream stays open for a while."""
        if self.stream is not None:
            self.world.after(4.0 * self.world.rng.random(), self.world.network.cut, self.stream)
            self.stream = None
            self.wants += 1
            self.world.after(0.2 * self.world.rng.random(), self.connect)

    def watch(self, stream) -> None:
        """Connect to another replica if nothing was heard for long, not even heartbeats."""
        if self.stream is not stream or not self.rank.alive:
            return
        if self.world.now - self.heard_at >= SILENCE_S:
            self.abandon()
        else:
            self.beat()
            self.world.after(SILENCE_S, self.watch, stream)

    def closed(self, stream: Stream) -> None:
        """Note that a stream has ended, and open another one."""
        stream.broken = True
        self.world.network.streams.pop(stream.number, None)
        if self.rank.alive and self.stream is stream:
            self.stream = None
            self.wants += 1
            self.world.after(0.05 + 0.2 * self.world.rng.random(), self.connect)
