"""Virtual time, one stream of random numbers, and all that the simulation's parts share."""

import heapq
import itertools
import random

from evenkeel_moe.model.ids import DeploymentId
from tests.sim.checks import Checks


class Hold:
    """Messages that are held back."""

    def __init__(self, world: "World", fits) -> None:
        self.world = world
        self.fits = fits
        self.parcels: list = []

    def end(self) -> None:
        """Deliver all held messages in their order, and hold no more."""
        if self in self.world.holds:
            self.world.holds.remove(self)
            for number, (call, args) in enumerate(self.parcels, 1):
                self.world.after(0.02 * number / len(self.parcels), call, *args)


class World:
    """One run. All its events are on one heap; the seed decides everything."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.checks = Checks(self)
        self.trace_lines: list[str] | None = [] if trace else None
        self.print_trace = False
        self.calm = False
        """True after the faults: the network delivers and nothing crashes."""
        self.deployment = DeploymentId("target")
        self._heap: list = []
        self._order = itertools.count()
        self._moments: dict[str, list] = {}
        self.holds: list[Hold] = []

    def at(self, when: float, call, *args) -> None:
        """Run `call(*args)` at a virtual time."""
        heapq.heappush(self._heap, (when, next(self._order), call, args))

    def after(self, delay: float, call, *args) -> None:
        """Run `call(*args)` that many virtual seconds from now."""
        heapq.heappush(self._heap, (self.now + delay, next(self._order), call, args))

    def post(self, delay: float, kind: str, owner, call, *args) -> None:
        """`after` for a message of a stream, or a result for a seat, that may be held back."""
        for hold in self.holds:
            if hold.fits(kind, owner):
                hold.parcels.append((call, args))
                return
        self.after(delay, call, *args)

    def hold(self, fits) -> "Hold":
        """Hold back from now on all messages for which `fits(kind, owner)`."""
        self.holds.append(Hold(self, fits))
        return self.holds[-1]

    def run_until(self, when: float, stop=None) -> None:
        """Run events until a time, or until `stop()` is true after an event."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
            if stop is not None and stop():
                return
        self.now = max(self.now, when)

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        if self.trace_lines is not None:
            text = f"{self.now:9.3f} {line}"
            self.trace_lines.append(text)
            if self.print_trace:
                print(text)

    # --- moments: where a fault hurts most --------------------------------------------------------

    def when(self, moment: str, call) -> None:
        """Run `call(context)` at the next named moment, and again while it returns True."""
        self._moments.setdefault(moment, []).append(call)

    def moment(self, name: str, **context) -> None:
        """Report a named moment."""
        calls = self._moments.pop(name, None)
        if calls:
            staying = [call for call in calls if call(context)]
            if staying:
                self._moments.setdefault(name, []).extend(staying)
