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
time is added to the seconds of both sides, times the rank's median ratio of reported to modelled
routed seconds before the plan: so it is in seconds also where the model is in tokens, or wrong by a
factor.

Where the model misses a part of the time, for example a fixed part, the medians depend on the
tokens of the steps. Therefore each step after the plan is paired with a step of the same phase
before it whose tokens differ by at most a tenth; steps without a partner are left out. Where a rank
clearly changed its speed before the plan, only the steps since then are compared.

The standard error is that of batch means, because neighbouring steps are alike: the steps of each
side are divided into eight consecutive batches, and the variance of their means counts. What
changes at the same moment as the placement, such as the clock of all devices, counts as the plan's.

Sources: Rosenbaum and Rubin, Constructing a Control Group Using Multivariate Matched Sampling
Methods (1985), for pairs within a caliper; Law, Simulation Modeling and Analysis, 9.5.3, for batch
means; Welch (1947) for the degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
"""Compared steps that are enough; more are not waited for."""
_CALIPER = 0.1
"""Largest difference of the tokens of two paired steps, as a share of the larger number."""
_BATCHES = 8
_MOSTLY = 0.9
_MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median over that of a mean, for normal errors."""
_WINSOR = 3.0
"""Standard deviations beyond which a single step counts no more for the error."""
_TAIL = 0.025


@dataclass(frozen=True, eq=False, slots=True)
class TimedSteps:
    """Steps of one phase with measured seconds and modelled times, in order."""

    tokens: NDArray[np.float64]
    """(T,) routed tokens of all ranks."""
    seconds: NDArray[np.float64]
    """(T, R) routed MoE compute of each rank; NaN if not measured."""
    times: NDArray[np.float64]
    """(T, L, R) modelled time of each rank and layer under the placement in force, with shared
    experts."""
    routed: NDArray[np.float64]
    """(T, R) modelled time of each rank in its routed experts alone, summed over layers."""

    @property
    def ratios(self) -> NDArray[np.float64]:
        """(T, R) logarithm of the seconds over the routed time; NaN if one is unknown or 0."""
        return _log_ratios(self.seconds, self.routed)

    def whole_ratios(self, level: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the (T, R) ratios with shared experts in the seconds and in the modelled time.

        Args:
            level: (R,) logarithm of the seconds in which a rank does the unit of modelled time.
        """
        whole = self.times.sum(axis=1)
        worked = np.where(self.routed > 0, self.seconds, 0.0)
        return _log_ratios(worked + np.exp(level) * (whole - self.routed), whole)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> "TimedSteps":
        """Return some of the steps."""
        return TimedSteps(
            self.tokens[rows], self.seconds[rows], self.times[rows], self.routed[rows]
        )


def _log_ratios(seconds: NDArray[np.float64], modelled: NDArray[np.float64]) -> NDArray[np.float64]:
    known = (modelled > 0) & (seconds > 0) & np.isfinite(seconds)
    ratios = np.full(modelled.shape, math.nan)
    ratios[known] = np.log(seconds[known] / modelled[known])
    return ratios


def _level(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (R,) median of (T, R) ratios; that of all ranks for a rank without work."""
    level = column_medians(ratios)
    return np.where(np.isnan(level), np.nanmedian(ratios), level)


@dataclass(frozen=True, eq=False, slots=True)
class PhaseSteps:
    """The steps of one phase around a plan."""

    before: TimedSteps
    after: TimedSteps
    old_times: NDArray[np.float64]
    """(T, L, R) modelled times of the steps after it, had the old placement stayed."""


@dataclass(frozen=True, eq=False, slots=True)
class _Side:
    """One side of the comparison in one phase, over the paired steps."""

    ratios: NDArray[np.float64]
    """(T, R) in the order of the steps."""
    times: NDArray[np.float64]
    """(T, L, R) modelled times of the steps after the plan, under the placement of this side."""


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
    return TimedSteps(tokens, steps.compute_s, times, routed.sum(axis=1))


def measure_gain(phases: Sequence[PhaseSteps], at: float) -> tuple[DeliveredGain, bool]:
    """Return the gain that a plan delivered; see the head of the module.

    Args:
        phases: the steps around the plan.
        at: Unix seconds now.

    Returns:
        The gain, whose source of the cost model is left empty, and whether more steps after the
        plan would add few pairs.
    """
    if not any(_measured(one.after).any() for one in phases):
        return DeliveredGain(at, unknown_because="no rank reports seconds"), False
    known = [_known(one) for one in phases]
    matched = [(one, *match_tokens(one.before.tokens, one.after.tokens)) for one in known]
    pairs = [_pair(*one) for one in matched if len(one[1]) >= _BATCHES]
    steps = sum(len(old.ratios) for old, _ in pairs)
    if steps < _FEWEST_PAIRS:
        why = f"{steps} pairs of steps alike in tokens, {_FEWEST_PAIRS} are needed"
        return DeliveredGain(at, steps=steps, unknown_because=why), False
    old, new = _total([one for one, _ in pairs]), _total([one for _, one in pairs])
    possible = min(ENOUGH_STEPS, sum(len(one.before.tokens) for one in known))
    remaining = new.time / old.time
    reach, error = _reach(old.variance, new.variance)
    gain = DeliveredGain(
        at,
        gain=1.0 - remaining,
        error=remaining * error,
        lower=1.0 - remaining * math.exp(reach),
        upper=1.0 - remaining * math.exp(-reach),
        modelled=1.0 - new.modelled / old.modelled,
        steps=steps,
    )
    return gain, steps >= _MOSTLY * possible


def _known(phase: PhaseSteps) -> PhaseSteps:
    """Return the steps that can be compared: with seconds, and before the plan in one state."""
    use = _measured(phase.after)
    before = newest_state(phase.before.take(_measured(phase.before)))
    return PhaseSteps(before, phase.after.take(use), phase.old_times[use])


def newest_state(steps: TimedSteps) -> TimedSteps:
    """Return the newest steps in which no rank clearly changed its speed.

    A plan often follows such a change: only the steps since say what it was made for.
    """
    worked = np.isfinite(steps.ratios).all(axis=0)  # The ranks with work in every step.
    begin = find_changes(steps.ratios[:, worked]).first.max(initial=0)
    return steps.take(np.arange(begin, len(steps.tokens)))


def _measured(steps: TimedSteps) -> NDArray[np.bool_]:
    """Return (T,) True for the steps in which every rank with work has seconds."""
    worked = steps.routed > 0
    known = np.isfinite(steps.ratios)
    return np.asarray(worked.any(axis=1) & (known == worked).all(axis=1), np.bool_)


def _pair(
    phase: PhaseSteps, earlier: NDArray[np.int64], later: NDArray[np.int64]
) -> tuple[_Side, _Side]:
    """Return both sides, of the steps that have a partner alike in tokens."""
    order = np.sort(later)
    old, new = phase.before.take(np.sort(earlier)), phase.after.take(order)
    level = _level(old.ratios)
    return (
        _Side(old.whole_ratios(level), phase.old_times[order]),
        _Side(new.whole_ratios(level), new.times),
    )


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


@dataclass(frozen=True, slots=True)
class _Total:
    time: float
    modelled: float
    variance: float
    """Of the logarithm of `time`."""


def _total(sides: Sequence[_Side]) -> _Total:
    """Return the time of all steps under one placement, as its measured ratios give it."""
    time = modelled = 0.0
    weighted: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for side in sides:
        level = _level(side.ratios)
        scaled = np.exp(level) * side.times
        slowest = scaled.max(axis=2)
        ranks = scaled.shape[2]
        weight = np.zeros(ranks)
        np.add.at(weight, scaled.argmax(axis=2), slowest)
        time += float(slowest.sum())
        modelled += float(side.times.max(axis=2).sum())
        weighted.append((weight, np.nan_to_num(side.ratios - level)))
    variance = sum(_variance(_winsorized(off @ (weight / time))) for weight, off in weighted)
    return _Total(time, modelled, float(variance))


def _winsorized(values: NDArray[np.float64]) -> NDArray[np.float64]:
    middle = float(np.median(values))
    reach = _WINSOR * spread_of(values - middle)
    return np.clip(values, middle - reach, middle + reach)


def _variance(values: NDArray[np.float64]) -> float:
    """Return the variance of the median of values in order, by batch means."""
    means = np.array([part.mean() for part in np.array_split(values, _BATCHES)])
    return _MEDIAN_VARIANCE * float(means.var(ddof=1)) / _BATCHES


def _reach(old: float, new: float) -> tuple[float, float]:
    """Return half the 95 % interval of the logarithm of new / old, and its standard error."""
    total = old + new
    if total == 0:
        return 0.0, 0.0
    freedom = total**2 / ((old**2 + new**2) / (_BATCHES - 1))
    error = math.sqrt(total)
    return float(stdtrit(freedom, 1.0 - _TAIL)) * error, error
