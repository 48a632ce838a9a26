"""A controller replica."""

from collections import deque

from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Hello, Tick
from tests.sim.network import Beat, describe
from tests.sim.seat import Seat

TICK_S = 0.1


class Replica:
    """One controller process."""

    def __init__(self, world, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.alive = False
        self.paused = False
        self.inbox: deque = deque()
        self.halted: list = []
        """The rest of what it was carrying out when it was paused, as calls."""
        self.seat = Seat(self)
        self.behind_s = 0.0
        """Seconds that its monotonic clock did not count, because its machine was suspended."""

    @property
    def now(self) -> float:
        """Its monotonic clock, in seconds."""
        return self.world.now - self.behind_s

    def start(self) -> None:
        if self.alive:
            return
        self.life += 1
        self.alive, self.paused = True, False
        self.inbox.clear()
        self.halted.clear()
        self.seat = Seat(self)
        self.world.note(f"{self.name} starts")
        self.world.after(0.02 + 0.1 * self.world.rng.random(), self.tick, self.life)

    def crash(self) -> None:
        if not self.alive:
            return
        self.world.note(f"{self.name} crashes")
        self.alive = False
        self.seat.close_streams()

    def pause(self, seconds: float, suspended: bool = False) -> None:
        """Stop the process, even between a write and a send.

        Its streams stay open and its lease goes on. The clock of a suspended machine does not: the
        process does not notice that its lease has run out.
        """
        if self.alive and not self.paused:
            self.world.note(f"{self.name} is paused for {seconds:.1f} s")
            self.paused = True
            self.behind_s += seconds if suspended else 0.0
            self.world.after(seconds, self.go_on, self.life)

    def go_on(self, life: int) -> None:
        if not self.alive or life != self.life or not self.paused:
            return
        self.world.note(f"{self.name} goes on")
        self.paused = False
        self.inbox.extendleft(reversed(self.halted))
        self.halted.clear()
        while self.inbox and self.alive and not self.paused:
            call, args = self.inbox.popleft()
            call(*args)

    def tick(self, life: int) -> None:
        if not self.alive or life != self.life:
            return
        self.world.after(TICK_S, self.tick, life)
        if self.paused:
            return
        self.seat.keep_lease()
        if self.alive and not self.paused:
            self.seat.feed(Tick())
            self.seat.repeat_troubles()

    def on_message(self, stream, message) -> None:
        """Take a rank's message, also a late one of a broken stream."""
        if not self.alive or stream.replica_life != self.life:
            return
        if self.paused:
            self.inbox.append((self.on_message, (stream, message)))
            return
        seat = self.seat
        if isinstance(message, Hello):
            if stream.broken:
                return
            seat.streams[stream.number] = stream
        incarnation = stream.rank.incarnation
        if self.world.trace_lines is not None:
            self.world.note(f"{self.name} <- rank {stream.rank.rank} {describe(message)}")
        if isinstance(message, Beat):
            seat.on_beat(stream, message)
            return
        seat.feed(ctl.FromRank(stream.rank.rank, incarnation, stream.number, message))
        if isinstance(message, Hello) and self.alive:
            self.world.moment(
                f"controller {seat.control.state} has a rank", replica=self, seat=seat
            )

    def on_stream_closed(self, stream) -> None:
        if not self.alive or stream.replica_life != self.life:
            return
        if self.paused:
            self.inbox.append((self.on_stream_closed, (stream,)))
            return
        seat = self.seat
        seat.streams.pop(stream.number, None)
        seat.troubled.pop(stream.number, None)
        seat.newest_beat.pop(stream.number, None)
        seat.feed(ctl.StreamClosed(stream.rank.rank, stream.number))
