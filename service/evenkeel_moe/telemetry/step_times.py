"""Fits the seconds that ranks report to their tokens and active replicas.

`seconds = factor_r * (fixed_s * layers + s_per_token * tokens + s_per_replica * active)`

The three coefficients are common to all ranks, and each rank has a factor. All errors are relative,
because a step of many tokens has larger errors than one of few. Outliers have a bounded influence
(Huber weights). The factors are random effects: where the tokens of a rank never change, a
difference in its seconds is taken to come from its tokens before it is taken to come from its
speed.

Under a good placement tokens hardly vary, and the seconds vary by noise. Then the slopes cannot be
measured, but those measured before still hold, and with them the factors can be measured.

The speed of a rank is taken to be the same in all steps that are given; `speed_changes` finds the
steps of which this holds.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.telemetry.common_curve import levels_by_curve
from evenkeel_moe.telemetry.robust_regression import (
    EFFICIENCY,
    alikeness,
    huber,
    inverse_of_gram,
    median_of,
    solve,
    spread_of,
)

MIN_STEPS = 16
"""Measured steps that every rank needs."""
MIN_EXPLAINED = 0.5
"""Least share of the variation of the seconds that a fit must explain."""
STILL_EXPLAINED = 0.4
"""The same for a fit that follows one that was used, so that a fit near the limit is not used in
one cycle and left out in the next."""
_AS_GOOD = 1.1
"""Slopes of earlier steps are kept if their error is at most this many times that of new ones."""
_NEWEST_STEPS = 32
"""Steps that always count, so that a rank whose speed has just changed has enough."""
_POOLED_PASSES = 4
_RANK_PASSES = 4
_MOST_ROWS = 16_384
"""More measurements take longer and change a median of thousands of values little."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal errors."""
_FACTOR_SPREAD = 0.1
"""Expected standard deviation of the ranks' factors."""
_BENT = 0.8
"""Ranks are compared by a curve if its error is at most this share of that of the straight fit."""
_LEAST_VARIATION = 0.005
"""A column that varies by a smaller share of its mean, given the others, is collinear."""
_LARGEST_ERROR = 0.05
"""Largest standard error of the part of the time that a slope explains, as a share of the time."""
_CLEAR = 0.02
"""A factor must differ by this much from 1, and by three standard errors, or it counts as 1."""
_TOLD_APART = (
    ((0, 1, 2), ""),
    ((0, 1), "tokens and active replicas rise together: one slope by tokens"),
    ((1,), "tokens hardly vary: seconds per token only"),
)
"""Columns of the design that a fit uses, most first, and what it says of the others."""


@dataclass(frozen=True, slots=True)
class NoFit:
    """The seconds cannot be used as a cost model."""

    reason: str
    factors: NDArray[np.float64] | None = field(default=None, compare=False)
    """(R,) like `TimeFit.factors`, NaN for ranks with too few measured steps. Speeds can be
    compared without slopes that are sound. None if they cannot."""


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
    told_apart: int = 3
    """Coefficients that the steps tell apart."""
    drifted: tuple[int, ...] = ()
    """Ranks whose speed has changed: only their steps since then were fitted."""
    note: str = ""
    """The reason that a coefficient is 0 although it may not be; empty if all were fitted."""
    slopes_kept: bool = False
    """True if the steps tell only the factors, and the slopes are those of an earlier fit."""
    refused: str = ""
    """The reason that newer steps were not fitted; empty if this fit is of the newest."""

    def expected_s(
        self, tokens: NDArray[np.float64], active: NDArray[np.float64], layers: int
    ) -> NDArray[np.float64]:
        """Return the seconds of the median rank over all layers, of the shape of `tokens`."""
        fixed_s = self.fixed_s * layers
        return np.asarray(fixed_s + self.s_per_token * tokens + self.s_per_replica * active)


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
    """Fit the common coefficients and the factor of each rank, and judge the fit.

    Args:
        tokens: (T, R) tokens each rank carried in a step, over all layers; oldest step first.
        active: (T, R) replicas with tokens of each rank, over all layers.
        seconds: (T, R) compute of each rank, over all layers; NaN if not measured.
        layers: number of layers.
        before: the fit to earlier steps that was used; None if there was none.

    Returns:
        The fit, or the reason that there is none: a rank with fewer than 16 measured steps, or
        seconds of which tokens, replicas and factors explain too little. The slopes of the fit
        before are kept if these steps tell less of them and they describe the steps as well.
    """
    return judged(best_fit(tokens, active, seconds, layers, before), before)


def best_fit(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    layers: int,
    before: TimeFit | None = None,
) -> TimeFit | NoFit:
    """Return the fit as `fit_times` does, without judging it: its slopes may be 0 or mean nothing.

    The reason is that a rank has too few measured steps.
    """
    known = (tokens > 0) & (seconds > 0) & np.isfinite(seconds) & np.isfinite(active)
    if not known.any():
        return NoFit("no rank reports seconds")
    counts = known.sum(axis=0)
    if counts.min() < MIN_STEPS:
        return NoFit(
            f"rank {int(counts.argmin())} reported seconds for {int(counts.min())} steps,"
            f" {MIN_STEPS} are needed",
            _factors_of_some(tokens, active, seconds, layers, counts >= MIN_STEPS),
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
    coefficients, told_apart, note = _fit_what_is_told_apart(data)
    found = _finish(data, coefficients, told_apart, note)
    if before is None:
        return found
    clear = found.explained >= STILL_EXPLAINED and _rises(found)
    if clear and told_apart >= before.told_apart:
        return found
    slopes = np.array([before.fixed_s, before.s_per_token, before.s_per_replica])
    kept = _finish(data, slopes, before.told_apart, before.note, compare_by_curve=False)
    return replace(kept, slopes_kept=True) if kept.error <= _AS_GOOD * found.error else found


def judged(found: TimeFit | NoFit, before: TimeFit | None) -> TimeFit | NoFit:
    """Return the fit, or the reason that it cannot be used as a cost model."""
    if isinstance(found, NoFit) or found.slopes_kept:
        return found
    if not _rises(found):
        return NoFit("the seconds do not rise with tokens or active replicas", found.factors)
    least_explained = MIN_EXPLAINED if before is None else STILL_EXPLAINED
    if found.explained >= least_explained:
        return found
    return NoFit(
        f"the fit explains {max(found.explained, 0.0):.0%} of the variation of the ranks' seconds"
        f" (at least {least_explained:.0%} is needed)",
        found.factors,
    )


def _rises(found: TimeFit) -> bool:
    return found.s_per_token > 0.0 or found.s_per_replica > 0.0


def _factors_of_some(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    layers: int,
    enough: NDArray[np.bool_],
) -> NDArray[np.float64] | None:
    """Return the (R,) factors of the ranks with enough steps, NaN for the others."""
    if not enough.any():
        return None
    found = best_fit(tokens[:, enough], active[:, enough], seconds[:, enough], layers)
    factors = np.full(len(enough), np.nan)
    factors[enough] = 1.0 if found.factors is None else found.factors
    return factors


def _newest_rows(steps: int, ranks: int) -> NDArray[np.int64]:
    """Return the steps that count: the newest, and evenly spaced ones of the earlier."""
    most = max(2 * _NEWEST_STEPS, _MOST_ROWS // ranks)
    if steps <= most:
        return np.arange(steps)
    earlier = np.linspace(0, steps - _NEWEST_STEPS - 1, most - _NEWEST_STEPS).astype(np.int64)
    return np.concatenate([np.unique(earlier), np.arange(steps - _NEWEST_STEPS, steps)])


def _fit_what_is_told_apart(data: _Data) -> tuple[NDArray[np.float64], int, str]:
    """Return (3,) coefficients, 0 for those that the data do not tell apart.

    Return also how many were told apart, and what was not.
    """
    for chosen in _TOLD_APART:
        columns, note = chosen
        found, clear = _fit(replace(data, design=data.design[:, columns]))
        if clear or len(columns) == 1:
            break
    coefficients = np.zeros(3)
    coefficients[list(columns)] = found
    return coefficients, len(columns), note


def _fit(data: _Data) -> tuple[NDArray[np.float64], bool]:
    """Return (C,) coefficients, and whether the data tell the slopes apart."""
    tokens = 0 if data.design.shape[1] == 1 else 1
    coefficients = np.zeros(data.design.shape[1])
    coefficients[tokens] = np.median(data.seconds / data.design[:, tokens])
    for _ in range(_POOLED_PASSES):
        expected = data.design @ coefficients
        relative = data.seconds / expected - 1.0
        weights = huber(relative, spread_of(relative))
        found = solve(data.design / expected[:, None], 1.0 + relative, weights)
        coefficients = found if found.any() else coefficients
    clear = False
    for _ in range(_RANK_PASSES):
        expected = data.design @ coefficients
        error = np.log(data.seconds / expected)
        of_rank = _medians(error, data)
        spread = spread_of(error - of_rank[data.rank])
        weights = huber(error - of_rank[data.rank], spread)
        scaled = data.design / expected[:, None]
        taken = _demeaned_share(data, spread)[data.rank]
        design = scaled - taken[:, None] * _means(scaled, weights, data)[data.rank]
        level = np.clip(1.0 + error, 0.0, 2.0)
        target = level - taken * _means(level[:, None], weights, data)[data.rank, 0]
        found = solve(design, target, weights)
        coefficients = found if found.any() else coefficients
        parts = coefficients * scaled.mean(axis=0)
        clear = _tells_apart(inverse_of_gram(design, weights), scaled, parts, spread, tokens)
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
    data: _Data,
    coefficients: NDArray[np.float64],
    told_apart: int,
    note: str,
    *,
    compare_by_curve: bool = True,
) -> TimeFit:
    """Return the factors and errors of given coefficients."""
    fixed, per_token, per_replica = coefficients.tolist()
    error = np.log(data.seconds / (data.design @ coefficients))
    of_rank = _medians(error, data)
    weights = huber(error - of_rank[data.rank], spread_of(error - of_rank[data.rank]))
    of_rank = _means(error[:, None], weights, data)[:, 0]
    rest = error - of_rank[data.rank]
    spread = spread_of(rest)
    counts = np.bincount(data.rank, minlength=data.num_ranks)
    middle = float(np.median(of_rank))
    alike = alikeness(_by_rank(rest, data), spread)
    logs, errors = of_rank - middle, alike * spread / np.sqrt(EFFICIENCY * counts)
    if compare_by_curve:
        bent, bent_rest = levels_by_curve(
            data.design @ coefficients, data.seconds, data.rank, data.num_ranks
        )
        if spread_of(bent_rest) <= _BENT * spread:
            logs, errors = bent, alike * _MEDIAN_ERROR * spread_of(bent_rest) / np.sqrt(counts)
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
        told_apart=told_apart,
        note=note,
    )


def _explained(data: _Data, rest: NDArray[np.float64], spread: float) -> float:
    weights = huber(rest, spread)
    values = np.log(data.seconds)
    mean = float(np.average(values, weights=weights))
    total = float((weights * (values - mean) ** 2).sum())
    return 1.0 - float((weights * rest**2).sum()) / total if total > 0 else 0.0


# --- parts of the fit -----------------------------------------------------------------------------


def _medians(values: NDArray[np.float64], data: _Data) -> NDArray[np.float64]:
    """Return the (R,) median of each rank."""
    return np.array([median_of(part) for part in _by_rank(values, data)])


def _by_rank(values: NDArray[np.float64], data: _Data) -> list[NDArray[np.float64]]:
    order = np.argsort(data.rank, kind="stable")
    counts = np.bincount(data.rank, minlength=data.num_ranks)
    return np.split(values[order], np.cumsum(counts)[:-1])


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
