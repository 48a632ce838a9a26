"""The compute time of a rank: at least a given time per token and replica, and longer if slowed.

The experts of a small model on a CPU take microseconds, and other processes disturb them. With a
pace, a layer takes as long as on a larger device: the rank really waits, so the peers that need its
results wait too.
"""

import time

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.wire.link import ReplicaCost

_SPIN_S = 2e-4
"""The end of a wait, which is spent in a loop, because a sleep ends late by about as much."""


class Pace:
    """Makes the experts of one rank take the time that its configuration says."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._factor = 1.0
        self.paced_s: list[float] = []
        """The least seconds of the routed experts, of the layers that the newest step has computed
        so far."""

    def enter(self, step: int) -> None:
        """Begin a step: set the factor of the steps from this one on."""
        self._factor = self._config.slowdown(step)
        self.paced_s = []

    def wait(self, began: float, tokens: list[int], *, shared: bool = False) -> None:
        """Return once the experts of a layer have taken their time.

        Args:
            began: `time.perf_counter` when they began.
            tokens: of each local slot.
            shared: True for shared experts, which `paced_s` leaves out.
        """
        config = self._config
        active = sum(count > 0 for count in tokens)
        least_s = config.pace_s_per_token * sum(tokens) + config.pace_s_per_replica * active
        if not shared:
            self.paced_s.append(self._factor * least_s)
        now = time.perf_counter()
        until = began + self._factor * max(least_s, now - began)
        if until - now > _SPIN_S:
            time.sleep(until - now - _SPIN_S)
        while time.perf_counter() < until:
            pass

    def cost(self, now_unix: float) -> ReplicaCost | None:
        """Return what a profile of this rank would show at the first step; None without a pace."""
        config = self._config
        if not config.pace_s_per_token:
            return None
        factor = config.slowdown(config.first_step)
        return ReplicaCost(
            fixed_s=0.0,
            s_per_token=factor * config.pace_s_per_token,
            s_per_replica=factor * config.pace_s_per_replica,
            read_s=0.0,
            fit_error=0.0,
            measured_unix_s=now_unix,
        )
