"""Compares CRAFT's estimate, knapsack and packing with a plain loop of its Algorithm 1."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.report import Row, best_of
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.copies import (
    interleaved_capacity,
    pack_copies,
    replicate_experts,
)
from evenkeel_moe.planning.policies.craft import (
    allocate_replicas,
    place_replicas,
    replica_benefit,
)

BATCHES, LAYERS, EXPERTS, RANKS, FACTOR = 3000, 58, 256, 64, 8
SLOTS_PER_RANK = 5


@kernel
def _plain_replay(
    load: NDArray[np.float64], rows: NDArray[np.int32], logcnt: NDArray[np.int32], ranks: int
) -> NDArray[np.float64]:
    """Run Algorithm 1's loops as printed for one placement; return (L,) mean balancedness."""
    batches, layers, _ = load.shape
    per_rank = rows.shape[1] // ranks
    out = np.zeros(layers)
    total = np.zeros(ranks)
    for b in range(batches):
        for layer in range(layers):
            total[:] = 0.0
            for slot in range(rows.shape[1]):
                expert = rows[layer, slot]
                if expert >= 0:
                    total[slot // per_rank] += load[b, layer, expert] / logcnt[layer, expert]
            out[layer] += total.mean() / total.max()
    return out / batches


def _plain(load: NDArray[np.float64], topology: Topology) -> NDArray[np.float64]:
    summed = load.sum(axis=0)
    balance = []
    for replicas in (0, 1, 2, 4, 8, 16, 32, 64):
        logcnt = replicate_experts(summed.astype(np.float32), EXPERTS + replicas)[1]
        capacity = np.repeat(
            interleaved_capacity(np.array([EXPERTS + replicas]), topology), LAYERS, axis=0
        )
        rows = pack_copies(summed, logcnt, capacity, SLOTS_PER_RANK)
        balance.append(_plain_replay(load, rows, logcnt, RANKS))
    return np.stack(balance[1:]) - balance[0]


def _batches() -> NDArray[np.float64]:
    """Return (3000, 58, 256): lognormal popularity per layer, lognormal noise per batch.

    The noise is drawn batch by batch.
    """
    rng = np.random.default_rng(0)
    popularity = 100.0 * np.exp(rng.normal(0.0, 1.0, (LAYERS, EXPERTS)))
    load = np.empty((BATCHES, LAYERS, EXPERTS))
    for batch in load:
        batch[:] = np.round(popularity * np.exp(rng.normal(0.0, 0.25, popularity.shape)))
    return load


def _plan(load: NDArray[np.float64], topology: Topology) -> Placement:
    """Run estimate, knapsack and packing: the part of `plan_craft` before it scores the result."""
    benefit = replica_benefit(load, topology, SLOTS_PER_RANK)
    allocation = allocate_replicas(benefit, FACTOR * RANKS)
    return place_replicas(load.sum(axis=0), allocation, topology, SLOTS_PER_RANK)


def craft_rows(repeats: int = 5) -> list[Row]:
    """Time the whole plan for 64 ranks, and the estimate alone against the plain loop."""
    load = _batches()
    topology = Topology(tuple(rank // 8 for rank in range(RANKS)))
    plain = partial(_plain, load, topology)
    ours = partial(replica_benefit, load, topology, SLOTS_PER_RANK)
    apart = float(np.abs(ours().gain - plain()).max())
    seconds = best_of({"plain": plain, "ours": ours}, repeats)
    return [
        Row("craft_v3_speedup_vs_naive", seconds["plain"] / seconds["ours"], "ratio"),
        Row("craft_v3_s", best_of({"plan": partial(_plan, load, topology)}, repeats)["plan"], "s"),
        Row("craft_v3_largest_gain_difference", apart, "1"),
    ]
