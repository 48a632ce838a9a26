"""SimNetwork: streams between ranks and replicas that drop, duplicate, delay, reorder and break."""

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass

from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire.from_rank import decode_rank_message, encode_rank_message
from evenkeel_moe.wire.to_rank import decode_controller_message, encode_controller_message

_ECHOED = (
    "Prepare",
    "Commit",
    "Abort",
    "Vote",
    "Ack",
    "AbortAnswer",
    "StagingProgress",
    "MovedAnswers",
    "TermRefused",
    "Beat",
)


class Stream:
    """One rank's stream to one replica."""

    __slots__ = ("broken", "hello", "number", "rank", "replica", "replica_life")

    def __init__(self, number: int, rank, replica) -> None:
        self.number = number
        self.rank = rank
        self.replica = replica
        self.replica_life = replica.life
        self.broken = False
        self.hello: Hello | None = None
        """The rank's first message; later ones are decoded with it."""


class SimNetwork:
    """All streams. A message may arrive after its stream broke, as from a buffer."""

    def __init__(self, world) -> None:
        self.world = world
        self.streams: dict[int, Stream] = {}
        self.drop = 0.0
        self.duplicate = 0.0
        self.linger = 0.0
        """Probability that a message, or its duplicate, is very late."""
        self.cuts: set = set()
        """(rank number, replica name) that cannot reach each other."""
        self.sent: dict = defaultdict(lambda: deque(maxlen=24))
        """The recent messages by kind, for echoes."""
        self._numbers = itertools.count(1)

    def open(self, rank, replica) -> Stream:
        stream = Stream(next(self._numbers), rank, replica)
        self.streams[stream.number] = stream
        return stream

    def cut(self, stream: Stream) -> None:
        """Break a stream; both ends learn of it a little later."""
        if stream.broken:
            return
        stream.broken = True
        self.streams.pop(stream.number, None)
        world = self.world
        world.after(world.rng.uniform(0.01, 0.3), stream.rank.on_stream_closed, stream)
        world.after(world.rng.uniform(0.01, 0.3), stream.replica.on_stream_closed, stream)

    def to_replica(self, stream: Stream, message) -> None:
        """Send a rank's message, through the real codec."""
        wire = encode_rank_message(message).SerializeToString()
        message = decode_rank_message(agent_pb2.RankMessage.FromString(wire), stream.hello)
        if isinstance(message, Hello):
            stream.hello = message
        self.send(stream, stream.replica.on_message, message)

    def to_rank(self, stream: Stream, message) -> None:
        """Send a controller's message, through the real codec."""
        wire = encode_controller_message(message).SerializeToString()
        message = decode_controller_message(agent_pb2.ControllerMessage.FromString(wire))
        self.send(stream, stream.rank.on_message, message)

    def turn_away(self, stream: Stream, reason) -> None:
        """Tell a rank that this replica does not lead, or no longer."""
        self.send(stream, stream.rank.on_message, NotLeading(reason))

    def send(self, stream: Stream, deliver, message) -> None:
        """Deliver a message after a delay, or lose it."""
        world = self.world
        if stream.broken or (stream.rank.rank, stream.replica.name) in self.cuts:
            return
        random, kind = world.rng.random, type(message).__name__
        if not world.calm and kind in _ECHOED:
            self.sent[kind].append((deliver, stream, message))
        if self.calm_weather():
            world.post(0.005 + 0.02 * random(), kind, stream, deliver, stream, message)
            return
        if random() >= self.drop:
            world.post(self._delay(random), kind, stream, deliver, stream, message)
        if random() < self.duplicate:
            world.post(self._delay(random) + 0.1, kind, stream, deliver, stream, message)

    def echo(self, within: float) -> None:
        """Deliver a recent message of a random kind again."""
        rng = self.world.rng
        if sent := self.sent[rng.choice(_ECHOED)]:
            self.world.after(within * rng.random(), *rng.choice(sent))

    def calm_weather(self) -> bool:
        return self.drop == self.duplicate == self.linger == 0.0

    def _delay(self, random) -> float:
        if random() < self.linger:
            return 0.2 + 6.0 * random() * random()
        return 0.005 + 0.1 * random() * random()


@dataclass(frozen=True, slots=True)
class Beat:
    """Telemetry of a rank: it shows that the rank is alive, and whether it refuses waves."""

    sent_at: float
    trouble: str
    stopping: bool = False
    """The engine stops as planned."""


class NotLeading:
    """A follower's answer to a Hello."""

    def __init__(self, reason) -> None:
        self.reason = reason


def describe(message) -> str:
    """Return one message in a few words."""
    words = [type(message).__name__]
    for name in (
        "wave",
        "yes",
        "reason",
        "epoch",
        "outcome",
        "drained",
        "state",
        "leader",
        "query",
    ):
        value = getattr(message, name, None)
        if value is None or (name == "reason" and getattr(message, "yes", False)):
            continue
        if name == "wave":
            value = f"{value.plan_id}/{value.wave_index}"
        elif name == "leader":
            value = f"{value.leader_id}@{value.term}"
        words.append(f"{name}={value}")
    return " ".join(words)
