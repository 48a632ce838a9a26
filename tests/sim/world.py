"""Virtual time, one random stream, and what every part of the simulation shares."""

import heapq
import itertools
import random

from evenkeel.model.ids import DeploymentId
from tests.sim.checks import Checks
from tests.sim.kit import Kit


class World:
    """One run. Everything that happens is an event on one heap; the seed decides all the rest."""

    def __init__(self, seed: int, kit: Kit | None = None, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.kit = kit or Kit()
        self.now = 0.0
        self.events = 0
        self.checks = Checks(self)
        self.trace_lines: list[str] | None = [] if trace else None
        self.print_trace = False
        self.calm = False
        """Faults are over: the network delivers, nothing crashes."""
        self.deployments: tuple[DeploymentId, ...] = ()
        self._heap: list = []
        self._order = itertools.count()
        self._moments: dict[str, list] = {}

    def at(self, when: float, call, *args) -> None:
        """Run `call(*args)` at a virtual time."""
        heapq.heappush(self._heap, (when, next(self._order), call, args))

    def after(self, delay: float, call, *args) -> None:
        """Run `call(*args)` that many virtual seconds from now."""
        heapq.heappush(self._heap, (self.now + delay, next(self._order), call, args))

    def run_until(self, when: float, stop=None) -> None:
        """Let events happen until a time, or until `stop()` is true (looked at after each event)."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
            if stop is not None and stop():
                return
        self.now = max(self.now, when)

    def note(self, line: str) -> None:
        """A line of the trace."""
        if self.trace_lines is not None:
            text = f"{self.now:9.3f} {line}"
            self.trace_lines.append(text)
            if self.print_trace:
                print(text)

    # --- moments: where a fault hurts most --------------------------------------------------------

    def when(self, moment: str, call) -> None:
        """Run `call(context)` the next time something passes a named moment; it returns True to stay."""
        self._moments.setdefault(moment, []).append(call)

    def moment(self, name: str, **context) -> None:
        """Something passes a named moment."""
        calls = self._moments.pop(name, None)
        if calls:
            staying = [call for call in calls if call(context)]
            if staying:
                self._moments.setdefault(name, []).extend(staying)
