"""Describes a trace: skew, consistent and temporal experts, correlated pairs, drift.

The description shows which policies can help: replication helps against skew, planning step by step
(not on a mean) against temporal and correlated experts, and replanning against drift.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.formats import Trace
from evenkeel_moe.model.finding import Finding
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.replay.walk_metrics import ratio

HIGH_SKEW = 10.0
"""Max / mean expert load above which a layer has high skew. Source: CRAFT section 3.1."""
HOT = 1.5
"""Load, in uniform shares, from which an expert is hot in a step."""
CONSISTENT_SHARE = 0.85
"""Share of steps in which a consistent expert is hot, at least. Source: GEM figure 6."""
TEMPORAL_SHARE = (0.005, 0.20)
"""Least and greatest share of steps in which a temporal expert is hot."""
TEMPORAL_LOAD = 2.0
"""Mean load of a temporal expert while it is hot, at least, in uniform shares."""
PAIRS_PER_LAYER = 16
LAGS = (1, 10, 50)


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """The description of one layer over the whole trace."""

    layer_id: int
    """Index among the model's hidden layers."""
    skew: float
    """Max / mean over experts of the load summed over steps."""
    skew_step: float
    """Max / mean over experts in one step, averaged over steps with load."""
    skew_class: str
    """`high` above `HIGH_SKEW`, `none` without any load, else `low`."""
    balancedness: float
    """Mean over steps with experts in order and no replicas; NaN if the ranks are not given."""
    consistent: tuple[int, ...]
    """Experts that are hot in nearly all steps."""
    temporal: tuple[int, ...]
    """Experts that are rarely hot but then have a high load."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two experts of a layer whose loads rise in the same steps."""

    layer_id: int
    experts: tuple[int, int]
    r_first_half: float
    """Pearson correlation of their load shares over the first half, by which pairs are selected."""
    r_second_half: float
    """The same over the second half: what a planner could have relied on."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Measures of how fast the past stops predicting the future."""

    autocorrelation: dict[int, float]
    """By lag in steps: autocorrelation of each expert's load share, mean over experts whose share
    varies. NaN if the trace is too short."""
    between_windows: float
    """Total variation of load shares between consecutive windows, mean over layers and windows."""
    within_windows: float
    """The same between the odd and the even steps of two windows: the effect of sampling alone."""
    window_steps: int
    """Steps of the windows compared."""
    by_window: tuple[float, ...]
    """The values behind `between_windows`; entry i: between the windows that meet at step
    (i + 1) * window."""


@dataclass(frozen=True, eq=False, slots=True)
class TraceDescription:
    """The description of a whole trace."""

    name: str
    num_steps: int
    num_layers: int
    num_experts: int
    top_k: int | None
    tokens_per_step: float
    """Mean routed tokens per step and layer, divided by top-k if that is known."""
    layers: tuple[LayerDescription, ...]
    temporal_share: float
    """Temporal experts / all experts."""
    temporal_load: float
    """Mean load of temporal experts while hot, in uniform shares; NaN if there are none."""
    pairs: tuple[Pair, ...]
    """The most correlated pairs of each layer, ordered by correlation in the second half."""
    pair_r: float
    """Mean r in the second half of the pairs selected on the first; NaN if there are none."""
    drift: Drift
    findings: tuple[Finding, ...]


def describe(
    trace: Trace, *, num_ranks: int | None = None, window_steps: int = 100
) -> TraceDescription:
    """Describe a trace.

    Args:
        trace: recorded loads.
        num_ranks: R for the balancedness without replicas; None leaves it out.
        window_steps: steps per window for drift; halved until four windows fit into the trace.
    """
    load = trace.counts.astype(np.float64)
    tokens = float(load.sum(axis=2).mean()) / (trace.top_k or 1)
    load = load[load.any(axis=(1, 2))]  # An idle step has no shares.
    totals = load.sum(axis=2, keepdims=True)
    share = ratio(load, totals, 0.0)
    relative = share * trace.num_experts
    hot = relative >= HOT
    busy = (totals > 0).sum(axis=0)
    hot_share = ratio(hot.sum(axis=0).astype(np.float64), busy, 0.0)
    hot_load = ratio(np.where(hot, relative, 0.0).sum(axis=0), hot.sum(axis=0), 0.0)
    low, high = TEMPORAL_SHARE
    temporal = (hot_share >= low) & (hot_share <= high) & (hot_load >= TEMPORAL_LOAD)
    pairs = _pairs(share, trace.layer_ids)
    return TraceDescription(
        name=trace.name,
        num_steps=trace.num_steps,
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        tokens_per_step=tokens,
        layers=_layers(trace, load, relative, hot_share, temporal, num_ranks),
        temporal_share=float(temporal.mean()),
        temporal_load=_mean(hot_load[temporal]),
        pairs=pairs,
        pair_r=_mean([pair.r_second_half for pair in pairs]),
        drift=_drift(load, share, window_steps),
        findings=trace.findings,
    )


def _layers(
    trace: Trace,
    load: NDArray[np.float64],
    relative: NDArray[np.float64],
    hot_share: NDArray[np.float64],
    temporal: NDArray[np.bool_],
    num_ranks: int | None,
) -> tuple[LayerDescription, ...]:
    summed = load.sum(axis=0)
    skew = ratio(summed.max(axis=1), summed.mean(axis=1))
    worst = relative.max(axis=2)
    skew_step = ratio(worst.sum(axis=0), (worst > 0).sum(axis=0))
    balance = np.full(trace.num_layers, np.nan)
    if num_ranks is not None:
        per_rank = -(-trace.num_experts // num_ranks)
        shape = ModelShape(trace.num_layers, trace.num_experts, num_ranks, per_rank, 1, 0)
        balance = metrics.balancedness_by_layer(metrics.rank_load(load, Placement.linear(shape)))
    return tuple(
        LayerDescription(
            layer_id=layer_id,
            skew=float(skew[row]),
            skew_step=float(skew_step[row]),
            skew_class=_skew_class(skew[row]),
            balancedness=float(balance[row]),
            consistent=tuple(np.nonzero(hot_share[row] >= CONSISTENT_SHARE)[0].tolist()),
            temporal=tuple(np.nonzero(temporal[row])[0].tolist()),
        )
        for row, layer_id in enumerate(trace.layer_ids)
    )


def _skew_class(skew: float) -> str:
    if np.isnan(skew):
        return "none"
    return "high" if skew > HIGH_SKEW else "low"


def _pairs(share: NDArray[np.float64], layer_ids: tuple[int, ...]) -> tuple[Pair, ...]:
    half = len(share) // 2
    if half < 3 or share.shape[2] < 2:
        return ()
    upper = np.triu_indices(share.shape[2], 1)
    found: list[Pair] = []
    for row, layer_id in enumerate(layer_ids):
        first = _correlation(share[:half, row])[upper]
        second = _correlation(share[half:, row])[upper]
        picked = np.argsort(-np.nan_to_num(first, nan=-2.0), kind="stable")[:PAIRS_PER_LAYER]
        found += [
            Pair(layer_id, (int(upper[0][i]), int(upper[1][i])), float(first[i]), float(second[i]))
            for i in picked
            if np.isfinite(first[i]) and np.isfinite(second[i])
        ]
    return tuple(sorted(found, key=lambda pair: -pair.r_second_half))


def _correlation(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (E, E) Pearson r over steps of (T, E) values; NaN where an expert never varies."""
    centred = values - values.mean(axis=0)
    norm = np.sqrt((centred**2).sum(axis=0))
    scale = norm[:, None] * norm[None, :]
    product = centred.T @ centred
    return np.where(scale > 1e-12, product / np.maximum(scale, 1e-12), np.nan)


def _drift(load: NDArray[np.float64], share: NDArray[np.float64], window_steps: int) -> Drift:
    steps = len(load)
    window = max(1, window_steps)
    while window > 1 and steps // window < 4:
        window //= 2
    blocks = load[: steps // window * window].reshape(-1, window, *load.shape[1:])
    between = [_variation(a, b) for a, b in pairwise(blocks)]
    within = [_variation(two[::2], two[1::2]) for two in map(np.concatenate, pairwise(blocks))]
    return Drift(
        {lag: _autocorrelation(share, lag) for lag in LAGS},
        _mean(between),
        _mean(within),
        window,
        tuple(between),
    )


def _variation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the total variation of shares between (T, L, E) loads, mean over layers with load."""
    sums = [part.sum(axis=0) for part in (a, b)]
    shares = [ratio(part, part.sum(axis=1, keepdims=True)) for part in sums]
    by_layer = 0.5 * np.abs(shares[0] - shares[1]).sum(axis=1)
    return _mean(by_layer[np.isfinite(by_layer)])


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the mean, NaN without a value."""
    return float(np.mean(values)) if len(values) else float("nan")


def _autocorrelation(share: NDArray[np.float64], lag: int) -> float:
    if len(share) < 2 * lag + 2:
        return float("nan")
    centred = share - share.mean(axis=0)
    variance = (centred**2).mean(axis=0)
    products = (centred[lag:] * centred[:-lag]).mean(axis=0)
    known = variance > 1e-12
    return _mean(products[known] / variance[known])
