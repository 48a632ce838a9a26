"""Whether a plan pays: judged on steps it was not planned on, with the copies it needs on the bill.

A plan made on window A is scored on the later window B, and the question is about the window after B, which
nobody has seen. Three uncertainties therefore add up: B is a sample, so its mean is off; the window to come is
a sample too; and traffic drifts, so what held in B may no longer hold. The interval covers all three, which
makes it wider than a confidence interval of B's mean.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch

__all__ = ["Call", "Verdict", "VerdictRules", "held_out_steps", "judge"]


class Call(StrEnum):
    """What the steps say about a plan."""

    RECOMMEND = "recommend"
    """The whole interval of the gain lies above the price of the copies."""
    NOT_NOW = "not_now"
    """The whole interval lies at or below it."""
    INSUFFICIENT_EVIDENCE = "insufficient_evidence"
    """The price lies inside the interval, or there were too few steps, or no load."""


@dataclass(frozen=True, slots=True)
class VerdictRules:
    """How sure a verdict must be."""

    tail: float = 0.03
    """Probability left outside each bound, in (0, 0.5)."""
    min_steps: int = 16
    """Fewest later steps to judge on, at least 2."""
    resamples: int = 500
    """Bootstrap draws, at least 100."""
    parts: int = 4
    """Parts the steps are cut into to see how far the saving drifts, at least 2."""
    drift: float = 1.0
    """Weight of the drift seen between parts in the variance of the window to come, >= 0; 0 trusts that there is none."""

    def __post_init__(self) -> None:
        if not 0 < self.tail < 0.5:
            raise InvalidInput(f"tail is {self.tail}, must be above 0 and below 0.5")
        for name, least in (("min_steps", 2), ("resamples", 100), ("parts", 2)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be at least {least}")
        if not 0 <= self.drift < math.inf:
            raise InvalidInput(f"drift is {self.drift}, must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What later steps say about one plan. Shares are of the MoE time under the present placement."""

    call: Call
    steps: int
    """Later steps it was judged on."""
    gain: float
    """Share of the time saved, copies not counted, <= 1; NaN without steps or load."""
    gain_lower: float
    gain_upper: float
    """Bounds on the gain of the next window of as many steps; NaN with fewer than two steps."""
    saved_per_step: float
    """Mean saving of a step in score units: seconds with cost curves, else tokens. NaN without steps."""
    copy_cost: float
    """All the plan's copies in the same unit, >= 0."""
    lifetime_steps: int
    """Steps the placement is expected to last."""
    cost: float
    """The copies as a share of the time of a lifetime, >= 0; NaN without load."""
    payback_steps: float
    """Steps until the saving has paid for the copies: 0 without copies, inf if nothing is saved, NaN unknown."""
    payback_s: float | None
    """The same in seconds; None where nobody knows how long a step takes, or it never pays."""

    @property
    def net_gain(self) -> float:
        """Gain less the price of the copies, over the expected lifetime."""
        return self.gain - self.cost

    @property
    def net_saved(self) -> float:
        """What is left of the saving after a lifetime, in score units."""
        return self.saved_per_step * self.lifetime_steps - self.copy_cost

    def numbers(self) -> dict[str, float]:
        """What is known of it, by name, for the decision log; what is not finite is left out."""
        known = {
            "gain": self.gain,
            "gain_lower": self.gain_lower,
            "gain_upper": self.gain_upper,
            "copy_cost_share": self.cost,
            "net_gain": self.net_gain,
            "held_out_steps": float(self.steps),
            "payback_steps": self.payback_steps,
            "payback_s": math.nan if self.payback_s is None else self.payback_s,
        }
        return {name: value for name, value in known.items() if math.isfinite(value)}


def held_out_steps(steps: int, least: int) -> int:
    """How many of the newest steps of a window are kept to judge a plan made on the others.

    A sixth, and at least `least` where the window has twice as many; a shorter one gives up a quarter. More would make the
    verdict surer and the plan worse: a third of windows of 16 steps instead costs up to 3 % of MoE time where traffic changes.

    Args:
        steps: of the window, >= 0.
        least: steps a verdict needs.

    Returns:
        0 for a window under two steps, else 1..steps - 1.
    """
    if steps < 2:
        return 0
    return max(1, steps // 6, least) if steps >= 2 * least else max(1, steps // 4)


def judge(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    *,
    copy_cost: float = 0.0,
    lifetime_steps: int = 1000,
    step_s: float | None = None,
    rules: VerdictRules = VerdictRules(),
    seed: int = 0,
) -> Verdict:
    """Judge a plan on steps it was not planned on.

    Args:
        before, after: (T,) float64 - predicted MoE time of each later step under the present and under the
            proposed placement, finite and not negative, oldest first; T may be 0. Score units.
        copy_cost: price of all the plan's copies in score units, finite and >= 0.
        lifetime_steps: steps the placement is expected to last, >= 1.
        step_s: seconds from one step of the engine to the next, > 0; None where unknown.
        rules: how sure to be.
        seed: of the bootstrap.

    Returns:
        The gain 1 - sum(after) / sum(before) between two bounds. They are the quantiles of a bootstrap over
        circular moving blocks of about sqrt(T) steps (neighbouring steps are alike, so single steps would
        look more certain than they are), widened from "the mean of these steps" to "the mean of the next".

    Raises:
        ShapeMismatch: the arrays are not two vectors of one length.
        InvalidInput: a time, price, lifetime or step that cannot be.

    Source: circular block bootstrap of Politis and Romano (1992).
    """
    _check(before, after, copy_cost, lifetime_steps, step_s)
    steps, total = len(before), float(before.sum())
    if steps == 0 or total <= 0:
        unknown = math.nan
        return Verdict(
            Call.INSUFFICIENT_EVIDENCE,
            steps,
            *(unknown,) * 4,
            copy_cost,
            lifetime_steps,
            unknown,
            unknown,
            None,
        )
    per_step = total / steps
    saved = float((before - after).mean())
    gain, cost = saved / per_step, copy_cost / (lifetime_steps * per_step)
    lower, upper = _bounds(before, after, gain, rules, seed)
    call = Call.INSUFFICIENT_EVIDENCE
    if steps >= rules.min_steps:
        if lower > cost:
            call = Call.RECOMMEND
        elif upper <= cost:
            call = Call.NOT_NOW
    payback = 0.0 if copy_cost == 0 else copy_cost / saved if saved > 0 else math.inf
    return Verdict(
        call=call,
        steps=steps,
        gain=gain,
        gain_lower=lower,
        gain_upper=upper,
        saved_per_step=saved,
        copy_cost=copy_cost,
        lifetime_steps=lifetime_steps,
        cost=cost,
        payback_steps=payback,
        payback_s=None if step_s is None or math.isinf(payback) else payback * step_s,
    )


def _check(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    copy_cost: float,
    lifetime_steps: int,
    step_s: float | None,
) -> None:
    """Raises what `judge` says."""
    if before.ndim != 1 or before.shape != after.shape:
        raise ShapeMismatch(
            f"step times must be two (T,) vectors, got {before.shape} and {after.shape}"
        )
    for name, times in (("before", before), ("after", after)):
        wrong = ~(np.isfinite(times) & (times >= 0))
        if wrong.any():
            raise InvalidInput(
                f"{int(wrong.sum())} of {len(times)} times {name} are negative or not finite"
            )
    if not 0 <= copy_cost < math.inf:
        raise InvalidInput(f"copy_cost is {copy_cost}, must be finite and not negative")
    if lifetime_steps < 1:
        raise InvalidInput(f"lifetime_steps is {lifetime_steps}, must be at least 1")
    if step_s is not None and not 0 < step_s < math.inf:
        raise InvalidInput(f"step_s is {step_s}, must be finite and above 0, or None")


def _bounds(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    gain: float,
    rules: VerdictRules,
    seed: int,
) -> tuple[float, float]:
    """Bounds on the gain of the next window; NaN with fewer than two steps."""
    steps = len(before)
    if steps < 2:
        return math.nan, math.nan
    block = max(1, round(math.sqrt(steps)))
    starts = np.random.default_rng(seed).integers(0, steps, (rules.resamples, -(-steps // block)))
    picked = ((starts[:, :, None] + np.arange(block)) % steps).reshape(rules.resamples, -1)[
        :, :steps
    ]
    gains = 1.0 - after[picked].sum(axis=1) / np.maximum(before[picked].sum(axis=1), 1e-300)
    spread = float(gains.var())
    if spread == 0:
        return gain, gain
    # The next window is a sample like this one, and starts from a level that has drifted on.
    ahead = 2.0 * spread + rules.drift * _drift(before, after, gain, rules.parts)
    widen = math.sqrt(ahead / spread)
    lower, upper = np.quantile(gains, (rules.tail, 1.0 - rules.tail))
    return gain + widen * min(0.0, float(lower) - gain), gain + widen * max(
        0.0, float(upper) - gain
    )


def _drift(
    before: NDArray[np.float64], after: NDArray[np.float64], gain: float, parts: int
) -> float:
    """Variance of the gain between parts of the window, beyond what single steps scatter."""
    steps = len(before)
    if steps < 2 * parts:
        return 0.0
    # What each step saves more or less than the mean gain says, in shares of the mean step.
    excess = ((1.0 - gain) * before - after) / before.mean()
    edges = np.linspace(0, steps, parts + 1).round().astype(int)
    means = np.array([excess[a:b].mean() for a, b in zip(edges[:-1], edges[1:], strict=True)])
    scatter = 0.5 * float((np.diff(excess) ** 2).mean())
    return max(0.0, float(means.var(ddof=1)) - scatter * parts / steps)
