"""Detects changes of traffic in a window, and weights its steps by how well they predict the next.

Every split of the window is tried, and the expert loads before and after it are compared. Steps of
one workload differ too, because requests live for many steps. The difference between neighbouring
blocks of the window is therefore the unit: a split counts only if its difference is several times
larger.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.jit import kernel


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """The rules for detecting changes and weighting steps."""

    half_life_windows: float = 0.5
    """A step loses half its weight each time this share of the window has passed; inf for equal
    weights."""
    steady_half_life_windows: float = 3.0
    """The same if no split stands out: all steps then predict about equally well."""
    steady: float = 2.0
    """Largest difference around a split, in differences of neighbouring blocks, that counts as
    steady."""
    threshold: float = 6.0
    """A split counts as a change if the loads around it differ this many times more than
    neighbouring blocks do."""
    old_weight: float = 0.1
    """Share of their weight that steps before a change keep: they still reduce the noise of experts
    that did not change."""
    shortest: float = 1.0 / 16.0
    """Shortest part, as a share of the window, that can be told from the rest; at least 2 steps."""

    def __post_init__(self) -> None:
        for name in ("half_life_windows", "steady_half_life_windows", "steady", "threshold"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be positive")
        if not (0 <= self.old_weight <= 1 and 0 < self.shortest <= 0.5):
            raise InvalidInput(
                f"old_weight {self.old_weight} must be in [0, 1],"
                f" shortest {self.shortest} in (0, 0.5]"
            )


@dataclass(frozen=True, slots=True)
class Change:
    """The newest change found in a window."""

    first_step: int
    """Index of the first step after it; 0 if the whole window looks alike."""
    strength: float
    """Largest difference around a split, in differences of neighbouring blocks; NaN if there are
    too few steps."""
    usual: float = float("nan")
    """Difference of neighbouring blocks of about sqrt(T) steps, as chi-square per degree of
    freedom: 1 if tokens arrive independently, more if they arrive by the request. NaN if there are
    too few steps."""


@kernel
def _difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return chi-square per degree of freedom for equal shares of two (L, E) loads."""
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
    """Return the largest difference around any split of a (T, L, E) window, and its first step."""
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


def detect_change(load: NDArray[np.float64], rules: ChangeRules = ChangeRules()) -> Change:
    """Find the newest change of traffic in a window.

    Args:
        load: (T, L, E) [tokens], oldest first.
        rules: what counts as a change.

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
    """Weight the steps of a window by how well they predict the next steps.

    Returns:
        (T,) float64 summing to 1, and the change of traffic that was found.
    """
    change = detect_change(load, rules)
    age = np.arange(len(load))[::-1]
    moving = change.strength > rules.steady
    half_life = rules.half_life_windows if moving else rules.steady_half_life_windows
    weights = 0.5 ** (age / (half_life * len(load)))
    weights[: change.first_step] *= rules.old_weight
    return weights / weights.sum(), change
