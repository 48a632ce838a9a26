"""Hypothesis strategies of the domain: topologies, shapes, loads and placements."""

import numpy as np
from hypothesis import strategies as st

from evenkeel_moe.model.cost import CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape, Topology

LOAD_KINDS = ("zipf", "spikes", "uniform", "equal", "one_hot", "zeros")

seeds = st.integers(0, 2**32 - 1)


@st.composite
def topologies(draw, num_ranks, equal_nodes=False):
    """Ranks over nodes, in any order; with `equal_nodes` every node has as many ranks."""
    sizes = [n for n in range(1, num_ranks + 1) if not equal_nodes or num_ranks % n == 0]
    nodes = draw(st.sampled_from(sizes))
    if equal_nodes:
        rows = [rank % nodes for rank in range(num_ranks)]
    else:
        rows = [
            *range(nodes),
            *draw(
                st.lists(
                    st.integers(0, nodes - 1),
                    min_size=num_ranks - nodes,
                    max_size=num_ranks - nodes,
                )
            ),
        ]
    return Topology(tuple(draw(st.permutations(rows))))


@st.composite
def shapes(draw, pooled=None, max_ranks=6, max_experts=12, max_layers=3):
    """Small deployments, single ranks and full slots included."""
    ranks = draw(st.integers(1, max_ranks))
    experts = draw(st.integers(1, max_experts))
    fewest = -(-experts // ranks)
    per_rank = draw(st.integers(fewest, max(fewest, min(experts, fewest + 3))))
    layers = draw(st.integers(1, max_layers))
    pool = None
    if draw(st.booleans()) if pooled is None else pooled:
        # At least a buffer more than the layers need, so that something can be received at all.
        pool = draw(st.integers(layers * fewest + 1, max(layers * fewest + 1, layers * per_rank)))
    return ModelShape(
        num_layers=layers,
        num_logical_experts=experts,
        num_ranks=ranks,
        slots_per_rank=per_rank,
        top_k=1,
        bytes_per_expert=draw(st.integers(1, 1000)),
        pool_slots_per_rank=pool,
    )


@st.composite
def loads(draw, num_layers, num_experts, kinds=LOAD_KINDS, max_steps=4):
    """(T, L, E) float64 of whole tokens."""
    rng = np.random.default_rng(draw(seeds))
    size = (draw(st.integers(1, max_steps)), num_layers, num_experts)
    kind = draw(st.sampled_from(kinds))
    if kind == "zeros":
        return np.zeros(size)
    if kind == "equal":
        return np.full(size, 7.0)
    if kind == "one_hot":
        load = np.zeros(size)
        load[:, :, int(rng.integers(num_experts))] = 100.0
        return load
    if kind == "spikes":
        return np.where(rng.random(size) < 0.2, rng.integers(1, 10_000, size), 0).astype(np.float64)
    if kind == "zipf":
        rank = np.argsort(rng.random(size), axis=2) + 1
        return np.round(10_000.0 / rank)
    return rng.integers(0, 1000, size).astype(np.float64)


def random_rows(shape, rng, fill=1.0):
    """Return an (L, S) valid map: each expert once on a random rank, then spare copies.

    No rank holds an expert twice.
    """
    layers, ranks, per_rank = shape.num_layers, shape.num_ranks, shape.slots_per_rank
    rows = np.full((layers, ranks, per_rank), EMPTY, np.int32)
    pool = np.full(ranks, layers * per_rank)
    if shape.pool_slots_per_rank is not None:
        pool[:] = shape.pool_slots_per_rank
    experts = shape.num_logical_experts
    # Balanced first copies leave no rank's pool too small for a later layer.
    for layer in range(layers):
        seats = np.repeat(rng.permutation(ranks), -(-experts // ranks))
        seats = np.sort(seats.reshape(ranks, -1), axis=0).T.ravel()[:experts]
        for expert, rank in zip(rng.permutation(experts), seats, strict=True):
            free = np.nonzero(rows[layer, rank] == EMPTY)[0]
            rows[layer, rank, rng.choice(free)] = expert
            pool[rank] -= 1
    for layer, rank, local in rng.permutation(np.argwhere(rows == EMPTY)):
        absent = np.setdiff1d(np.arange(experts), rows[layer, rank])
        if pool[rank] > 0 and len(absent) and rng.random() < fill:
            rows[layer, rank, local] = rng.choice(absent)
            pool[rank] -= 1
    return rows.reshape(layers, -1)


@st.composite
def placements(draw, shape, fill=None):
    """Placements that pass `Placement.check(shape)`; some leave slots empty."""
    share = draw(st.sampled_from([0.0, 0.5, 1.0])) if fill is None else fill
    rows = random_rows(shape, np.random.default_rng(draw(seeds)), share)
    return Placement(rows, shape.num_ranks, shape.num_logical_experts)


@st.composite
def cost_curves(draw, num_ranks):
    """Rising stairs, some flat, some ranks slower than others."""
    rng = np.random.default_rng(draw(seeds))
    tiles = draw(st.integers(1, 5))
    stairs = np.asarray(np.cumsum(rng.integers(0, 4, (num_ranks, tiles)), axis=1) + 1.0, np.float64)
    return CostCurves(
        tile_tokens=draw(st.integers(1, 300)),
        tile_seconds=stairs,
        slope_s_per_token=rng.integers(0, 3, num_ranks) * 0.01,
    )


@st.composite
def replica_works(draw):
    """Work in proportion to tokens, or with any of its parts."""
    part = st.sampled_from([0.0, 0.7, 5.0, 40.0])
    return ReplicaWork(draw(part), draw(part), draw(st.sampled_from([0.0, 1.0, 16.0])))


@st.composite
def cost_models(draw, num_ranks):
    """Cost models of all kinds: by tokens, curves, roofline, shared experts, a fixed part."""
    return CostModel(
        draw(st.none() | cost_curves(num_ranks)),
        draw(replica_works()),
        fixed=draw(st.sampled_from([0.0, 2.5])),
        shared_tokens=draw(st.sampled_from([0.0, 0.3])),
    )


@st.composite
def source_loads(draw, shape):
    """(R, L, E) tokens routed by each source rank."""
    rng = np.random.default_rng(draw(seeds))
    sizes = (shape.num_ranks, shape.num_layers, shape.num_logical_experts)
    return rng.integers(0, 50, sizes).astype(np.float64)
