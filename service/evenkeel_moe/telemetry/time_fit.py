"""Fits the seconds that ranks report to their tokens and active replicas.

`seconds = factor_r * (fixed_s * layers + s_per_token * tokens + s_per_replica * active)`

The three coefficients are common to all ranks, and each rank has a factor. All errors are relative,
because a step of many tokens has larger errors than one of few. Outliers have a bounded influence
(Huber weights). The factors are random effects: where the tokens of a rank never change, a
difference in its seconds is taken to come from its tokens before it is taken to come from its
speed.

A layer may take as long at few tokens as at some more, because it reads its weights in any case.
Then a straight line makes a rank with few tokens look slow, and the ranks are compared by a curve
of no given shape that all have in common.

Under a good placement tokens hardly vary, and the seconds vary by noise. Then the slopes cannot be
measured, but those measured before still hold, and with them the factors can be measured.

A fit to steps of two speeds gives a speed between them, which never was true. So when the speed of
a rank changes, its earlier steps no longer count. Those of other ranks and the slopes are kept.
"""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenkeel_moe.telemetry.robust import alikeness, column_medians, spread_of
from evenkeel_moe.telemetry.speed_changes import MIN_STEPS, SpeedChanges, find_changes

MIN_EXPLAINED = 0.5
"""Least share of the variation of the seconds that a fit must explain."""
STILL_EXPLAINED = 0.4
"""The same for a fit that follows one that was used, so that a fit near the limit is not used in
one cycle and left out in the next."""
_AS_GOOD = 1.1
"""Slopes of earlier steps are kept if their error is at most this many times that of new ones."""
_NEWEST_STEPS = 32
"""Steps that always count, so that a rank whose speed has just changed has enough."""
_MOST_ROWS = 16_384
"""More measurements take longer and change a median of thousands of values little."""
_CHANGE_PASSES = 4
"""A fit without the earlier steps of one rank may show the change of another."""
_PASSES = 8
_HUBER = 1.345
"""Residuals beyond this many standard deviations lose weight."""
_EFFICIENCY = 0.95
"""Of a mean with these weights, for normal errors."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal errors."""
_FACTOR_SPREAD = 0.1
"""Expected standard deviation of the ranks' factors."""
_BINS = 12
"""Points of the common curve."""
_CURVE_PASSES = 12
"""Most iterations between the curve and the factors; ranks whose work hardly overlaps need this
many to converge."""
_CONVERGED = 1e-4
"""Change of a logarithmic factor in one iteration, below which the iterations end."""
_BENT = 0.8
"""Ranks are compared by a curve if its error is at most this share of that of the straight fit."""
_LEAST_VARIATION = 0.005
"""A column that varies by a smaller share of its mean, given the others, is collinear."""
_LARGEST_ERROR = 0.05
"""Largest standard error of the part of the time that a slope explains, as a share of the time."""
_CLEAR = 0.02
"""A factor must differ by this much from 1, and by three standard errors, or it counts as 1."""
_TOLD_APART = {
    3: ((0, 1, 2), ""),
    2: ((0, 1), "tokens and active replicas rise together: one slope by tokens"),
    1: ((1,), "tokens hardly vary: seconds per token only"),
}
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
    error: float
    """Mean error as a share of the time."""
    explained: float
    """Share of the variation of the seconds that the fit explains, at most 1."""
    steps: int
    told_apart: int = 3
    """Coefficients that the steps tell apart."""
    drifted: tuple[int, ...] = ()
    """Ranks whose speed has changed: only their steps since then were fitted."""
    slopes_kept: bool = False
    """True if the steps tell only the factors, and the slopes are those of an earlier fit."""
    refused: str = ""
    """The reason that newer steps were not fitted; empty if this fit is of the newest."""

    @property
    def note(self) -> str:
        """The reason that a coefficient is 0 although it may not be; empty if all were fitted."""
        return _TOLD_APART[self.told_apart][1]

    def expected_s(
        self, tokens: NDArray[np.float64], active: NDArray[np.float64], layers: int
    ) -> NDArray[np.float64]:
        """Return the seconds of the median rank over all layers, of the shape of `tokens`."""
        fixed_s = self.fixed_s * layers
        return np.asarray(fixed_s + self.s_per_token * tokens + self.s_per_replica * active)


def fit_present_speeds(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    layers: int,
    before: TimeFit | None = None,
    first: NDArray[np.int64] | None = None,
) -> tuple[TimeFit | NoFit, SpeedChanges]:
    """Fit the common coefficients, and the factor of each rank since its speed changed last.

    Args:
        tokens: (T, R) tokens each rank carried in a step, over all layers; oldest step first.
        active: (T, R) replicas with tokens of each rank, over all layers.
        seconds: (T, R) compute of each rank, over all layers; NaN if not measured.
        layers: number of layers.
        before: the newest earlier fit that was used; None if there was none.
        first: (R,) first row of each rank that counts, as found before; None for all.

    Returns:
        The fit, or the reason that there is none: a rank with fewer than 16 measured steps, or
        seconds of which tokens, replicas and factors explain too little. The slopes of the fit
        before are kept if these steps tell less of them and they describe the steps as well.
        Also the rows that count.
    """
    steps, ranks = tokens.shape
    first = np.zeros(ranks, np.int64) if first is None else first
    row = np.arange(steps)[:, None]
    changes = SpeedChanges(first, np.full(ranks, steps), waiting=False)
    for _ in range(_CHANGE_PASSES):
        counted = (row >= changes.first) & (row < changes.end)
        found = _best_fit(tokens, active, np.where(counted, seconds, np.nan), layers, before)
        if isinstance(found, NoFit):
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(seconds / found.expected_s(tokens, active, layers))
        logs[~np.isfinite(logs) | (row < changes.first)] = np.nan
        logs -= column_medians(logs)
        newer = find_changes(logs - column_medians(logs.T)[:, None])  # What all have in common.
        newer = replace(newer, first=np.maximum(newer.first, changes.first))
        if np.array_equal(newer.first, changes.first) and np.array_equal(newer.end, changes.end):
            break
        changes = newer
    return _judged(found, before, np.flatnonzero(changes.first > 0).tolist()), changes


def _judged(found: TimeFit | NoFit, before: TimeFit | None, drifted: list[int]) -> TimeFit | NoFit:
    """Return the fit, or the reason that it cannot be used as a cost model."""
    if isinstance(found, NoFit):
        return found
    least_explained = MIN_EXPLAINED if before is None else STILL_EXPLAINED
    if found.slopes_kept or (_rises(found) and found.explained >= least_explained):
        return replace(found, drifted=tuple(drifted))
    if not _rises(found):
        return NoFit("the seconds do not rise with tokens or active replicas", found.factors)
    return NoFit(
        f"the fit explains {max(found.explained, 0.0):.0%} of the variation of the ranks' seconds"
        f" (at least {least_explained:.0%} is needed)",
        found.factors,
    )


def _rises(found: TimeFit) -> bool:
    return found.s_per_token > 0.0 or found.s_per_replica > 0.0


def _best_fit(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    layers: int,
    before: TimeFit | None = None,
) -> TimeFit | NoFit:
    """Return the fit without judging it: its slopes may be 0 or mean nothing.

    The reason is that a rank has too few measured steps.
    """
    known = (tokens > 0) & (seconds > 0) & np.isfinite(seconds) & np.isfinite(active)
    if not known.any():
        return NoFit("no rank reports seconds")
    counts = known.sum(axis=0)
    enough = counts >= MIN_STEPS
    if not enough.all():
        reason = (
            f"rank {int(counts.argmin())} reported seconds for {int(counts.min())} steps,"
            f" {MIN_STEPS} are needed"
        )
        if not enough.any():
            return NoFit(reason)
        some = _best_fit(tokens[:, enough], active[:, enough], seconds[:, enough], layers)
        factors = np.full(len(enough), np.nan)
        factors[enough] = some.factors
        return NoFit(reason, factors)
    rows = _chosen_rows(*tokens.shape)
    columns = np.broadcast_arrays(float(layers), tokens[rows], active[rows])
    design = np.where(known[rows][..., None], np.stack(columns, axis=2), 1.0)
    seconds = np.where(known, seconds, np.nan)[rows]
    for told_apart, (chosen, _) in _TOLD_APART.items():
        coefficients = np.zeros(3)
        coefficients[list(chosen)], clear = _fit(design[..., chosen], seconds)
        if clear or told_apart == 1:
            break
    found = _finish(design, seconds, coefficients, told_apart)
    if before is None:
        return found
    clear = found.explained >= STILL_EXPLAINED and _rises(found)
    if clear and found.told_apart >= before.told_apart:
        return found
    slopes = np.array([before.fixed_s, before.s_per_token, before.s_per_replica])
    kept = _finish(design, seconds, slopes, before.told_apart)
    return replace(kept, slopes_kept=True) if kept.error <= _AS_GOOD * found.error else found


def _chosen_rows(steps: int, ranks: int) -> NDArray[np.int64]:
    """Return the steps that are fitted: the newest, and evenly spaced ones of all."""
    most = max(2 * _NEWEST_STEPS, _MOST_ROWS // ranks) - _NEWEST_STEPS
    spaced = np.linspace(0, steps - 1, most).astype(np.int64)
    return np.unique(np.append(spaced, np.arange(max(0, steps - _NEWEST_STEPS), steps)))


class _Residuals(NamedTuple):
    """Logarithmic errors of a table, taken apart."""

    level: NDArray[np.float64]
    """(R,) median of each rank."""
    rest: NDArray[np.float64]
    """(T, R) what remains."""
    spread: float
    """Its standard deviation."""
    weights: NDArray[np.float64]
    """(T, R) Huber weights, at most 1; 0 where nothing is known."""


def _residuals(error: NDArray[np.float64]) -> _Residuals:
    level = column_medians(error)
    rest = error - level
    spread = spread_of(rest)
    beyond = np.maximum(np.abs(rest) / (_HUBER * spread), 1.0)
    return _Residuals(level, rest, spread, np.where(np.isfinite(rest), 1.0 / beyond, 0.0))


def _fit(
    design: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], bool]:
    """Return (C,) coefficients that are not negative, and whether the slopes are told apart.

    Args:
        design: (T, R, C) above 0.
        seconds: (T, R) NaN where not known.

    Source: Wooldridge, Econometric Analysis of Cross Section and Panel Data, 10.4: random effects
    as a regression on partly demeaned data.
    """
    known = np.isfinite(seconds)
    unit = design[known].mean(axis=0)
    design = design / unit
    coefficients = np.full(len(unit), np.median((seconds / design.sum(axis=2))[known]))
    for _ in range(_PASSES):
        expected = design @ coefficients
        error = np.log(seconds / expected)
        _, _, spread, weights = _residuals(error)
        target = np.where(known, np.clip(1.0 + error, 0.0, 2.0), 0.0)
        # A share of a rank's mean is explained by its factor and taken away.
        scaled = design / expected[..., None]
        means = np.einsum("tr,trc->rc", weights, scaled)
        demeaned = 1.0 - spread / np.sqrt(spread**2 + known.sum(axis=0) * _FACTOR_SPREAD**2)
        taken = demeaned / weights.sum(axis=0)
        root = np.sqrt(weights)[known]
        x = root[:, None] * (scaled - taken[:, None] * means)[known]
        y = root * (target - taken * (weights * target).sum(axis=0))[known]
        # The same problem in few rows.
        r = np.asarray(np.linalg.qr(np.column_stack([x, y]), mode="r"))
        found = nnls(r[:, :-1], r[:, -1])[0]
        coefficients = found if found.any() else coefficients
    clear = _tells_apart(x, scaled[known].mean(axis=0), coefficients, spread)
    return coefficients / unit, clear


def _tells_apart(
    x: NDArray[np.float64],
    means: NDArray[np.float64],
    coefficients: NDArray[np.float64],
    spread: float,
) -> bool:
    """Return True if the parts of the time that the slopes explain are well known.

    Their shares of the sum count: how large the sum is, the ranks' factors leave open.

    Args:
        x: (N, C) weighted columns of the regression.
        means: (C,) of the columns before they were demeaned.
        coefficients: (C,) that were found.
        spread: standard deviation of the errors.
    """
    gram = x.T @ x
    unit = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    scaled = gram / np.outer(unit, unit)
    parts = coefficients * means
    if np.linalg.cond(scaled) > 1e12 or parts.sum() <= 0:
        return False
    inverse = np.linalg.inv(scaled) / np.outer(unit, unit)
    shares = (np.diag(means) - np.outer(parts / parts.sum(), means)) / parts.sum()
    errors = np.sqrt(np.maximum(np.diag(shares @ inverse @ shares.T), 0.0))
    errors = errors[1:] if len(errors) > 1 else errors  # Without the fixed part.
    variation = 1.0 / np.maximum(errors * math.sqrt(len(x)), 1e-300)
    return bool((variation >= _LEAST_VARIATION).all() and (spread * errors <= _LARGEST_ERROR).all())


def _finish(
    design: NDArray[np.float64],
    seconds: NDArray[np.float64],
    coefficients: NDArray[np.float64],
    told_apart: int,
) -> TimeFit:
    """Return the factors and errors of given coefficients."""
    expected = design @ coefficients
    error = np.log(seconds / expected)
    level, rest, spread, weights = _residuals(error)
    level = level + np.nansum(weights * rest, axis=0) / weights.sum(axis=0)
    counts = np.isfinite(error).sum(axis=0)
    middle = float(np.median(level))
    rest = error - level
    spread = spread_of(rest)
    alike = alikeness(rest, spread)
    logs, errors = level - middle, alike * spread / np.sqrt(_EFFICIENCY * counts)
    bent, bent_spread = _levels_by_curve(expected, seconds)
    if bent_spread <= _BENT * spread:
        logs, errors = bent, alike * _MEDIAN_ERROR * bent_spread / np.sqrt(counts)
    clear = np.abs(logs) > np.maximum(_CLEAR, 3 * errors)
    fixed, per_token, per_replica = (coefficients * math.exp(middle)).tolist()
    return TimeFit(
        fixed_s=fixed,
        # A step of few tokens can take as long as its replicas alone. The slope by tokens stays
        # above 0, because work is measured in tokens.
        s_per_token=max(per_token, 1e-3 * per_replica),
        s_per_replica=per_replica,
        factors=np.exp(np.where(clear, logs, 0.0)),
        error=float(np.nanmean(np.minimum(np.abs(rest), 3 * spread))),
        explained=_explained(seconds, rest),
        steps=int(counts.max()),
        told_apart=told_apart,
    )


def _explained(seconds: NDArray[np.float64], rest: NDArray[np.float64]) -> float:
    """Return `TimeFit.explained`; rest: (T, R) errors."""
    weights = _residuals(rest).weights
    values = np.log(seconds)
    mean = np.nansum(weights * values) / weights.sum()
    total = float(np.nansum(weights * (values - mean) ** 2))
    return 1.0 - float(np.nansum(weights * rest**2)) / total if total > 0 else 0.0


def _levels_by_curve(
    expected_s: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Compare ranks by one curve that all have in common, and that only has to rise.

    Args:
        expected_s: (T, R) measure of the work, above 0; its scale has no effect.
        seconds: (T, R) above 0, NaN where not known.

    Returns:
        (R,) logarithm of the seconds of a rank relative to the median rank at the same work, and
        the standard deviation of the errors that remain. All averages are medians, so outliers in
        up to half the steps of a rank have no effect.
    """
    # Passes only change the seconds, so the work is sorted and divided into bins once.
    known = np.isfinite(seconds)
    order = np.argsort(expected_s[known], kind="stable")
    parts = np.array_split(order, min(_BINS, len(order)))
    at = [np.median(expected_s[known][part]) for part in parts]
    levels = np.zeros(seconds.shape[1])
    for _ in range(_CURVE_PASSES):
        values = (seconds / np.exp(levels))[known]
        curve = np.maximum.accumulate([np.median(values[part]) for part in parts])
        error = np.log(seconds / np.interp(expected_s, at, curve))
        before, levels = levels, column_medians(error)
        levels -= np.median(levels)
        if np.abs(levels - before).max() < _CONVERGED:
            break
    return levels, spread_of(error - levels)
