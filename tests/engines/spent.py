"""Toy experts and a toy dispatch that take time, and note what the clock showed around them."""

import time
from dataclasses import dataclass, field


@dataclass
class Spent:
    """What the parts of all layers saw on the clock that the plugin reads on a CPU."""

    inside_s: float = 0.0
    """From the begin of the experts to their end."""
    around_s: float = 0.0
    """From the end of the dispatch to the begin of the combine."""
    _dispatched_at: float = field(default=0.0, repr=False)

    def dispatch(self) -> None:
        """Take some time, and note the end of it."""
        time.sleep(0.001)
        self._dispatched_at = time.thread_time()

    def compute(self, rows: int) -> None:
        """Take some time for each row."""
        began = time.thread_time()
        while time.thread_time() - began < 2e-6 * rows:
            pass
        self.inside_s += time.thread_time() - began

    def combine(self) -> None:
        """Note that the experts have ended, and take some time."""
        self.around_s += time.thread_time() - self._dispatched_at
        time.sleep(0.001)

    @property
    def bounds(self) -> tuple[float, float]:
        """What was noted until now: least and most seconds of the experts."""
        return self.inside_s, self.around_s
