"""Detects changes of traffic in a window, and weights its steps by how well they predict the next.

Every split of the window is tried, and the expert loads before and after it are compared. Steps of
one workload differ too, because requests live for many steps. The difference between neighbouring
blocks of the window is therefore the unit: a split counts only if its difference is several times
larger. Layers are compared one by one too, because traffic can change in some of them only.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel

HALF_LIFE = 1.0
"""A step loses half its weight each time this share of the window has passed."""
_STEADY_HALF_LIFE = 3.0
"""The same if no split stands out: all steps then predict about equally well."""
_STEADY = 2.0
"""Largest difference around a split, in differences of neighbouring blocks, that counts as
steady."""
OLD_WEIGHT = 0.1
"""Share of their weight that steps before a change keep: they still reduce the noise of experts
that did not change."""
_FARTHEST = 16.0
"""Largest factor by which the load of an expert in old steps is raised: the deviations of an almost
idle expert are no measure of those of a busy one."""


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """The rules for detecting changes."""

    threshold: float = 6.0
    """Above 0. A split counts as a change if the loads around it differ this many times more than
    neighbouring blocks do."""
    shortest: float = 1.0 / 16.0
    """Shortest part, as a share of the window, that can be told from the rest; at most a half. At
    least 2 steps."""
    layer_threshold: float = math.inf
    """`threshold` for one layer alone, in differences of neighbouring blocks of that layer; inf if
    only the difference of all layers together counts. It should be higher than `threshold`: a layer
    is noisier, and one of many differs by chance."""


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
    layer_strengths: tuple[float, ...] = ()
    """The difference of each layer around `first_step`, in its own differences of neighbouring
    blocks; empty without a change."""


@kernel
def _difference(
    a: NDArray[np.float64], b: NDArray[np.float64], by_layer: NDArray[np.float64]
) -> float:
    """Return chi-square per degree of freedom for equal shares of two (L, E) loads.

    Mutates: `by_layer` (L,), which receives the same of each layer, 0 for a layer without load.
    """
    layers, experts = a.shape
    chi = 0.0
    freedom = 0
    for layer in range(layers):
        by_layer[layer] = 0.0
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
                off = off * off / (both * part * (1.0 - part))
                chi += off
                by_layer[layer] += off
                used += 1
        freedom += used - 1
        by_layer[layer] = by_layer[layer] / (used - 1) if used > 1 else 0.0
    return chi / freedom if freedom > 0 else 0.0


@kernel
def _best_split(
    load: NDArray[np.float64],
    shortest: int,
    usual: float,
    usual_by_layer: NDArray[np.float64],
    layer_share: float,
) -> tuple[float, int]:
    """Return the largest difference around any split of a (T, L, E) window, and its first step.

    Args:
        load: [tokens], oldest first.
        shortest: steps on each side of a split.
        usual: difference of neighbouring blocks, above 0; the unit of the result.
        usual_by_layer: (L,) the same of each layer; 0 leaves the layer alone out.
        layer_share: weight of the difference of one layer alone.
    """
    steps, layers = load.shape[:2]
    by_layer = np.empty(layers)
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
        difference = _difference(before, np.maximum(after, 0.0), by_layer) / usual
        for layer in range(layers):
            if usual_by_layer[layer] > 0.0:
                alone = layer_share * by_layer[layer] / usual_by_layer[layer]
                difference = max(difference, alone)
        if difference > best:
            best = difference
            at = t
    return best, at


def detect_change(load: NDArray[np.float64], rules: ChangeRules = ChangeRules()) -> Change:
    """Find the newest change of traffic in a window.

    Args:
        load: (T, L, E) [tokens], oldest first.
        rules: what counts as a change.
    """
    tokens = np.ascontiguousarray(load, np.float64)
    steps = len(tokens)
    shortest = max(2, round(steps * rules.shortest))
    block = max(2, round(steps**0.5))
    blocks = steps // block
    if blocks < 3:
        return Change(0, float("nan"))
    begin = steps - blocks * block
    sums = tokens[begin:].reshape(blocks, block, *tokens.shape[1:]).sum(axis=1)
    by_layer = np.zeros((blocks - 1, tokens.shape[1]))
    pairs = np.array([_difference(sums[i], sums[i + 1], by_layer[i]) for i in range(blocks - 1)])
    usual = unit = float(np.median(pairs))
    usual_by_layer = np.median(by_layer, axis=0)
    alike = np.ones(blocks - 1, bool)
    starts = begin + block * np.arange(blocks - 1)
    first, strongest = 0, 0.0
    while steps - first >= 2 * shortest and unit > 0:
        strength, at = _best_split(
            tokens[first:],
            shortest,
            unit,
            usual_by_layer,
            rules.threshold / rules.layer_threshold,
        )
        strongest = max(strongest, strength)
        if strength < rules.threshold:
            break
        first += at
        # Blocks on both sides of a change are not alike, so they no longer count as usual.
        alike &= (first <= starts) | (first >= starts + 2 * block)
        if np.count_nonzero(alike) >= 2:
            unit = float(np.median(pairs[alike]))
            usual_by_layer = np.median(by_layer[alike], axis=0)
    return Change(first, strongest, usual, _layer_strengths(tokens, first, usual_by_layer))


def _layer_strengths(
    load: NDArray[np.float64], first_step: int, usual: NDArray[np.float64]
) -> tuple[float, ...]:
    """Return `Change.layer_strengths`; a layer whose blocks are all alike has inf, or 0 too."""
    if first_step == 0:
        return ()
    by_layer = np.zeros(load.shape[1])
    _difference(load[:first_step].sum(axis=0), load[first_step:].sum(axis=0), by_layer)
    alike = np.where(by_layer > 0, np.inf, 0.0)
    return tuple(np.divide(by_layer, usual, out=alike, where=usual > 0).tolist())


def forget_old_means(load: NDArray[np.generic], change: Change) -> NDArray[np.float64]:
    """Move the steps before a change to the mean loads of the steps after it.

    Only layers that changed are moved: those that differ by more than steady traffic does, where
    the error of the old means exceeds the noise of the new ones. In the others all steps still say
    how much load an expert has. Within moved layers the old steps keep their deviations from their
    mean: a few steps tell means, but not which experts are loaded together.

    Args:
        load: (T, L, E) [tokens], oldest first; T may end before the window in which the change was
            found, but after the change.
        change: in a window that begins with `load`.

    Returns:
        (T, L, E) float64 [tokens]; the mean of each expert in the old steps of a moved layer is its
        share after the change times the mean load of that layer before it.
    """
    moved = np.array(load, np.float64)
    first = change.first_step
    layers = np.flatnonzero(np.array(change.layer_strengths) > _STEADY)
    if not 0 < first < len(moved) or not len(layers):
        return moved
    old = moved[:first, layers]
    before, after = old.mean(axis=0), moved[first:, layers].mean(axis=0)
    total = after.sum(axis=1, keepdims=True)
    shares = np.divide(after, total, out=np.zeros_like(after), where=total > 0)
    wanted = shares * before.sum(axis=1, keepdims=True)
    factor = np.divide(wanted, before, out=np.ones_like(before), where=before > 0)
    factor = np.minimum(factor, _FARTHEST)
    # What scaling cannot bring to an expert that was idle is added to every step.
    moved[:first, layers] = old * factor + np.maximum(wanted - before * factor, 0.0)
    return moved


def step_weights(load: NDArray[np.float64]) -> tuple[NDArray[np.float64], Change]:
    """Weight the steps of a window by how well they predict the next steps.

    Returns:
        (T,) float64 summing to 1, and the change of traffic that was found.
    """
    change = detect_change(load)
    age = np.arange(len(load))[::-1]
    half_life = HALF_LIFE if change.strength > _STEADY else _STEADY_HALF_LIFE
    weights = 0.5 ** (age / (half_life * len(load)))
    weights[: change.first_step] *= OLD_WEIGHT
    return weights / weights.sum(), change
