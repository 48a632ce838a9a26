"""The gain of a committed plan, by the seconds that ranks reported before and after it."""

import math
from dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ServingSpeed:
    """The speed at which the engine served. It also changes with the traffic."""

    step_s: float
    """Seconds from one step to the next."""
    tokens_per_s: float
    """Real tokens of all ranks."""

    def __post_init__(self) -> None:
        speed = (self.step_s, self.tokens_per_s)
        if not all(math.isfinite(part) and part >= 0 for part in speed):
            raise InvalidInput(f"{self.step_s} s a step and {self.tokens_per_s} tokens a second")


_LARGEST_ERROR = 0.5
"""Plans whose standard error is a larger share of the modelled gain calibrate nothing."""


@dataclass(frozen=True, slots=True)
class GainPair:
    """The modelled and the delivered gain of one plan, as shares of MoE time."""

    modelled: float
    """Gain of the verdict before calibration."""
    delivered: float
    error: float
    """Standard error of `delivered`."""

    @property
    def counts(self) -> bool:
        """True if it calibrates later gains: a gain was modelled, and measured well enough."""
        return self.modelled > 0 and self.error <= _LARGEST_ERROR * self.modelled


@dataclass(frozen=True, slots=True)
class DeliveredGain:
    """The measured gain of one plan: the share of MoE time that it saved; None if unknown."""

    at: float
    """Unix seconds at which it was worked out."""
    gain: float | None = None
    """At most 1; negative if the plan cost time; None if unknown, and the next three then too."""
    error: float | None = None
    """Standard error of the gain."""
    lower: float | None = None
    upper: float | None = None
    """Bounds of the 95 % interval."""
    modelled: float | None = None
    """Gain of the same steps under the cost model; None if unknown. Its distance from the promise
    is due to traffic, and the distance of `gain` from it is due to the cost model."""
    steps: int = 0
    """Compared steps, as many before the plan as after it."""
    unknown_because: str = ""
    """The reason that the gain is unknown; empty if it is known."""
    before: ServingSpeed | None = None
    """The speed in the newest steps before the plan; None if unknown."""
    after: ServingSpeed | None = None
    """The speed in the first steps after it; None if unknown."""

    def __post_init__(self) -> None:
        parts = (self.gain, self.error, self.lower, self.upper)
        if not math.isfinite(self.at) or self.steps < 0:
            raise InvalidInput(f"delivered gain at {self.at} from {self.steps} steps")
        if self.gain is None and parts == (None, None, None, None) and self.unknown_because:
            return
        values = [math.nan if part is None else part for part in parts]
        gain, error, lower, upper = values
        if not all(map(math.isfinite, values)) or not (error >= 0 and lower <= gain <= upper <= 1):
            raise InvalidInput(
                f"delivered gain {self.gain} with error {self.error} and bounds"
                f" {self.lower}, {self.upper}"
            )
        if self.modelled is not None and not (math.isfinite(self.modelled) and self.modelled <= 1):
            raise InvalidInput(f"modelled gain is {self.modelled}, must be finite and at most 1")

    def over(self, promised: float | None) -> float | None:
        """Return the delivered over a promised gain; None if unknown or nothing was promised."""
        if self.gain is None or promised is None or not promised > 0:
            return None
        return self.gain / promised
