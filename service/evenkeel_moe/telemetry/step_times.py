"""Fits the seconds that ranks report to their tokens and active replicas.

`seconds = factor_r * (fixed_s * layers + s_per_token * tokens + s_per_replica * active)`

The three coefficients are common to all ranks, and each rank has a factor. All errors are relative,
because a step of many tokens has larger errors than one of few. Outliers have a bounded influence
(Huber weights). The factors are random effects: where the tokens of a rank never change, a
difference in its seconds is taken to come from its tokens before it is taken to come from its
speed.

Under a good placement tokens hardly vary, and the seconds vary by noise. Then the slopes cannot be
measured, but those measured before still hold, and with them the factors can be measured.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

MIN_STEPS = 16
"""Measured steps that every rank needs."""
MIN_EXPLAINED = 0.5
"""Least share of the variation of the seconds that a fit must explain."""
STILL_EXPLAINED = 0.4
"""The same for a fit that follows one that was used, so that a fit near the limit is not used in
one cycle and left out in the next."""
_AS_GOOD = 1.1
"""Slopes of earlier steps are kept if their error is at most this many times that of new ones."""
NEWEST_STEPS = 32
"""Steps of the short window in which drift is looked for."""
_POOLED_PASSES = 4
_RANK_PASSES = 4
_MOST_ROWS = 16_384
"""More measurements take longer and change a median of thousands of values little."""
_HUBER = 1.345
"""Residuals beyond this many standard deviations lose weight: 95 % efficient for normal errors."""
_FACTOR_SPREAD = 0.1
"""Expected standard deviation of the ranks' factors."""
_LEAST_VARIATION = 0.005
"""A column that varies by a smaller share of its mean, given the others, is collinear."""
_LARGEST_ERROR = 0.05
"""Largest standard error of the part of the time that a slope explains, as a share of the time."""
_CLEAR = 0.02
"""A factor must differ by this much from 1, and by three standard errors, or it counts as 1."""
_DRIFT = 0.05
"""A rank has drifted if its newest factor differs by this much, and by four standard errors."""


@dataclass(frozen=True, slots=True)
class NoFit:
    """The seconds cannot be used."""

    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class TimeFit:
    """The seconds of a rank in one layer by its tokens and active replicas."""

    fixed_s: float
    s_per_token: float
    """Above 0."""
    s_per_replica: float
    factors: NDArray[np.float64]
    """(R,) seconds of each rank relative to the median rank. 1 where no difference is clear."""
    factor_errors: NDArray[np.float64]
    """(R,) standard error of each factor."""
    error: float
    """Mean error as a share of the time."""
    explained: float
    """Share of the variation of the seconds that the fit explains, at most 1."""
    steps: int
    drifted: tuple[int, ...] = ()
    """Ranks whose factor is that of the newest steps, because it differs from the earlier ones."""
    note: str = ""
    """The reason that a coefficient is 0 although it may not be; empty if all were fitted."""
    slopes_kept: bool = False
    """True if the steps tell only the factors, and the slopes are those of an earlier fit."""


@dataclass(frozen=True, eq=False, slots=True)
class _Data:
    design: NDArray[np.float64]
    """(N, C) columns: layers, tokens, active replicas, or fewer of them."""
    seconds: NDArray[np.float64]
    """(N,)"""
    rank: NDArray[np.int64]
    """(N,)"""
    num_ranks: int


def fit_times(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    layers: int,
    before: TimeFit | None = None,
) -> TimeFit | NoFit:
    """Fit the common coefficients and the factor of each rank.

    Args:
        tokens: (T, R) tokens each rank carried in a step, over all layers; oldest step first.
        active: (T, R) replicas with tokens of each rank, over all layers.
        seconds: (T, R) compute of each rank, over all layers; NaN if not measured.
        layers: number of layers.
        before: the fit to earlier steps that was used; None if there was none.

    Returns:
        The fit, or the reason that there is none: a rank with fewer than 16 measured steps, or
        seconds of which tokens, replicas and factors explain too little. In the latter case the
        slopes of the fit before are kept, if they describe the steps as well as new ones.
    """
    known = (tokens > 0) & (seconds > 0) & np.isfinite(seconds) & np.isfinite(active)
    if not known.any():
        return NoFit("no rank reports seconds")
    counts = known.sum(axis=0)
    if counts.min() < MIN_STEPS:
        return NoFit(
            f"rank {int(counts.argmin())} reported seconds for {int(counts.min())} steps,"
            f" {MIN_STEPS} are needed"
        )
    rows = _newest_rows(len(tokens), tokens.shape[1])
    step, rank = np.nonzero(known[rows])
    columns = (np.full(tokens.shape, float(layers)), tokens, active)
    data = _Data(
        np.stack([column[rows][step, rank] for column in columns], axis=1),
        seconds[rows][step, rank],
        rank,
        tokens.shape[1],
    )
    coefficients, note = _fit_what_is_told_apart(data)
    newest = len(rows) - NEWEST_STEPS <= step
    found = _finish(data, coefficients, newest, note)
    least_explained = MIN_EXPLAINED if before is None else STILL_EXPLAINED
    if isinstance(found, NoFit) or found.explained >= least_explained:
        return found
    if before is not None:
        slopes = np.array([before.fixed_s, before.s_per_token, before.s_per_replica])
        kept = _finish(data, slopes, newest, before.note)
        if isinstance(kept, TimeFit) and kept.error <= _AS_GOOD * found.error:
            return replace(kept, slopes_kept=True)
    return NoFit(
        f"tokens, replicas and speeds explain {max(found.explained, 0.0):.0%} of the variation"
        f" of the seconds, {least_explained:.0%} are needed"
    )


def _newest_rows(steps: int, ranks: int) -> NDArray[np.int64]:
    """Return the steps that count: the newest, and evenly spaced ones of the earlier."""
    most = max(2 * NEWEST_STEPS, _MOST_ROWS // ranks)
    if steps <= most:
        return np.arange(steps)
    earlier = np.linspace(0, steps - NEWEST_STEPS - 1, most - NEWEST_STEPS).astype(np.int64)
    return np.concatenate([np.unique(earlier), np.arange(steps - NEWEST_STEPS, steps)])


def _fit_what_is_told_apart(data: _Data) -> tuple[NDArray[np.float64], str]:
    """Return (3,) coefficients, 0 for those that the data do not tell apart, and what was not."""
    for columns, note in (
        ((0, 1, 2), ""),
        ((0, 1), "tokens and active replicas rise together: one slope by tokens"),
    ):
        part = _Data(data.design[:, columns], data.seconds, data.rank, data.num_ranks)
        found, clear = _fit(part)
        if clear:
            return np.pad(found, (0, 3 - len(found))), note
    only = _Data(data.design[:, 1:2], data.seconds, data.rank, data.num_ranks)
    return np.array([0.0, _fit(only)[0][0], 0.0]), "tokens hardly vary: seconds per token only"


def _fit(data: _Data) -> tuple[NDArray[np.float64], bool]:
    """Return (C,) coefficients, and whether the data tell the slopes apart."""
    tokens = 0 if data.design.shape[1] == 1 else 1
    coefficients = np.zeros(data.design.shape[1])
    coefficients[tokens] = np.median(data.seconds / data.design[:, tokens])
    for _ in range(_POOLED_PASSES):
        expected = data.design @ coefficients
        relative = data.seconds / expected - 1.0
        weights = _huber(relative, _spread(relative))
        found = _solve(data.design / expected[:, None], 1.0 + relative, weights)
        coefficients = found if found.any() else coefficients
    clear = False
    for _ in range(_RANK_PASSES):
        expected = data.design @ coefficients
        error = np.log(data.seconds / expected)
        of_rank = _medians(error, data)
        spread = _spread(error - of_rank[data.rank])
        weights = _huber(error - of_rank[data.rank], spread)
        scaled = data.design / expected[:, None]
        taken = _demeaned_share(data, spread)[data.rank]
        design = scaled - taken[:, None] * _means(scaled, weights, data)[data.rank]
        level = np.clip(1.0 + error, 0.0, 2.0)
        target = level - taken * _means(level[:, None], weights, data)[data.rank, 0]
        found = _solve(design, target, weights)
        coefficients = found if found.any() else coefficients
        parts = coefficients * scaled.mean(axis=0)
        clear = _tells_apart(_inverse_of_gram(design, weights), scaled, parts, spread, tokens)
    return coefficients, clear


def _tells_apart(
    inverse: NDArray[np.float64] | None,
    scaled: NDArray[np.float64],
    parts: NDArray[np.float64],
    spread: float,
    tokens: int,
) -> bool:
    """Return True if the parts of the time that the slopes explain are well known.

    Their shares of the sum count: how large the sum is, the ranks' factors leave open.
    """
    if inverse is None or parts.sum() <= 0:
        return False
    means = scaled.mean(axis=0)
    shares = (np.diag(means) - np.outer(parts / parts.sum(), means)) / parts.sum()
    errors = np.sqrt(np.maximum(np.diag(shares @ inverse @ shares.T), 0.0))[tokens:]
    variation = 1.0 / np.maximum(errors * math.sqrt(len(scaled)), 1e-300)
    return bool((variation >= _LEAST_VARIATION).all() and (spread * errors <= _LARGEST_ERROR).all())


def _finish(
    data: _Data, coefficients: NDArray[np.float64], newest: NDArray[np.bool_], note: str
) -> TimeFit | NoFit:
    """Return the factors, errors and drift of given coefficients, or why they are not used."""
    fixed, per_token, per_replica = coefficients.tolist()
    if per_token == 0.0 and per_replica == 0.0:
        return NoFit("the seconds do not rise with tokens or active replicas")
    error = np.log(data.seconds / (data.design @ coefficients))
    of_rank = _medians(error, data)
    middle = float(np.median(of_rank))
    rest = error - of_rank[data.rank]
    spread = _spread(rest)
    counts = np.bincount(data.rank, minlength=data.num_ranks)
    errors = 1.2533 * spread / np.sqrt(counts)  # The standard error of a median.
    logs = of_rank - middle
    drift = _drift(data, rest, newest, spread)
    drifted = np.flatnonzero(drift != 0)
    logs = logs + drift
    logs -= np.median(logs)
    clear = np.abs(logs) > np.maximum(_CLEAR, 3 * errors)
    scale = math.exp(middle)
    return TimeFit(
        fixed_s=fixed * scale,
        # A step of few tokens can take as long as its replicas alone. The slope by tokens stays
        # above 0, because work is measured in tokens.
        s_per_token=max(per_token, 1e-3 * per_replica) * scale,
        s_per_replica=per_replica * scale,
        factors=np.exp(np.where(clear, logs, 0.0)),
        factor_errors=errors,
        error=float(np.minimum(np.abs(rest), 3 * spread).mean()),
        explained=_explained(data, rest, spread),
        steps=int(counts.max()),
        drifted=tuple(drifted.tolist()),
        note=note,
    )


def _drift(
    data: _Data, rest: NDArray[np.float64], newest: NDArray[np.bool_], spread: float
) -> NDArray[np.float64]:
    """Return (R,) change of each rank's logarithmic factor in the newest steps; 0 without drift."""
    counts = np.bincount(data.rank[newest], minlength=data.num_ranks)
    medians = np.zeros(data.num_ranks)
    for rank in np.flatnonzero(counts >= NEWEST_STEPS // 4):
        medians[rank] = np.median(rest[newest & (data.rank == rank)])
    medians -= np.median(medians)
    errors = 1.2533 * spread / np.sqrt(np.maximum(counts, 1))
    return np.where(np.abs(medians) > np.maximum(_DRIFT, 4 * errors), medians, 0.0)


def _explained(data: _Data, rest: NDArray[np.float64], spread: float) -> float:
    weights = _huber(rest, spread)
    values = np.log(data.seconds)
    mean = float(np.average(values, weights=weights))
    total = float((weights * (values - mean) ** 2).sum())
    return 1.0 - float((weights * rest**2).sum()) / total if total > 0 else 0.0


# --- parts of the fit -----------------------------------------------------------------------------


def _spread(values: NDArray[np.float64]) -> float:
    """Return the standard deviation as the median absolute value shows it, at least 1e-4."""
    return max(1e-4, 1.4826 * float(np.median(np.abs(values))))


def _huber(values: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    size = np.abs(values)
    return np.asarray(_HUBER * spread / np.maximum(size, _HUBER * spread), np.float64)


def _medians(values: NDArray[np.float64], data: _Data) -> NDArray[np.float64]:
    """Return the (R,) median of each rank."""
    order = np.argsort(data.rank, kind="stable")
    counts = np.bincount(data.rank, minlength=data.num_ranks)
    parts = np.split(values[order], np.cumsum(counts)[:-1])
    return np.array([np.median(part) for part in parts])


def _means(
    values: NDArray[np.float64], weights: NDArray[np.float64], data: _Data
) -> NDArray[np.float64]:
    """Return the (R, C) weighted mean of each rank."""
    total = np.bincount(data.rank, weights, data.num_ranks)
    sums = [np.bincount(data.rank, weights * column, data.num_ranks) for column in values.T]
    return np.asarray(np.stack(sums, axis=1) / total[:, None], np.float64)


def _demeaned_share(data: _Data, spread: float) -> NDArray[np.float64]:
    """Return the (R,) share of a rank's mean that its factor explains and that is taken away.

    Source: Wooldridge, Econometric Analysis of Cross Section and Panel Data, 10.4: random effects
    as a regression on partly demeaned data.
    """
    counts = np.bincount(data.rank, minlength=data.num_ranks)
    return np.asarray(1.0 - spread / np.sqrt(spread**2 + counts * _FACTOR_SPREAD**2), np.float64)


def _solve(
    design: NDArray[np.float64], target: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weighted least squares solution without negative coefficients."""
    root = np.sqrt(weights)
    q, r = np.linalg.qr(design * root[:, None])
    scale = np.maximum(np.abs(r).max(axis=0), 1e-300)
    return np.asarray(nnls(r / scale, q.T @ (target * root))[0] / scale, np.float64)


def _inverse_of_gram(
    design: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return the inverse of the normal equations' matrix; None if it has none."""
    gram = design.T @ (design * weights[:, None])
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    unit = gram / np.outer(scale, scale)
    if np.linalg.cond(unit) > 1e12:
        return None
    return np.asarray(np.linalg.inv(unit) / np.outer(scale, scale), np.float64)
