"""What part of a window still speaks for the future: recency weights, and splits where traffic changed.

A change is looked for by comparing the expert loads before and after every possible split. Steps of one
workload differ too, because requests live for many steps, so the difference between neighbouring blocks of
the window is the yardstick: a split counts only if it is several times larger.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.jit import kernel

__all__ = ["Change", "ChangeRules", "find_change", "step_weights"]


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """How the past is weighed."""

    half_life_windows: float = 0.5
    """A step loses half its weight each time this share of the window has passed; inf for equal weights."""
    steady_half_life_windows: float = 3.0
    """The same where no split stands out: all steps then tell of the future alike."""
    steady: float = 2.0
    """Largest difference around a split, in differences of neighbouring blocks, that counts as steady."""
    threshold: float = 6.0
    """A split counts when the loads around it differ this many times more than neighbouring blocks do."""
    old_weight: float = 0.1
    """What steps before a change keep of their weight: they still steady experts that did not change."""
    shortest: float = 1.0 / 16.0
    """Shortest part of the window that can be told from the rest; never under 2 steps."""

    def __post_init__(self) -> None:
        for name in ("half_life_windows", "steady_half_life_windows", "steady", "threshold"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be positive")
        if not (0 <= self.old_weight <= 1 and 0 < self.shortest <= 0.5):
            raise InvalidInput(
                f"old_weight {self.old_weight} must be in [0, 1], shortest {self.shortest} in (0, 0.5]"
            )


@dataclass(frozen=True, slots=True)
class Change:
    """The newest change found in a window."""

    first_step: int
    """Index of the first step after it; 0 where the whole window looks alike."""
    strength: float
    """Largest difference around a split, in differences of neighbouring blocks; NaN if too few steps to tell."""
    usual: float = float("nan")
    """Difference of neighbouring blocks of about sqrt(T) steps, chi-square per degree of freedom: 1 where tokens come one
    by one by chance, more where they come by the request; NaN if too few steps to tell."""


@kernel
def _difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Chi-square per degree of freedom that two (L, E) loads have the same shares in every layer."""
    layers, experts = a.shape
    chi = 0.0
    freedom = 0
    for layer in range(layers):
        sum_a = 0.0
        sum_b = 0.0
        for expert in range(experts):
            sum_a += a[layer, expert]
            sum_b += b[layer, expert]
        if sum_a <= 0.0 or sum_b <= 0.0:
            continue
        part = sum_a / (sum_a + sum_b)
        used = 0
        for expert in range(experts):
            both = a[layer, expert] + b[layer, expert]
            if both > 0.0:
                off = a[layer, expert] - both * part
                chi += off * off / (both * part * (1.0 - part))
                used += 1
        freedom += used - 1
    return chi / freedom if freedom > 0 else 0.0


@kernel
def _best_split(load: NDArray[np.float64], shortest: int) -> tuple[float, int]:
    """(largest difference, first step after it) over the splits of a (T, L, E) window."""
    steps = load.shape[0]
    before = np.zeros(load.shape[1:])
    after = np.zeros(load.shape[1:])
    for t in range(steps):
        after += load[t]
    best = 0.0
    at = 0
    for t in range(1, steps - shortest + 1):
        before += load[t - 1]
        after -= load[t - 1]
        if t < shortest:
            continue
        difference = _difference(before, np.maximum(after, 0.0))
        if difference > best:
            best = difference
            at = t
    return best, at


def find_change(load: NDArray[np.float64], rules: ChangeRules = ChangeRules()) -> Change:
    """The newest change in a window.

    Args:
        load: (T, L, E) [tokens], oldest first.
        rules: what counts as one.

    Raises:
        ShapeMismatch: `load` has another number of axes.
    """
    if load.ndim != 3:
        raise ShapeMismatch(f"load must be (T, L, E), got {load.shape}")
    tokens = np.ascontiguousarray(load, np.float64)
    steps = len(tokens)
    shortest = max(2, round(steps * rules.shortest))
    block = max(2, round(steps**0.5))
    blocks = steps // block
    if blocks < 3:
        return Change(0, float("nan"))
    sums = tokens[steps - blocks * block :].reshape(blocks, block, *tokens.shape[1:]).sum(axis=1)
    usual = float(np.median([_difference(sums[i], sums[i + 1]) for i in range(blocks - 1)]))
    first, strongest = 0, 0.0
    while steps - first >= 2 * shortest and usual > 0:
        difference, at = _best_split(tokens[first:], shortest)
        strongest = max(strongest, difference / usual)
        if difference < rules.threshold * usual:
            break
        first += at
    return Change(first, strongest, usual)


def step_weights(
    load: NDArray[np.float64], rules: ChangeRules = ChangeRules()
) -> tuple[NDArray[np.float64], Change]:
    """How much each step of a window says about what comes next.

    Returns:
        (T,) float64 summing to 1, and the change it was cut at.
    """
    change = find_change(load, rules)
    age = np.arange(len(load))[::-1]
    moving = change.strength > rules.steady
    half_life = rules.half_life_windows if moving else rules.steady_half_life_windows
    weights = 0.5 ** (age / (half_life * len(load)))
    weights[: change.first_step] *= rules.old_weight
    return weights / weights.sum(), change
