"""Chooses the cost model in force from what is known: measured, profiled, derived, or tokens.

The most trusted model that is sound is used. The others are compared with it, and where they
disagree the model's detail says so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.policy import CostChoice
from evenkeel_moe.model.quantities import duration_text
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.derived_cost import derived_cost, shared_tokens, tokens_cost
from evenkeel_moe.planning.problem.moe_time import rank_times, replica_work
from evenkeel_moe.telemetry.time_fit import NoFit, TimeFit
from evenkeel_moe.wire.link import CostCurve, DeviceClock, ReplicaCost

MAX_FIT_ERROR = 0.25
"""Mean error, as a share of the time, above which a fit or a profile is not used."""
DISAGREEMENT = 1.5
"""Ratio of two models' times from which on they disagree."""
_NAMED_RANKS = 3
_MOST_BY_CLOCK = 2.0
"""Largest factor that is taken from a clock."""
_UNEVEN = 0.02
"""Logarithm of a rank's factor beyond which a model's detail names the rank."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """What one rank told of its time."""

    device: str = ""
    """Name of its device; empty if unknown."""
    weight_format: str = ""
    curve: CostCurve | None = None
    replica_cost: ReplicaCost | None = None
    clock: DeviceClock | None = None
    """The clock of its device under load; None if unknown."""


@dataclass(frozen=True, eq=False, slots=True)
class KnownCosts:
    """All that is known of the time of a deployment's ranks."""

    shape: ModelShape
    ranks: Sequence[RankNumbers]
    """(R,)"""
    fit: TimeFit | NoFit
    """The fit to the seconds that ranks reported."""
    tokens_per_rank: float
    """Mean tokens of a rank in a layer and step, at which models are compared; 0 without load."""
    active_per_rank: float
    """Mean active replicas of a rank in a layer and step."""
    now_unix: float
    dispatch: DispatchModel = DispatchModel.EVEN
    """The engine's rule."""


@dataclass(frozen=True, slots=True)
class ChosenCost:
    """The cost model in force, and what is known of the others, the most trusted first."""

    model: CostModel
    reasons: Mapping[CostSource, str]
    """Why there is no model of a source."""
    ratios: Mapping[CostSource, float | None]
    """The time that another model predicts over that of the model in force; None if they have
    different units or there is no load."""


def choose_cost(
    known: KnownCosts, asked: CostChoice = CostChoice.AUTO, *, curves: bool = False
) -> ChosenCost:
    """Return the cost model in force, with the work of shared experts of the shape.

    Args:
        known: what the ranks told.
        asked: the operator's choice.
        curves: True for the measured curves wherever all ranks told theirs, as GEM plans on them.
            Seconds that ranks reported then give the speeds of the ranks alone.
    """
    curves = curves and all(rank.curve is not None for rank in known.ranks)
    models: list[CostModel] = []
    reasons: dict[CostSource, str] = {}
    sources: Mapping[CostSource, Callable[[], CostModel]] = {
        CostSource.MEASURED: lambda: measured_cost(known.fit),
        CostSource.PROFILED: lambda: profiled_cost(known.ranks, known.now_unix, curves=curves),
        CostSource.DERIVED: lambda: _derived(known),
    }
    for source, build in sources.items():
        try:
            models.append(build())
        except InvalidInput as error:
            reasons[source] = str(error)
    if asked is CostChoice.TOKENS or not models:
        policy_asks = ["the deployment's policy asks for tokens"]
        why = policy_asks if asked is CostChoice.TOKENS else reasons.values()
        chosen = replace(tokens_cost(known.shape, known.dispatch), detail=_joined(*why))
    else:
        chosen = _with_clocks(_with_measured_speeds(models, known.fit, curves=curves), known)
        chosen = replace(chosen, shared_tokens=shared_tokens(known.shape))
    ratios = {
        one.source: _time_ratio(one, chosen, known)
        for one in models
        if one.source is not chosen.source
    }
    disagree = [
        f"{source.value} it would be {ratio:.2g} times as long"
        for source, ratio in ratios.items()
        if ratio is not None and not 1 / DISAGREEMENT < ratio < DISAGREEMENT
    ]
    detail = _joined(chosen.detail, *disagree, _missing_shared_work(known))
    return ChosenCost(replace(chosen, detail=detail), reasons, ratios)


def _joined(*notes: str) -> str:
    """Return the notes that are not empty as one text."""
    return "; ".join(note for note in notes if note)


def _missing_shared_work(known: KnownCosts) -> str:
    """Return what the model misses under Waterfill, in words; empty if nothing."""
    if known.dispatch is DispatchModel.WATERFILL and known.shape.shared_experts is None:
        return "the work of shared experts is not known, so waterfill counts as an even split"
    return ""


# --- one source each ------------------------------------------------------------------------------


def measured_cost(fit: TimeFit | NoFit) -> CostModel:
    """Return the model of a fit: `factor_r * (fixed_s + s_per_token * (tokens + replicas' start))`.

    Raises:
        InvalidInput: there is no fit, or its error is too large.
    """
    if isinstance(fit, NoFit):
        raise InvalidInput(f"not measured: {fit.reason}")
    if fit.error > MAX_FIT_ERROR:
        raise InvalidInput(
            f"not measured: the mean error of the fit is {fit.error:.0%} of the time, at most"
            f" {MAX_FIT_ERROR:.0%} is used"
        )
    named = ", ".join(str(rank) for rank in fit.drifted)
    notes = (
        f"{fit.steps} steps",
        fit.note,
        "slopes of earlier steps" if fit.slopes_kept else "",
        f"the speed of rank {named} has changed" if fit.drifted else "",
        f"newer steps are not used: {fit.refused}" if fit.refused else "",
        _uneven_ranks(fit.factors),
    )
    return CostModel(
        _linear(fit.factors * fit.fixed_s, fit.factors * fit.s_per_token),
        ReplicaWork(start_tokens=fit.s_per_replica / fit.s_per_token),
        source=CostSource.MEASURED,
        detail=_joined(*notes),
        fit_error=fit.error,
    )


def _uneven_ranks(factors: NDArray[np.float64]) -> str:
    """Return the ranks that differ most from the median rank, in words; empty if none differs."""
    order = np.argsort(-np.abs(np.log(factors)), kind="stable")[:_NAMED_RANKS].tolist()
    named = [
        f"rank {rank} takes {factors[rank]:.2f} times as long as the median rank"
        for rank in order
        if abs(math.log(factors[rank])) > _UNEVEN
    ]
    return ", ".join(named)


def profiled_cost(
    ranks: Sequence[RankNumbers], now_unix: float, *, curves: bool = False
) -> CostModel:
    """Return the model of the ranks' profiles: the curves, or the lines by tokens and replicas.

    The curves are used if they explain the profiles better than the lines do, on the mean over the
    ranks. Where it is not known, the lines are used if all ranks told theirs.

    Args:
        ranks: (R,)
        now_unix: Unix seconds, for the age of the profiles.
        curves: True to use the curves in any case, if all ranks told theirs.

    Raises:
        InvalidInput: some rank told no profile, or the profiles do not fit together.
    """
    costs = [rank.replica_cost for rank in ranks]
    told = [cost for cost in costs if cost is not None]
    stairs = [rank.curve for rank in ranks if rank.curve is not None]
    curves = len(stairs) == len(ranks) and (curves or _explain_better(stairs))
    if len(told) == len(ranks) and told and not curves:
        worst = max(told, key=lambda cost: cost.fit_error)
        if worst.fit_error <= MAX_FIT_ERROR:
            return _by_replicas(told, now_unix)
        if len(stairs) < len(ranks):
            raise InvalidInput(
                f"not profiled: the profile of rank {costs.index(worst)} has a mean error of"
                f" {worst.fit_error:.0%}, at most {MAX_FIT_ERROR:.0%} is used"
            )
    if not told and not stairs:
        raise InvalidInput("not profiled: no rank sent a profile")
    if len(stairs) < len(ranks):
        # Of the kind that more ranks told.
        kind = costs if len(told) > len(stairs) else [rank.curve for rank in ranks]
        missing = [str(rank) for rank, one in enumerate(kind) if one is None]
        named = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise InvalidInput(f"not profiled: not every rank (missing: {named}) sent a profile")
    tiles = sorted({curve.tile_tokens for curve in stairs})
    if len(tiles) > 1:
        raise InvalidInput(f"not profiled: the ranks sent curves with tiles of {tiles} tokens")
    joined = _equally_long(stairs)
    idle = np.flatnonzero(joined.tile_seconds[:, -1] == 0.0)
    if len(idle):
        raise InvalidInput(f"not profiled: the curve of rank {idle[0]} is 0 seconds at any tokens")
    errors = [curve.fit_error for curve in stairs if curve.fit_error is not None]
    return CostModel(
        joined,
        source=CostSource.PROFILED,
        detail=f"curves of {len(stairs)} ranks",
        fit_error=max(errors) if len(errors) == len(stairs) else None,
    )


def _explain_better(curves: Sequence[CostCurve]) -> bool:
    """Return whether curves are nearer to their profiles than the lines of the same profiles."""
    gains = [
        curve.line_error - curve.fit_error
        for curve in curves
        if curve.line_error is not None and curve.fit_error is not None
    ]
    return len(gains) == len(curves) and sum(gains) > 0


def _equally_long(curves: Sequence[CostCurve]) -> CostCurves:
    """Return curves of the same tile, the shorter ones continued by their slopes."""
    tile, width = curves[0].tile_tokens, max(len(curve.tile_seconds) for curve in curves)
    rows = np.empty((len(curves), width))
    for row, curve in zip(rows, curves, strict=True):
        beyond = np.maximum(np.arange(width) - len(curve.tile_seconds) + 1, 0)
        row[:] = curve.tile_seconds[-1] + beyond * tile * curve.slope_s_per_token
        row[: len(curve.tile_seconds)] = curve.tile_seconds
    return CostCurves(tile, rows, np.array([curve.slope_s_per_token for curve in curves]))


def _by_replicas(told: Sequence[ReplicaCost], now_unix: float) -> CostModel:
    """Return the ranks' own slopes by tokens, and the work of a replica of the median rank."""
    per_token = np.array([cost.s_per_token for cost in told])
    start = float(np.median([cost.s_per_replica for cost in told] / per_token))
    read = float(np.median([cost.read_s for cost in told] / per_token))
    age_s = max(0.0, now_unix - min(cost.measured_unix_s for cost in told))
    notes = (
        f"profiles of {len(told)} ranks, the oldest of {duration_text(age_s, 2)} ago",
        _uneven_ranks(per_token / np.median(per_token)),
    )
    return CostModel(
        _linear(np.array([cost.fixed_s for cost in told]), per_token),
        ReplicaWork(read_tokens=read, start_tokens=start),
        source=CostSource.PROFILED,
        detail=_joined(*notes),
        fit_error=max(cost.fit_error for cost in told),
    )


def _derived(known: KnownCosts) -> CostModel:
    """Return the derived model.

    Raises:
        InvalidInput: the ranks disagree on the device, or its figures are not known.
    """
    names = sorted({(rank.device, rank.weight_format) for rank in known.ranks})
    if len(names) > 1:
        both = " and ".join(
            f"{device or 'no device'} ({kind or '?'})" for device, kind in names[:3]
        )
        raise InvalidInput(f"not derived: the ranks have different devices, {both}")
    if not names:
        raise InvalidInput("not derived: no rank is connected")
    try:
        return derived_cost(known.shape, *names[0])
    except InvalidInput as error:
        raise InvalidInput(f"not derived: {error}") from None


def _linear(fixed_s: NDArray[np.float64], per_token: NDArray[np.float64]) -> CostCurves:
    """Return C_r(n) = fixed_s[r] + n * per_token[r] for n >= 1; both (R,)."""
    return CostCurves(1, (fixed_s + per_token)[:, None], np.asarray(per_token, np.float64))


# --- clocks ---------------------------------------------------------------------------------------


def clock_factors(clocks: Sequence[DeviceClock | None]) -> NDArray[np.float64] | None:
    """Return the (R,) time of each rank relative to the median rank, by the clocks of the devices.

    Returns:
        None unless every rank told its clock. Factors within 2 % of 1 count as 1, all are between
        1/2 and 2: a clock tells less than measured seconds, because reading memory does not slow
        down with it.
    """
    told = [clock.ratio for clock in clocks if clock is not None]
    if not told or len(told) < len(clocks):
        return None
    factors = np.clip(np.median(told) / np.array(told), 1 / _MOST_BY_CLOCK, _MOST_BY_CLOCK)
    return np.where(np.abs(np.log(factors)) > _UNEVEN, factors, 1.0)


def _with_clocks(model: CostModel, known: KnownCosts) -> CostModel:
    """Return the model with the ranks' speeds by their clocks, if no rank reports seconds."""
    clocks = [rank.clock for rank in known.ranks]
    factors = None if known.fit.factors is not None else clock_factors(clocks)
    if model.curves is None or factors is None or (factors == 1.0).all():
        return model
    limits = {str(rank): clock.limited_by for rank, clock in enumerate(clocks) if clock is not None}
    slow = [rank for rank in limits if factors[int(rank)] > 1.0 and limits[rank]][:_NAMED_RANKS]
    because = "".join(f", rank {rank} is limited by {limits[rank]}" for rank in slow)
    notes = (model.detail, f"by the devices' clocks {_uneven_ranks(factors)}{because}")
    return replace(model, curves=model.curves.scaled(factors), detail=_joined(*notes))


# --- comparison -----------------------------------------------------------------------------------


def _with_measured_speeds(
    models: Sequence[CostModel], fit: TimeFit | NoFit, *, curves: bool
) -> CostModel:
    """Return the most trusted model.

    A fit gives only the speeds of the ranks if the profile's curves are wanted; or if it cannot
    tell replicas from tokens, and the next model can or is a profile's curves.
    """
    chosen = models[0]
    if chosen.source is not CostSource.MEASURED or isinstance(fit, NoFit):
        return chosen
    if not (fit.note or curves):
        return chosen
    shaped = next(
        (
            one
            for one in models[1:]
            if one.source is CostSource.PROFILED or (fit.note and not one.replica.proportional)
        ),
        None,
    )
    if shaped is None or shaped.curves is None:
        return chosen
    stairs = shaped.curves
    # Of the median rank on each.
    seconds = np.broadcast_to(np.median(stairs.tile_seconds, axis=0), stairs.tile_seconds.shape)
    slope = np.full(len(fit.factors), np.median(stairs.slope_s_per_token))
    scaled = CostCurves(stairs.tile_tokens, seconds, slope).scaled(fit.factors)
    return replace(
        shaped, curves=scaled, detail=f"{shaped.detail}; speeds of the ranks are measured"
    )


def _time_ratio(model: CostModel, chosen: CostModel, known: KnownCosts) -> float | None:
    """Return the mean time of a rank at the present load over that of the model in force."""
    if not chosen.in_seconds or not known.tokens_per_rank > 0 or not known.active_per_rank > 0:
        return None
    each = np.array([known.tokens_per_rank / known.active_per_rank])
    of_model, of_chosen = (
        float(rank_times(np.full(known.shape.num_ranks, work), one).mean())
        for one in (model, chosen)
        for work in known.active_per_rank * replica_work(each, one.replica)
    )
    return of_model / of_chosen if of_chosen > 0 else None
