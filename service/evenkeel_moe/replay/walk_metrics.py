"""Defines the metrics of a walk: what the tables, the JSON output and the HTML report show."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.replay.walk import Walk

COPY_BYTES_PER_S = 5e9
"""Rate of copies of one rank, as the controller assumes it (`planner.copy_bytes_per_s`)."""


@dataclass(frozen=True, slots=True)
class WalkMetrics:
    """The result of one policy on one trace, over the scored steps, which no plan had seen."""

    policy: str
    balancedness_mean: float
    """Mean over layers of the layer's mean over steps."""
    balancedness_p5: float
    """5th percentile over steps and layers."""
    balancedness_worst: float
    """Mean over steps of the worst layer."""
    time_over_fluid: float
    """Predicted MoE time / time if tokens could be split freely, >= 1."""
    step_time_p50: float
    """Median over steps of the predicted MoE time of all layers / mean fluid time of a step."""
    step_time_p90: float
    step_time_p99: float
    replans: int
    copies_per_layer: float
    """Copies between ranks per layer and replan after relabelling, without the first plan."""
    copies_per_layer_raw: float
    """The same before relabelling."""
    first_copies_per_layer: float
    """Copies per layer of the first plan, from the initial placement, after relabelling."""
    bytes: float
    """Bytes between ranks over all replans except the first, after relabelling; NaN, as the next
    two, if the size of an expert is not known."""
    copy_s: float
    """Time of `bytes`, if all ranks copy at once at `COPY_BYTES_PER_S`."""
    first_bytes: float
    plan_ms: float
    """Median milliseconds of one planning call."""
    plan_ms_max: float


def measure_walk(walk: Walk, bytes_per_expert: int) -> WalkMetrics:
    """Return the metrics of one walk.

    Args:
        walk: the walk.
        bytes_per_expert: size of all tensors of one expert; 0 if it is not known.
    """
    balance = metrics.balancedness(walk.rank_load)
    known = balance[~np.isnan(balance)]
    fluid = float(walk.fluid.sum())
    step_times = walk.times.sum(axis=1)
    per_step = fluid / len(step_times)
    p50, p90, p99 = (
        np.percentile(step_times, [50, 90, 99]) / per_step if per_step > 0 else [np.nan] * 3
    )
    layers, ranks = walk.rank_load.shape[1:]
    later = walk.copies[1:]
    size = bytes_per_expert or math.nan
    nbytes = int(later.sum()) * size
    return WalkMetrics(
        policy=walk.policy,
        balancedness_mean=metrics.balancedness_mean(walk.rank_load),
        balancedness_p5=float(np.percentile(known, 5)) if known.size else float("nan"),
        balancedness_worst=metrics.balancedness_worst(walk.rank_load),
        time_over_fluid=float(walk.times.sum()) / fluid if fluid > 0 else float("nan"),
        step_time_p50=float(p50),
        step_time_p90=float(p90),
        step_time_p99=float(p99),
        replans=len(walk.steps),
        copies_per_layer=float(later.mean()) / layers,
        copies_per_layer_raw=float(walk.copies_raw[1:].mean()) / layers,
        first_copies_per_layer=float(walk.copies[0]) / layers,
        bytes=nbytes,
        copy_s=nbytes / (ranks * COPY_BYTES_PER_S),
        first_bytes=int(walk.copies[0]) * size,
        plan_ms=float(np.median(walk.plan_s)) * 1e3,
        plan_ms_max=float(walk.plan_s.max()) * 1e3,
    )


def ratio(
    part: NDArray[np.float64], whole: NDArray[Any], undefined: float = math.nan
) -> NDArray[np.float64]:
    """Return part / whole, another value where the whole is 0; the whole may be broadcast."""
    out = np.full_like(part, undefined, np.float64)
    return np.asarray(np.divide(part, whole, out=out, where=whole > 0), np.float64)
