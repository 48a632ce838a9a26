"""Loads as a router makes them: all layers of a step route the same number of choices."""

import numpy as np


def evened(rng, load):
    """Return (T, L, E) uint32 loads whose layers all have the sum of the fullest of their step.

    The tokens that a layer lacks go to its experts in proportion to their mean.

    Args:
        rng: source of the choice.
        load: (T, L, E) [tokens].
    """
    load = np.array(load, np.uint32)
    if not len(load):
        return load
    shares = load.mean(axis=0) / load.mean(axis=0).sum(axis=1, keepdims=True)
    sums = load.sum(axis=2, dtype=np.int64)
    for step, layer in np.argwhere(sums < sums.max(axis=1, keepdims=True, initial=0)):
        lacks = sums[step].max() - sums[step, layer]
        load[step, layer] += rng.multinomial(lacks, shares[layer]).astype(np.uint32)
    return load


def routed(rng, mean, steps, layers):
    """Return `evened` loads of Poisson noise.

    Args:
        rng: source of the noise.
        mean: (E,) or (layers, E) mean tokens of the experts of a layer.
        steps: T.
        layers: L.
    """
    return evened(rng, rng.poisson(mean, (steps, layers, np.shape(mean)[-1])))
