"""Measures the seconds of one MoE layer by its tokens and its active replicas.

A layer with few tokens waits for the weights of every replica that has any. So the grid has two
axes: tokens of each active replica, and active replicas.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenkeel_moe.agent.profile.expert_layer import (
    ExpertShape,
    GroupedLayer,
    Point,
    even_point,
    waiter,
)
from evenkeel_moe.agent.profile.timing import Timing, time_points
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import CostCurve, ReplicaCost

_LIMIT_STEPS = 64
"""Candidates for the tokens whose computation takes as long as reading the weights."""
_CLEARLY_BETTER = 0.9
"""A limit by reading is told only if it reduces the error of the fit to this share."""
_MEMORY_SHARE = 0.25
"""Share of the free memory that a measurement at the start of an engine may take."""


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    """Measured times by tokens and active replicas."""

    points: tuple[Point, ...]
    timing: Timing
    """At each point."""


def grid(experts: int, max_tokens: int) -> list[Point]:
    """Return the points to measure: powers of two up to both limits, and the limits.

    Args:
        experts: slots of a rank in one layer.
        max_tokens: most tokens of a rank in one layer; points with more in total are left out.
    """
    if experts < 2 or max_tokens < 2:
        raise InvalidInput(
            f"{experts} experts and {max_tokens} tokens: both slopes need at least 2 of each"
        )
    each, active = _powers(max_tokens), _powers(experts)
    return [Point(n, k) for k in active for n in each if n * k <= max(max_tokens, k)]


def compared_curve(
    by_tokens: TokenProfile, cost: ReplicaCost, by_replicas: ReplicaProfile
) -> CostCurve:
    """Return the curve of a profile, with the mean errors of the curve and of the line.

    Both are compared with every point that was measured: by tokens, spread evenly over the
    replicas, and by tokens and replicas. A line misses the stairs of a kernel, a curve the replicas
    that are not active.

    Args:
        by_tokens: measured with all replicas of `by_replicas`.
        cost: the line, fitted to `by_replicas`.
        by_replicas: of the same device.
    """
    curve = curve_of(by_tokens)
    experts = max(point.active for point in by_replicas.points)
    spread = [even_point(tokens, experts) for tokens in by_tokens.tokens]
    each, active = np.array([*spread, *by_replicas.points], np.float64).T
    seconds = np.array([*by_tokens.timing.seconds, *by_replicas.timing.seconds])
    reading = np.maximum(cost.read_s, cost.s_per_token * each)
    line = cost.fixed_s + active * (cost.s_per_replica + reading)
    tiles = np.ceil(each * active / curve.tile_tokens).astype(np.int64)
    last = len(curve.tile_seconds)
    beyond = np.maximum(tiles - last, 0) * curve.tile_tokens * curve.slope_s_per_token
    stairs = np.array(curve.tile_seconds)[np.minimum(tiles, last) - 1] + beyond
    return replace(
        curve,
        fit_error=float(np.abs(stairs / seconds - 1).mean()),
        line_error=float(np.abs(line / seconds - 1).mean()),
    )


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`."""
    return sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)})


def fit_replica_cost(profile: ReplicaProfile, measured_unix_s: float) -> ReplicaCost:
    """Return the coefficients with the smallest relative errors, none negative.

    Raises:
        InvalidInput: the points leave a coefficient open, or the seconds do not rise with tokens.
    """
    tokens = np.array([point.tokens for point in profile.points], np.float64)
    active = np.array([point.active for point in profile.points], np.float64)
    seconds = np.array(profile.timing.seconds, np.float64)
    if len(seconds) < 4 or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise InvalidInput(
            f"{len(seconds)} points of which {int((seconds > 0).sum())} took time: a fit needs 4"
        )
    # Without a limit, reading and computing add up; with one, the longer of the two counts.
    found = _fit(tokens, active, seconds, 0.0)
    for limit in np.geomspace(1.0, max(2.0, tokens.max()), _LIMIT_STEPS):
        other = _fit(tokens, active, seconds, float(limit))
        clearly = _CLEARLY_BETTER if found.read_s == 0 else 1.0
        if other.s_per_token > 0 and other.fit_error < clearly * found.fit_error:
            found = other
    if found.s_per_token <= 0:
        raise InvalidInput(
            f"the seconds do not rise with tokens: {seconds.min():.3g} to {seconds.max():.3g} s at"
            f" {int((tokens * active).min())} to {int((tokens * active).max())} tokens"
        )
    return replace(found, measured_unix_s=measured_unix_s)


def _fit(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    limit: float,
) -> ReplicaCost:
    """Return the fit with work `active * max(tokens, limit)`."""
    columns = np.stack([np.ones_like(tokens), active * np.maximum(tokens, limit), active], axis=1)
    scale = columns.max(axis=0)
    relative = columns / scale / seconds[:, None]
    found = nnls(relative, np.ones(len(seconds)))[0] / scale
    expected = columns @ found
    fixed, per_token, per_replica = found.tolist()
    error = float(np.abs(expected / seconds - 1).mean())
    return ReplicaCost(fixed, per_token, per_replica, limit * per_token, error, 0.0)


def remeasure(
    shape: ExpertShape,
    device: torch.device,
    *,
    budget_s: float,
    max_tokens: int,
    now_unix_s: float,
) -> ReplicaCost:
    """Measure again beside an engine that already has its weights, in the memory that is left.

    Raises:
        InvalidInput: there is not enough free memory, or the seconds cannot be used.
    """
    experts = min(shape.experts, _experts_that_fit(shape, device))
    if experts < 2:
        raise InvalidInput(f"the free memory of {device} does not hold two experts for a profile")
    run = GroupedLayer(replace(shape, experts=experts), device)
    points = grid(experts, max_tokens)
    timing = time_points(run, points, budget_s=budget_s, settle=waiter(device))
    del run
    if device.type == "cuda":
        torch.cuda.empty_cache()  # The engine gets the memory of the weights back.
    return fit_replica_cost(ReplicaProfile(tuple(points), timing), now_unix_s)


def _experts_that_fit(shape: ExpertShape, device: torch.device) -> int:
    if device.type != "cuda":
        return shape.experts
    dtype: torch.dtype = getattr(torch, shape.dtype)
    size = 3 * shape.d_model * shape.d_ffn * dtype.itemsize
    free: int = torch.cuda.mem_get_info(device)[0]
    return int(free * _MEMORY_SHARE) // size
