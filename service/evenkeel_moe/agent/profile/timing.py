"""Times a computation at several points.

Rounds over all points alternate in direction, so that a clock frequency that drops during the
measurement distorts no single point. Each point is the median of its rounds, so that outliers do
not count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

PointT = TypeVar("PointT")


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a computation at some points."""

    seconds: tuple[float, ...]
    """Median over the rounds at each point."""
    rounds: int
    took_s: float
    """Seconds of the whole measurement."""


def time_points(
    run: Callable[[PointT], object],
    points: Sequence[PointT],
    *,
    budget_s: float,
    rounds: int = 50,
    settle: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time a computation at each point.

    Args:
        run: computes at a point, or starts the computation.
        points: at least one.
        budget_s: no round begins after this many seconds. A warm-up round and one that counts are
            run in any case.
        rounds: the most rounds that count.
        settle: waits for the computation that `run` started.
        clock: returns seconds.
    """

    def timed(point: PointT) -> float:
        settle()
        begun = clock()
        run(point)
        settle()
        return clock() - begun

    begun = clock()
    for point in points:
        timed(point)
    found: list[list[float]] = []
    while len(found) < rounds and (not found or clock() - begun < budget_s):
        turn = 1 if len(found) % 2 == 0 else -1
        found.append([timed(point) for point in points[::turn]][::turn])
    medians = np.median(np.array(found), axis=0)
    return Timing(tuple(medians.tolist()), len(found), clock() - begun)
