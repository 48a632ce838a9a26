"""The cost model: the time of a rank in one layer and step, from the tokens of its replicas.

`T_r = fixed_r + C_r(sum over replicas of w(n) + shared_r)`, where n is the tokens of a replica, w
its work (`ReplicaWork`), shared_r the work of shared experts on the rank and C_r the curve of the
rank (`CostCurves`). Work is measured in tokens: one unit is the time in which a routed expert
computes one token. Gates, policies, verdict, metrics and replay all score by the same value.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.checks import check_values

_MOST_WORK = 2.0**53
"""Largest number of tokens that a part of `ReplicaWork` may stand for."""


class CostSource(StrEnum):
    """The origin of a cost model's numbers, from the least to the most trusted."""

    TOKENS = "tokens"
    """Nothing is known: the time of a rank is taken to be proportional to its tokens."""
    DERIVED = "derived"
    """Computed from the model's shape and a table of devices."""
    PROFILED = "profiled"
    """Timed by a profiler on the ranks."""
    MEASURED = "measured"
    """Fitted to the seconds that ranks reported while they served."""


_IN_WORDS = {
    CostSource.TOKENS: "by tokens",
    CostSource.DERIVED: "derived, not measured",
    CostSource.PROFILED: "profiled on the ranks",
    CostSource.MEASURED: "measured while the ranks served",
}


@dataclass(frozen=True, slots=True)
class CostBasis:
    """The origin of a cost model's numbers. It stands beside every result."""

    source: CostSource = CostSource.TOKENS
    detail: str = ""
    """A device, a file, the age of a profile, or the reason that nothing better is known."""
    unit: str = "tokens"
    """The unit of the times: "s" or "tokens"."""
    fit_error: float | None = None
    """Mean error of a fit as a share of the time; None where nothing was fitted."""

    @property
    def words(self) -> str:
        """The origin as a phrase, for example "profiled on the ranks (curves of 8 ranks)"."""
        error = "" if self.fit_error is None else f"mean error {self.fit_error:.1%}"
        about = ", ".join(part for part in (self.detail, error) if part)
        if self.source is CostSource.TOKENS and not about:
            return "by tokens, because nothing is known of time"
        return _IN_WORDS[self.source] + (f" ({about})" if about else "")

    @property
    def moe_time(self) -> str:
        """The name of the predicted time in a sentence. It claims no time where none is known."""
        return "MoE time (by tokens)" if self.source is CostSource.TOKENS else "MoE time"


@dataclass(frozen=True, eq=False, slots=True)
class CostCurves:
    """Seconds of one MoE layer on each rank as a function of its work (GEM eq. 1).

    A step curve up to `dense_limit` = K * tile_tokens tokens (one value per tile), linear beyond
    it.
    """

    tile_tokens: int
    """Tokens per tile: the width of one step of the curve."""
    tile_seconds: NDArray[np.float64]
    """(R, K) seconds at 1..K tiles. n tokens cost tile ceil(n / tile_tokens); 0 tokens cost 0."""
    slope_s_per_token: NDArray[np.float64]
    """(R,) seconds per token beyond K * tile_tokens."""

    def __post_init__(self) -> None:
        seconds, slope = self.tile_seconds, self.slope_s_per_token
        if seconds.ndim != 2 or seconds.size == 0 or slope.shape != seconds.shape[:1]:
            raise ShapeMismatch(
                "tile_seconds must be (R, K) with K at least 1 and slope (R,),"
                f" got {seconds.shape} and {slope.shape}"
            )
        if not 1 <= self.tile_tokens < math.inf:
            raise InvalidInput(f"tile_tokens is {self.tile_tokens}, must be finite and at least 1")
        check_values("tile_seconds", seconds)
        check_values("slope_s_per_token", slope)
        rises = np.diff(seconds, axis=1)
        if (rises < 0).any():
            raise InvalidInput(
                "cost curves must not fall with the number of tokens:"
                f" {int((rises < 0).sum())} tiles cost less than the one before,"
                f" the most by {-rises.min():g} s"
            )

    @classmethod
    def linear(cls, seconds_per_token: NDArray[np.float64]) -> "CostCurves":
        """C_r(n) = n * seconds_per_token[r]; (R,) float64 [s/token]."""
        rates = np.asarray(seconds_per_token, np.float64)
        return cls(1, rates[:, None].copy(), rates.copy())

    def scaled(self, factors: NDArray[np.float64]) -> "CostCurves":
        """Return the curves with the seconds of each rank multiplied by its factor; (R,)."""
        seconds = self.tile_seconds * factors[:, None]
        return CostCurves(self.tile_tokens, seconds, self.slope_s_per_token * factors)


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """The work of one replica as a function of its tokens n, in tokens.

    `w(n) = start + max(read, n rounded up to whole tiles)` for n >= 1. Below one token, as an even
    split gives it on average, a replica runs in a share n of the steps: `w(n) = n * w(1)`.
    """

    read_tokens: float = 0.0
    """Tokens that take as long to compute as the weights of one expert take to read (roofline)."""
    start_tokens: float = 0.0
    """Work that every replica with tokens adds, beside its tokens."""
    tile_tokens: float = 0.0
    """Tokens are computed in whole tiles of this size; 0 for no tiles."""

    def __post_init__(self) -> None:
        for name in ("read_tokens", "start_tokens", "tile_tokens"):
            value = getattr(self, name)
            if not 0 <= value <= _MOST_WORK:
                raise InvalidInput(f"{name} is {value}, must be from 0 to 2^53")

    @property
    def proportional(self) -> bool:
        """True if w(n) = n."""
        return self == ReplicaWork()


@dataclass(frozen=True, eq=False, slots=True)
class CostModel:
    """The time of a rank in one layer and step, and the origin of its numbers."""

    curves: CostCurves | None = None
    """C_r. None: C_r(n) = n for every rank, so that times are in tokens."""
    replica: ReplicaWork = ReplicaWork()
    fixed: float = 0.0
    """Time that every layer and step takes beside the experts, in the unit of the times."""
    shared_tokens: float = 0.0
    """Work of the shared experts for one routed token, in tokens: shared experts / top_k, times
    their size over that of a routed expert."""
    source: CostSource = CostSource.TOKENS
    detail: str = ""
    """What the numbers rest on, in a few words: a device, a file, the age of a profile."""
    fit_error: float | None = None
    """Mean error of a fit as a share of the time; None where nothing was fitted."""
    relative: bool = False
    """True if the curves only compare the ranks: C_r is then in tokens of a rank of speed 1."""

    def __post_init__(self) -> None:
        for name in ("fixed", "shared_tokens"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}, must be finite and not negative")
        if self.fit_error is not None and not 0 <= self.fit_error < math.inf:
            raise InvalidInput(f"fit_error is {self.fit_error}, must be finite and not negative")

    @property
    def in_seconds(self) -> bool:
        """True if times are in seconds, False if they are in tokens."""
        return self.curves is not None and not self.relative

    @property
    def unit(self) -> str:
        """The unit of the times: "s" or "tokens"."""
        return "s" if self.in_seconds else "tokens"

    @property
    def basis(self) -> CostBasis:
        """What the numbers rest on."""
        return CostBasis(self.source, self.detail, self.unit, self.fit_error)

    @property
    def by_tokens(self) -> bool:
        """True if the time of every rank is its tokens, so that time balance is balancedness."""
        return (
            self.curves is None
            and self.replica.proportional
            and self.fixed == 0.0
            and self.shared_tokens == 0.0
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Check that the curves are for this number of ranks.

        Raises:
            ShapeMismatch: they are for another.
        """
        if self.curves is not None and len(self.curves.tile_seconds) != num_ranks:
            raise ShapeMismatch(
                f"cost curves are for {len(self.curves.tile_seconds)} ranks, placement has"
                f" {num_ranks}"
            )


TOKENS = CostModel()
"""The model of a deployment of which nothing is known."""
