"""The objective of a plan: cost curves, dispatch model, price of copies and limits.

The same value goes from the settings through a cycle (or a replay) to the policy, so that all of
them minimise one thing.
"""

import math
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.plan import PlanLimits


class DispatchModel(StrEnum):
    """The rule by which the engine splits an expert's tokens over its replicas."""

    EVEN = "even"
    """Every replica takes the same share."""
    NEAREST = "nearest"
    """A source rank uses its own replica, else one on its node, else an even share."""
    OPTIMAL = "optimal"
    """Per-batch LP (LPLB): the split that minimises the largest rank load."""


@dataclass(frozen=True, eq=False, slots=True)
class CostCurves:
    """Seconds of one MoE layer on each rank as a function of its tokens (GEM eq. 1).

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


@dataclass(frozen=True, eq=False, slots=True)
class Objective:
    """The quantity that a plan minimises, and the limits it must keep.

    The score of a placement is its predicted MoE time, in seconds with `costs`, else in tokens.
    """

    costs: CostCurves | None = None
    """None means C_r(n) = n: the score is then in tokens."""
    dispatch: DispatchModel = DispatchModel.EVEN
    copy_cost: float = 0.0
    """Price of one copy between ranks, in the unit of the score."""
    lifetime_steps: int = 1000
    """Steps a placement is expected to last: the price of its copies is spread over them."""
    cross_node_factor: float = 1.0
    """Price of a copy that no rank of the same node can send, as a multiple of `copy_cost`."""
    limits: PlanLimits = PlanLimits()
    allow_duplicates: bool = False
    """True if one rank may hold an expert twice in a layer."""

    @property
    def cost_per_move(self) -> float:
        """Price of one copy between ranks, per step of the window, in the unit of the score."""
        return self.copy_cost / self.lifetime_steps

    def check(self) -> None:
        """Check the numbers.

        Raises:
            InvalidInput: a number is negative or not finite.
        """
        numbers = {"copy_cost": self.copy_cost, "cross_node_factor": self.cross_node_factor}
        for name, value in (numbers | asdict(self.limits)).items():
            if value is not None and not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}, must be finite and not negative")


def check_values(name: str, values: NDArray[np.float64], most: float = sys.float_info.max) -> None:
    """Check that all values are finite, not negative and at most `most`.

    Raises:
        InvalidInput: some value is not.
    """
    least, largest = values.min(), values.max()
    if 0 <= least and largest <= most:  # False with a NaN among the values
        return
    finite = np.isfinite(values)
    if not finite.all():
        raise InvalidInput(f"{name} holds {int((~finite).sum())} values that are not finite")
    if least < 0:
        raise InvalidInput(
            f"{name} holds {int((values < 0).sum())} negative values, smallest {least:g}"
        )
    raise InvalidInput(
        f"{name} holds {int((values > most).sum())} values above {most:g}, largest {largest:g}"
    )
