"""The figures of GEM's search, of its profile and of the spread of its devices."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.dispatch_traces import Recorded
from bench.gem_setups import gem_setup
from bench.report import Row, best_of
from bench.seeds_placement import GEM_RANKS, GEM_WINDOW
from evenkeel_moe.agent.profile.token_curve import token_counts
from evenkeel_moe.model.cost import CostCurves, CostModel
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.gem import (
    GemOptions,
    cost_table,
    initial_mapping,
    plan_gem,
    refine_mapping,
    search_layers,
)
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

RESTARTS = (1, 3, 10, 30, 100)
"""K; the paper finds that 30 suffice."""
LATER_STEPS = 50
"""Steps after the window that a mapping is also scored on."""
PROFILED_TOKENS = 16_384
"""The paper's sweep: every count of tokens up to this one."""
SLOWEST, FASTEST = 0.8677, 1.108
"""Throughput of the slowest and the fastest of the paper's 128 devices, over the mean."""
SIGMA = 0.0615
"""Spread of a normal distribution cut at these two, for which four devices differ by 11.9 %, as the
paper has it. Of its distribution it prints no more."""
GAP_RANKS = (4, 8, 16, 32, 64)
_NO_LIMIT = 1 << 60


def gem_search_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """Gain by restarts, swaps, cost of mapping and profile, and speeds drawn as the paper does.

    Each trace is planned once, in the middle, on 16 steps, 4 ranks, set-up high. `window` is the
    time saved over linear placement on the steps of the plan, `later` on the 50 after them.
    """
    found: dict[str, list[float]] = {}
    swaps: list[int] = []
    for trace in traces:
        for count, saved in _gain_by_restarts(trace).items():
            for part, value in zip(("window", "later"), saved, strict=True):
                found.setdefault(f"gem_restarts_{count}_{part}_saved_mean", []).append(value)
        swaps += _swaps(trace)
    yield [Row(name, float(np.mean(values)), "1") for name, values in found.items()]
    yield [
        Row("gem_swaps_mean", float(np.mean(swaps)), "1"),
        Row("gem_swaps_most", float(max(swaps)), "1"),
        Row("gem_mapping_scout_s", _mapping_seconds(), "s"),
    ]
    counts = len(token_counts(64, 2048, PROFILED_TOKENS))
    yield [
        Row("gem_profile_counts", float(counts), "1"),
        Row("gem_profile_counts_saved", PROFILED_TOKENS / counts, "ratio"),
    ]
    yield [
        Row(
            f"gem_gap_{ranks}_ranks", float((drawn.max(axis=1) / drawn.min(axis=1)).mean()) - 1, "1"
        )
        for ranks, drawn in ((ranks, drawn_speeds(ranks, 10_000)) for ranks in GAP_RANKS)
    ]


def drawn_speeds(ranks: int, samples: int, seed: int = 0) -> NDArray[np.float64]:
    """Return (samples, R) speeds of ranks, as drawn from the paper's 128 devices."""
    rng = np.random.default_rng(seed)
    drawn = np.empty(0)
    while len(drawn) < samples * ranks:
        more = rng.normal(1.0, SIGMA, samples * ranks)
        drawn = np.concatenate([drawn, more[(more > SLOWEST) & (more < FASTEST)]])
    return drawn[: samples * ranks].reshape(samples, ranks)


class _Window:
    """A trace's window and the steps after it, in units of a cost table."""

    def __init__(self, trace: Recorded) -> None:
        _, layers, experts = trace.load.shape
        first = max(0, len(trace.load) // 2 - GEM_WINDOW)
        load = trace.load[first : first + GEM_WINDOW + LATER_STEPS].astype(np.float64)
        tile = max(1, int(load.sum(axis=2).mean() / GEM_RANKS / 16))
        cost = CostModel(gem_setup("high", GEM_RANKS, tile_tokens=tile, tiles=64))
        units, self.table = cost_table(load, GEM_RANKS, cost)
        self.window = np.ascontiguousarray(units[:, :, :GEM_WINDOW])
        self.later = units[:, :, GEM_WINDOW:]
        per_rank = -(-experts // GEM_RANKS)
        self.linear = np.tile(np.arange(experts) // per_rank, (layers, 1))
        self.capacity = np.full((layers, GEM_RANKS), per_rank, np.int64)

    def time(self, load: NDArray[np.int64], rank_of: NDArray[np.int64]) -> float:
        """Return the seconds of (L, E, T) units under the (L, E) ranks of a mapping."""
        on_rank = rank_of[:, None] == np.arange(GEM_RANKS)[None, :, None]
        total = np.einsum("lre,let->lrt", on_rank.astype(np.int64), load)
        return float(self.table[np.arange(GEM_RANKS)[None, :, None], total].max(axis=1).sum())


def _gain_by_restarts(trace: Recorded) -> dict[int, tuple[float, float]]:
    """Return the shares of time saved on the window and on later steps, by the restarts."""
    window, options = _Window(trace), GemOptions()
    layers, experts = window.linear.shape
    rng = np.random.default_rng(0)
    noise = 1 + rng.uniform(-options.noise, options.noise, (max(RESTARTS), layers, experts))
    noise[0] = 1.0
    found = {}
    for count in RESTARTS:
        rank_of, _, _ = search_layers(
            window.window,
            noise[:count],
            window.capacity,
            window.table,
            options.least_drop,
            _NO_LIMIT,
        )
        seen, later = (
            1 - window.time(load, rank_of) / window.time(load, window.linear)
            for load in (window.window, window.later)
        )
        found[count] = (seen, later)
    return found


def _swaps(trace: Recorded) -> list[int]:
    """Return the swaps of the first restart of every layer."""
    window, least_drop = _Window(trace), GemOptions().least_drop
    found = []
    for load, capacity in zip(window.window, window.capacity, strict=True):
        order = np.argsort(-load.sum(axis=1), kind="stable")
        rank_of = initial_mapping(load, order, capacity, window.table)
        score, swaps = window.time(load[None], rank_of[None]), 0
        while True:
            before = rank_of.copy()
            # With a least drop of all the score, refinement ends after its first swap.
            after, _ = refine_mapping(load, rank_of, window.table, 1.0)
            if (rank_of == before).all():
                break
            swaps += 1
            if score - after < least_drop * score:
                break
            score = after
        found.append(swaps)
    return found


def _mapping_seconds() -> float:
    """Return the seconds of a plan of the size of Llama-4-Scout: 48 layers of 16 experts."""
    shape = ModelShape(48, 16, GEM_RANKS, 16 // GEM_RANKS, 1, 1)
    load = np.random.default_rng(0).lognormal(6.0, 1.0, (GEM_WINDOW, 48, 16)).round()
    curves: CostCurves = gem_setup("high", GEM_RANKS, tile_tokens=512, tiles=64)
    problem = PlacementProblem(
        load, shape, Topology.single_node(GEM_RANKS), objective=Objective(cost=CostModel(curves))
    )
    return best_of({"gem": lambda: plan_gem(problem)}, 3)["gem"]
