"""Measures the gain of a plan by the seconds that ranks reported before and after it.

The gain is `1 - new / old`, summed over the compared steps after the plan:

`new = sum over steps, layers of max over ranks r of after_r * T_r(under the new placement)`
`old = sum over steps, layers of max over ranks r of before_r * T_r(under the old placement)`

T_r is the time of a rank in a layer under the cost model, from the counts of the same step.
`before_r` and `after_r` are the medians over steps of reported seconds / (sum over layers of T_r)
of that rank, each under the placement that was in force. Ranks report one sum over all layers; the
model only divides it over the layers, and it tells what the steps after the plan would have taken
under the old placement. So both sums are of the same steps, and a change of traffic is no gain. A
model that is wrong by a factor, for a rank or for a placement, changes the medians by the inverse
of that factor.

Ranks report the seconds of routed experts alone. Where the model has shared experts, their modelled
time is added on both sides, times the rank's median ratio of reported to modelled routed seconds
before the plan: so it is in seconds also where the model is in tokens, or wrong by a factor.

Where the model misses a part of the time, for example a fixed part, the medians depend on the
tokens of the steps. Therefore each step after the plan is paired with a step of the same phase
before it whose tokens differ by at most a tenth; steps without a partner are left out. Where a rank
clearly changed its speed before the plan, only the steps since then are compared.

The standard error is that of batch means, because neighbouring steps are alike: the steps of each
side are divided into eight consecutive batches, and the variance of their means counts. What
changes at the same moment as the placement, such as the clock of all devices, counts as the plan's,
unless the ranks change together by no more than they do without a plan.

Sources: Rosenbaum and Rubin, Constructing a Control Group Using Multivariate Matched Sampling
Methods (1985), for pairs within a caliper; James and Stein, Estimation with Quadratic Loss (1961),
for the part that ranks have in common; Law, Simulation Modeling and Analysis, 9.5.3, for batch
means; Welch (1947) for the degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.telemetry.robust import column_medians, spread_of
from evenkeel_moe.telemetry.speed_changes import find_changes

_FEWEST_PAIRS = 16
ENOUGH_STEPS = 64
"""Compared steps that are enough if their error is small."""
MOST_PAIRS = 256
"""Compared steps that are enough in any case."""
_PRECISE = 0.1
"""A standard error that is small, as a share of the promise."""
_CALIPER = 0.1
"""Largest difference of the tokens of two paired steps, as a share of the larger number."""
_BATCHES = 8
_MOSTLY = 0.9
_MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median over that of a mean, for normal errors."""
_BETWEEN_SIDES = 2.0
"""Variance of the difference between the means of two neighbouring sides, over the sum of the
variances inside them, for a random walk of length T on each side: 2T/3 over T/6 + T/6."""
_WINSOR = 3.0
"""Standard deviations beyond which a single step counts no more for the error."""
_TAIL = 0.025


class TimedSteps(NamedTuple):
    """Steps of one phase with measured seconds and modelled times, in order."""

    tokens: NDArray[np.float64]
    """(T,) routed tokens of all ranks."""
    seconds: NDArray[np.float64]
    """(T, R) routed MoE compute of each rank; NaN if not measured."""
    times: NDArray[np.float64]
    """(T, L, R) modelled time of each rank and layer under a placement, with shared experts."""
    routed: NDArray[np.float64]
    """(T, L, R) the same of the routed experts alone."""

    @property
    def ratios(self) -> NDArray[np.float64]:
        """(T, R) logarithm of the seconds over the routed time; NaN if one is unknown or 0."""
        modelled = self.routed.sum(axis=1)
        known = (modelled > 0) & (self.seconds > 0) & np.isfinite(self.seconds)
        ratios = np.full(modelled.shape, math.nan)
        ratios[known] = np.log(self.seconds[known] / modelled[known])
        return ratios

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> "TimedSteps":
        """Return some of the steps."""
        return TimedSteps(*(values[rows] for values in self))


def _level(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (R,) median of (T, R) ratios; that of all ranks for a rank without work."""
    level = column_medians(ratios)
    return np.where(np.isnan(level), np.nanmedian(ratios), level)


@dataclass(frozen=True, eq=False, slots=True)
class PhaseSteps:
    """The steps of one phase around a plan."""

    before: TimedSteps
    after: TimedSteps
    stayed: TimedSteps
    """The steps after it, with their modelled times had the old placement stayed."""


@dataclass(frozen=True, eq=False, slots=True)
class _Side:
    """One placement in one phase."""

    ratios: NDArray[np.float64]
    """(T, R) of the paired steps that ran under it, in order."""
    steps: TimedSteps
    """The paired steps after the plan, with their modelled times under this placement."""
    before: NDArray[np.float64]
    """(R,) logarithm of the seconds in which a rank did the unit of modelled time before it."""
    left_out: float = 0.0
    """See `_steadied`."""


def timed_steps(
    steps: LoadWindow, placement: Placement, cost: CostModel, split: SplitModel
) -> TimedSteps:
    """Return steps with the times that a placement gives them.

    Raises:
        ShapeMismatch, InfeasiblePlan: the placement does not fit the counts.
    """
    times, routed = (
        moe_time.rank_times(moe_time.rank_work(steps.counts, placement, one, split), one)
        for one in (cost, replace(cost, shared_tokens=0.0))
    )
    tokens = steps.counts.sum(axis=(1, 2), dtype=np.float64)
    return TimedSteps(tokens, steps.compute_s, times, routed)


def measure_gain(
    phases: Sequence[PhaseSteps], at: float, promised: float | None = None
) -> tuple[DeliveredGain, bool]:
    """Return the gain that a plan delivered; see the head of the module.

    Args:
        phases: the steps around the plan.
        at: Unix seconds now.
        promised: gain of the verdict; None if there was none.

    Returns:
        The gain, and whether more steps after the plan would add few pairs, or are not needed.
    """
    if not any(_measured(one.after).any() for one in phases):
        why = "no step under the plan has seconds of every rank with work"
        return DeliveredGain(at, unknown_because=why), False
    known = [_known(one) for one in phases]
    matched = [(one, *match_tokens(one.before.tokens, one.after.tokens)) for one in known]
    pairs = [_steadied(*_pair(*one)) for one in matched if len(one[1]) >= _BATCHES]
    steps = sum(len(new.ratios) for _, new in pairs)
    if steps < _FEWEST_PAIRS:
        why = f"{steps} pairs of steps alike in tokens, {_FEWEST_PAIRS} are needed"
        return DeliveredGain(at, steps=steps, unknown_because=why), False
    old, new = _total([one for one, _ in pairs]), _total([one for _, one in pairs])
    possible = min(MOST_PAIRS, sum(len(one.before.tokens) for one in known))
    remaining = new.time / old.time
    reach, error = _reach(old.variance, new.variance)
    precise = promised is None or remaining * error <= _PRECISE * promised
    wanted = min(ENOUGH_STEPS, possible) if precise else possible
    gain = DeliveredGain(
        at,
        gain=1.0 - remaining,
        error=remaining * error,
        lower=1.0 - remaining * math.exp(reach),
        upper=1.0 - remaining * math.exp(-reach),
        modelled=1.0 - new.modelled / old.modelled,
        steps=steps,
    )
    return gain, steps >= _MOSTLY * wanted


def _known(phase: PhaseSteps) -> PhaseSteps:
    """Return the steps that can be compared: with seconds, and before the plan in one state."""
    use = _measured(phase.after)
    before = newest_state(phase.before.take(_measured(phase.before)))
    return PhaseSteps(before, phase.after.take(use), phase.stayed.take(use))


def newest_state(steps: TimedSteps) -> TimedSteps:
    """Return the newest steps in which no rank clearly changed its speed.

    A plan often follows such a change: only the steps since say what it was made for.
    """
    worked = np.isfinite(steps.ratios).all(axis=0)  # The ranks with work in every step.
    ratios = steps.ratios[:, worked]
    alone = ratios - column_medians(ratios.T)[:, None]  # Without what all have in common.
    begin = find_changes(alone).first.max(initial=0)
    return steps.take(slice(begin, None))


def _measured(steps: TimedSteps) -> NDArray[np.bool_]:
    """Return (T,) True for the steps in which every rank with work has seconds."""
    worked = np.asarray(steps.routed.sum(axis=1) > 0)
    known = np.isfinite(steps.ratios)
    return np.asarray(worked.any(axis=1) & (known == worked).all(axis=1), np.bool_)


def _pair(
    phase: PhaseSteps, earlier: NDArray[np.int64], later: NDArray[np.int64]
) -> tuple[_Side, _Side]:
    """Return both sides, of the steps that have a partner alike in tokens."""
    old, new = phase.before.take(np.sort(earlier)), phase.after.take(np.sort(later))
    before = _level(old.ratios)
    return (
        _Side(old.ratios, phase.stayed.take(np.sort(later)), before),
        _Side(new.ratios, new, before),
    )


def _steadied(old: _Side, new: _Side) -> tuple[_Side, _Side]:
    """Leave out the change of all ranks together, as far as such changes come without a plan.

    Where other work shares the hosts or a clock wanders, all ranks become slower or faster together
    for seconds, and longer batches do not average that out. By how much shows in the batches of
    each side. Of the change between the sides, the share counts that exceeds what such wandering
    explains: the estimator of James and Stein (1961), positive part. What is left out counts as an
    error.
    """
    change = float(np.nanmean(_level(new.ratios) - _level(old.ratios)))
    together = [np.nanmean(side.ratios - _level(side.ratios), axis=1) for side in (old, new)]
    inside = sum(float(_batch_means(values).var(ddof=1)) for values in together)
    wander = _BETWEEN_SIDES * inside
    share = min(1.0, wander / change**2) if change else 0.0
    old, new = (
        replace(side, ratios=side.ratios - share * values[:, None])
        for side, values in zip((old, new), together, strict=True)
    )
    return old, replace(new, ratios=new.ratios - share * change, left_out=share * change)


def match_tokens(
    before: NDArray[np.float64], after: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair steps of like tokens, each step at most once.

    Args:
        before: (T,) tokens.
        after: (U,) tokens.

    Returns:
        (P,) positions before, and (P,) positions after. The greatest number of pairs.

    Order: ascending in tokens. Both lists are walked once, and the smaller value that is out of
    reach of the other list's smallest is dropped.
    """
    first, second = np.argsort(before, kind="stable"), np.argsort(after, kind="stable")
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        low, high = before[first[i]], after[second[j]]
        if abs(low - high) <= _CALIPER * max(low, high):
            pairs.append((int(first[i]), int(second[j])))
            i, j = i + 1, j + 1
        elif low < high:
            i += 1
        else:
            j += 1
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


class _Total(NamedTuple):
    time: float
    modelled: float
    variance: float
    """Of the logarithm of `time`."""


def _total(sides: Sequence[_Side]) -> _Total:
    """Return the time of all steps under one placement, as its measured ratios give it."""
    time = modelled = 0.0
    weighted: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for side in sides:
        level, steps = _level(side.ratios), side.steps
        routed = np.exp(level) * steps.routed
        whole = routed + np.exp(side.before) * (steps.times - steps.routed)
        slowest = whole.argmax(axis=2)
        weight = np.zeros(len(level))
        np.add.at(weight, slowest, np.take_along_axis(routed, slowest[..., None], axis=2)[..., 0])
        time += float(whole.max(axis=2).sum())
        modelled += float(steps.times.max(axis=2).sum())
        weighted.append((weight, np.nan_to_num(side.ratios - level)))
    variance = sum(_variance(off @ (weight / time)) for weight, off in weighted)
    shares = [float(weight.sum()) / time for weight, _ in weighted]
    left_out = sum(one.left_out * share for one, share in zip(sides, shares, strict=True))
    return _Total(time, modelled, variance + left_out**2)


def _variance(values: NDArray[np.float64]) -> float:
    """Return the variance of the median of values in order, by batch means."""
    return _MEDIAN_VARIANCE * float(_batch_means(values).var(ddof=1)) / _BATCHES


def _batch_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of eight batches of values in order."""
    middle = float(np.median(values))
    reach = _WINSOR * spread_of(values - middle)
    kept = np.clip(values, middle - reach, middle + reach)
    return np.array([part.mean() for part in np.array_split(kept, _BATCHES)])


def _reach(old: float, new: float) -> tuple[float, float]:
    """Return half the 95 % interval of the logarithm of new / old, and its standard error."""
    total = old + new
    if total == 0:
        return 0.0, 0.0
    freedom = total**2 / ((old**2 + new**2) / (_BATCHES - 1))
    error = math.sqrt(total)
    return float(stdtrit(freedom, 1.0 - _TAIL)) * error, error
