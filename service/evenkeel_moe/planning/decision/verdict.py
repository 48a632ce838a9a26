"""Decides whether the gain of a plan, on steps it was not planned on, exceeds the price of copies.

A plan made on window A is scored on the later window B, but the question is about the window after
B, which nobody has seen. Three uncertainties therefore add up: B is a sample, so its mean is off;
the next window is a sample too; and traffic drifts, so what held in B may no longer hold. The
interval covers all three, which makes it wider than a confidence interval of the mean of B.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from evenkeel_moe.model.cost import TOKENS, CostBasis
from evenkeel_moe.planning.decision.calibration import NOT_CALIBRATED, Calibration
from evenkeel_moe.planning.problem.objective import PRICE_MARGIN


class Call(StrEnum):
    """The conclusion of a verdict."""

    RECOMMEND = "recommend"
    """The whole interval of the gain lies above the price of the copies and its margin."""
    NOT_NOW = "not_now"
    """The whole interval lies at or below it."""
    INSUFFICIENT_EVIDENCE = "insufficient_evidence"
    """Neither, or there were too few steps, or no load."""


_UNCERTAIN = Call.INSUFFICIENT_EVIDENCE


_TAIL = 0.03
"""Probability left outside each bound."""
_RESAMPLES = 500
"""Bootstrap draws."""
_PARTS = 4
"""Parts the steps are cut into to measure the drift of the saving."""
_DRIFT = 1.0
"""Weight of the drift between parts in the variance of the next window; 0 assumes no drift."""
MIN_STEPS = 16
"""Fewest later steps to judge on, unless the caller says another number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of scoring one plan on later steps.

    Shares are of the MoE time under the present placement.
    """

    call: Call
    steps: int
    """Later steps with load, on which it was judged."""
    gain: float
    """Share of the time saved, copies not counted, <= 1; NaN without steps or load."""
    gain_lower: float
    gain_upper: float
    """Bounds on the gain of the next window of as many steps; NaN with fewer than two steps."""
    saved_per_step: float
    """Mean saving per step in the unit of the cost model; NaN without steps."""
    copy_cost: float
    """Price of all copies of the plan in the same unit, >= 0."""
    lifetime_steps: int
    """Steps the placement is expected to last."""
    cost: float
    """The price of the copies as a share of the time of a lifetime, >= 0; NaN without load."""
    payback_steps: float
    """Steps until the saving has paid for the copies: 0 without copies, inf if nothing is saved,
    NaN if unknown."""
    payback_s: float | None
    """The same in seconds; None if the time of a step is unknown, or it never pays."""
    cost_model: CostBasis = CostBasis()
    """What the predicted times rest on."""
    gain_modelled: float = math.nan
    """The gain before calibration, as the cost model has it; NaN without steps or load."""
    calibration: Calibration = NOT_CALIBRATED
    """By what earlier plans delivered; the gain, its bounds and the saving contain it."""

    @property
    def net_gain(self) -> float:
        """Gain minus the price of the copies, over the expected lifetime."""
        return self.gain - self.cost

    def numbers(self) -> dict[str, float]:
        """Return the finite figures by name, for the decision log."""
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
        if self.calibration.plans:
            known |= {
                "gain_modelled": self.gain_modelled,
                "calibration": self.calibration.factor,
                "calibrated_on_plans": float(self.calibration.plans),
            }
        return {name: value for name, value in known.items() if math.isfinite(value)}


def held_out_steps(steps: int, least: int) -> int:
    """Return how many of the newest steps of a window are kept to judge a plan made on the others.

    It is a sixth of the window, and at least `least` if the window has twice as many steps; a
    shorter window gives up a quarter. Keeping more would make the verdict surer and the plan worse:
    a third of windows of 16 steps costs up to 3 % of MoE time where traffic changes.

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
    cost_model: CostBasis = TOKENS.basis,
    calibration: Calibration = NOT_CALIBRATED,
    min_steps: int = MIN_STEPS,
    few_steps: int = 0,
    seed: int = 0,
) -> Verdict:
    """Judge a plan on steps it was not planned on.

    Args:
        before, after: (T,) float64 [score units], >= 0 - predicted MoE time of each later step, 0
            without load, under the present and the proposed placement, oldest first. T may be 0.
        copy_cost: price of all copies of the plan [score units], finite and >= 0.
        lifetime_steps: steps the placement is expected to last, >= 1.
        step_s: seconds from one step of the engine to the next, > 0; None if unknown.
        cost_model: what the times rest on; by default they are tokens.
        calibration: every step saves as many times what the times say as earlier plans delivered.
        min_steps: with fewer steps there is too little evidence.
        few_steps: with fewer the interval is at least that of Student's t for the mean of as many
            steps: a bootstrap of few steps underestimates their scatter.
        seed: of the bootstrap.
    """
    steps = int((busy := before > 0).sum())
    gain = saved = lower = upper = cost = payback = modelled = math.nan
    if steps:
        per_step = float(before.mean())
        modelled = float((before - after).mean()) / per_step
        if calibration.plans:
            after = np.maximum(before - calibration.factor * (before - after), 0.0)
        saved = float((before - after).mean())
        gain, cost = saved / per_step, copy_cost / (lifetime_steps * per_step)
        lower, upper = _bounds(before[busy], after[busy], gain, few_steps, seed)
        payback = 0.0 if copy_cost == 0 else copy_cost / saved if saved > 0 else math.inf
    return Verdict(
        call=_call(lower, upper, cost) if steps >= min_steps else _UNCERTAIN,
        steps=steps,
        gain=gain,
        gain_lower=lower,
        gain_upper=upper,
        saved_per_step=saved,
        copy_cost=copy_cost,
        lifetime_steps=lifetime_steps,
        cost=cost,
        payback_steps=payback,
        payback_s=None if step_s is None or not math.isfinite(payback) else payback * step_s,
        cost_model=cost_model,
        gain_modelled=modelled,
        calibration=calibration,
    )


def _call(lower: float, upper: float, cost: float) -> Call:
    """Compare the bounds of the gain with the price of the copies; NaN is unknown."""
    if lower > PRICE_MARGIN * cost:
        return Call.RECOMMEND
    return Call.NOT_NOW if upper <= cost else _UNCERTAIN


def _bounds(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    gain: float,
    few_steps: int,
    seed: int,
) -> tuple[float, float]:
    """Return bounds on the gain of the next window; NaN with fewer than two steps.

    They are the quantiles of a bootstrap over circular moving blocks of about sqrt(T) steps,
    widened from "the mean of these steps" to "the mean of the next". Blocks, because neighbouring
    steps are alike: single steps would look more certain than they are.

    Source: circular block bootstrap of Politis and Romano (1992).
    """
    steps = len(before)
    if steps < 2:
        return math.nan, math.nan
    block = max(1, round(math.sqrt(steps)))
    starts = np.random.default_rng(seed).integers(0, steps, (_RESAMPLES, -(-steps // block)))
    blocks = (starts[:, :, None] + np.arange(block)) % steps
    picked = blocks.reshape(_RESAMPLES, -1)[:, :steps]
    gains = 1.0 - after[picked].sum(axis=1) / np.maximum(before[picked].sum(axis=1), 1e-300)
    spread = float(gains.var())
    if spread == 0:
        return gain, gain
    # The next window is a sample like this one, and its level has drifted.
    ahead = 2.0 * spread + _DRIFT * _drift(before, after, gain)
    widen = math.sqrt(ahead / spread)
    lower, upper = np.quantile(gains, (_TAIL, 1.0 - _TAIL)) - gain
    least = _student_reach(before, after, gain) if steps < few_steps else 0.0
    return (
        gain + min(widen * min(0.0, float(lower)), -least),
        min(1.0, gain + max(widen * max(0.0, float(upper)), least)),
    )


def _student_reach(before: NDArray[np.float64], after: NDArray[np.float64], gain: float) -> float:
    """Return how far the gain of the next steps may be from that of as many past steps.

    It is half of Student's prediction interval for the mean of as many further draws.
    """
    steps = len(before)
    scatter = float(_excess(before, after, gain).std(ddof=1))
    return float(stdtrit(steps - 1, 1.0 - _TAIL)) * scatter * math.sqrt(2.0 / steps)


def _drift(before: NDArray[np.float64], after: NDArray[np.float64], gain: float) -> float:
    """Return the variance of the gain between parts of the window beyond that of single steps."""
    steps = len(before)
    if steps < 2 * _PARTS:
        return 0.0
    excess = _excess(before, after, gain)
    edges = np.linspace(0, steps, _PARTS + 1).round().astype(int)
    means = np.array([excess[a:b].mean() for a, b in zip(edges[:-1], edges[1:], strict=True)])
    scatter = 0.5 * float((np.diff(excess) ** 2).mean())
    return max(0.0, float(means.var(ddof=1)) - scatter * _PARTS / steps)


def _excess(
    before: NDArray[np.float64], after: NDArray[np.float64], gain: float
) -> NDArray[np.float64]:
    """Return the (T,) saving of each step beyond the mean gain, as a share of the mean step."""
    return np.asarray(((1.0 - gain) * before - after) / before.mean(), np.float64)
