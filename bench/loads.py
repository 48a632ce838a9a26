"""Load generators of the benches. Every one takes its seed."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.formats import Trace

__all__ = ["drifted", "lognormal_steps", "regrouped", "zipf_load"]


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
