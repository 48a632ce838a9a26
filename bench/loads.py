"""Load generators of the benches. Every one takes its seed."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import Trace


def zipf_load(
    num_layers: int,
    num_experts: int,
    *,
    exponent: float = 1.0,
    tokens: int = 2_000_000,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return (L, E) [tokens]: Zipf popularity permuted per layer, one multinomial per layer."""
    rng = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, num_experts + 1) ** exponent
    popularity /= popularity.sum()
    return np.stack(
        [rng.multinomial(tokens, rng.permutation(popularity)) for _ in range(num_layers)]
    )


def drifted(
    load: NDArray[np.generic], *, sigma: float = 0.25, seed: int = 1
) -> NDArray[np.float64]:
    """Return the load with every expert multiplied by exp(N(0, sigma)); the benches use 0.25."""
    rng = np.random.default_rng(seed)
    return np.asarray(load, np.float64) * np.exp(rng.normal(0.0, sigma, load.shape))


def lognormal_steps(
    num_steps: int,
    num_layers: int,
    num_experts: int,
    *,
    sigma: float = 0.6,
    step_sigma: float = 0.25,
    tokens: int = 32_768,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return (T, L, E) [tokens]: lognormal popularity per layer, lognormal noise per step.

    Tokens are whole numbers; every step and layer routes about `tokens`.
    """
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.normal(0.0, sigma, (num_layers, num_experts)))
    steps = popularity * np.exp(rng.normal(0.0, step_sigma, (num_steps, num_layers, num_experts)))
    return np.asarray(np.round(steps / steps.sum(axis=2, keepdims=True) * tokens), np.float64)


def regrouped(trace: Trace, together: int = 4) -> Trace:
    """Return a trace in which some layers are joined into one, with the experts of all of them.

    It has recorded noise and drift at the sizes of large models. Experts of different layers do not
    compete for tokens, so loads are less skewed than in a real layer of that size. Layers left over
    are dropped.
    """
    layers = trace.num_layers // together
    counts = trace.counts[:, : layers * together].reshape(trace.num_steps, layers, -1)
    return replace(
        trace,
        counts=np.ascontiguousarray(counts),
        layer_ids=tuple(range(layers)),
        name=f"{trace.name}_{counts.shape[2]}",
        top_k=None if trace.top_k is None else together * trace.top_k,
        source=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Traffic to draw. Each layer draws its own experts for the properties."""

    steps: int
    layers: int
    experts: int
    tokens: int
    """Every step routes so many in each layer."""
    skew: float = 2.0
    """Mean load of the hottest expert over that of all experts. CRAFT calls a layer skewed from 10
    on; recorded layers have 2 to 8."""
    temporal: int = 0
    """Experts of a layer that are used together in some steps and not at all in the others."""
    active: float = 0.17
    """Share of the steps in which they are used; GEM's layer has 0.17."""
    burst: float = 3.0
    """Their load in these steps over the mean load of an expert; GEM's have 3."""
    drift: float = 0.0
    """Share of a layer's load that is on other experts at the end than at the start."""
    seed: int = 0

    def __post_init__(self) -> None:
        held = self.temporal * self.burst / self.experts
        if not 0 <= self.temporal < self.experts:
            raise InvalidInput(f"temporal is {self.temporal}, must be below {self.experts} experts")
        if not 0 < self.active < 1:
            raise InvalidInput(f"active is {self.active}, must be between 0 and 1")
        if not 0 <= held < 1:
            raise InvalidInput(f"temporal experts would take {held:.2f} of a step, must be below 1")
        rest = 1.0 - held * self.active
        least, most = rest * self.experts / (self.experts - self.temporal), rest * self.experts
        if not max(least, self.active * self.burst) <= self.skew < most:
            raise InvalidInput(
                f"skew is {self.skew}, must be from {max(least, self.active * self.burst):.3g} to"
                f" {most:.3g} here"
            )


def drawn_traffic(regime: Regime) -> NDArray[np.int64]:
    """Return (T, L, E) [tokens]: one multinomial for each step and layer, by the labels.

    Popularity is Zipf's law with the exponent that gives the skew. Drift exchanges a hot expert
    with a cold one at a time, at even distances, so that the skew is the same in every step.

    Raises:
        InvalidInput: no exchange of experts moves as much load as `drift`.
    """
    rng = np.random.default_rng(regime.seed)
    consistent = regime.experts - regime.temporal
    mean_rest = 1.0 - regime.temporal * regime.active * regime.burst / regime.experts
    law = _zipf_shares(consistent, regime.skew / regime.experts / mean_rest)
    weights = np.zeros((regime.steps, regime.layers, regime.experts))
    for layer in range(regime.layers):
        order = rng.permutation(regime.experts)
        weights[:, layer, order[:consistent]] = _drifting(law, regime, rng)
        bursts = np.zeros(regime.steps, np.bool_)
        count = round(regime.active * regime.steps)
        bursts[rng.choice(regime.steps, count, replace=False)] = True
        often = regime.burst / regime.experts
        weights[bursts, layer] *= 1.0 - regime.temporal * often
        weights[np.ix_(bursts.nonzero()[0], np.array([layer]), order[consistent:])] = often
    weights /= weights.sum(axis=2, keepdims=True)
    return rng.multinomial(regime.tokens, weights)


def _zipf_shares(count: int, hottest: float) -> NDArray[np.float64]:
    """Return (count,) shares that fall as a power of the place, the first one being `hottest`."""
    places = np.arange(1.0, count + 1)

    def too_much(exponent: float) -> float:
        return float(1.0 / (places**-exponent).sum() - hottest)

    exponent = 0.0 if too_much(0.0) >= 0 else brentq(too_much, 0.0, 64.0)
    law = places**-exponent
    return np.asarray(law / law.sum(), np.float64)


def _drifting(
    law: NDArray[np.float64], regime: Regime, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return (T, n) shares of the consistent experts, exchanged one pair after the other."""
    half = len(law) // 2
    gaps = law[:half] - law[::-1][:half]
    pairs: list[int] = []
    left = regime.drift
    for pair in rng.permutation(half):
        if gaps[pair] <= left:
            pairs.append(int(pair))
            left -= gaps[pair]
    if left > 0.01:
        raise InvalidInput(
            f"drift is {regime.drift}: exchanged experts move at most {gaps.sum():.2f} of the load"
        )
    shares = np.tile(law, (regime.steps, 1))
    # No exchange in the first and the last eighth, which show the start and the end.
    first, last = regime.steps // 8, regime.steps - regime.steps // 8
    for pair, step in zip(pairs, np.linspace(first, last, len(pairs)).astype(int), strict=True):
        places = [pair, len(law) - 1 - pair]
        shares[step:, places] = shares[step:, places[::-1]]
    return shares
