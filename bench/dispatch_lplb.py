"""LPLB against scipy's HiGHS: 58 layers of 256 experts, 32 redundant slots, 32 ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from bench.loads import drifted, lognormal_steps, zipf_load
from bench.report import Row, best_of
from evenkeel_moe.dispatch import BatchedSplit, ExactSplit
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.eplb import rebalance_experts

LAYERS, EXPERTS, RANKS, SLOTS = 58, 256, 32, 288
HIGHS_LAYERS = 12
"""Layers that HiGHS solves in each run. Ours solves all of them; both figures are per layer."""


def highs_solver(placement: Placement, counts: NDArray[np.float64]) -> Callable[[], list[float]]:
    """Return a function that makes one linprog call per layer.

    The matrices are built once; only the right-hand sides depend on the batch.
    """
    programs: list[tuple[Any, Any, Any]] = []
    for layer in range(HIGHS_LAYERS):
        row = placement.phy2log[layer]
        shared = np.flatnonzero(placement.logcnt[layer] > 1)
        column = {int(expert): index for index, expert in enumerate(shared)}
        copies = [slot for slot in range(SLOTS) if int(row[slot]) in column]
        rank = np.array(copies) // placement.slots_per_rank
        of = np.array([column[int(row[slot])] for slot in copies])
        number, ranks = len(copies), np.arange(RANKS)
        entries = [
            (np.ones(number), rank, np.arange(number)),
            (np.ones(RANKS), ranks, number + ranks),
            (-np.ones(RANKS), ranks, np.full(RANKS, number + RANKS)),
            (np.ones(number), RANKS + of, np.arange(number)),
        ]
        values, down, across = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        matrix = csr_array(
            (values, (down, across)), shape=(RANKS + len(shared), number + RANKS + 1)
        )
        right = np.zeros(RANKS + len(shared))
        fixed = [slot for slot in range(SLOTS) if int(row[slot]) not in column]
        np.subtract.at(
            right, np.array(fixed) // placement.slots_per_rank, counts[layer, row[fixed]]
        )
        right[RANKS:] = counts[layer, shared]
        cost = np.zeros(number + RANKS + 1)
        cost[-1] = 1.0
        # scipy is a fifth faster on a dense matrix of this size.
        programs.append((cost, matrix.toarray(), right))

    def solve() -> list[float]:
        return [
            float(
                linprog(cost, A_eq=matrix, b_eq=right, bounds=(0, None), method="highs").fun or 0.0
            )
            for cost, matrix, right in programs
        ]

    return solve


def lplb_rows() -> list[Row]:
    """Return the `lplb` rows of two loads; the headline rows are the worse of the two."""
    loads = {
        "zipf": zipf_load(LAYERS, EXPERTS),
        "lognormal": lognormal_steps(1, LAYERS, EXPERTS)[0],
    }
    rows: list[Row] = []
    speedups, errors, ours_us = [], [], []
    for name, planned in loads.items():
        phy2log = rebalance_experts(planned, SLOTS, 1, 1, RANKS, allow_duplicates=False)
        placement = Placement(phy2log, RANKS, EXPERTS)
        live = np.round(drifted(planned))
        counts = torch.from_numpy(live)
        exact, interior = ExactSplit(placement), BatchedSplit(placement)
        alone = [
            ExactSplit(Placement(placement.phy2log[layer : layer + 1], RANKS, EXPERTS))
            for layer in range(HIGHS_LAYERS)
        ]
        highs = highs_solver(placement, live)

        def one_by_one(
            solvers: list[ExactSplit] = alone, batch: torch.Tensor = counts
        ) -> list[object]:
            return [solver.solve(batch[layer : layer + 1]) for layer, solver in enumerate(solvers)]

        seconds = best_of(
            {"highs": highs, "exact": partial(exact.solve, counts), "alone": one_by_one}
        )
        layer_us = {
            "highs": seconds["highs"] / HIGHS_LAYERS * 1e6,
            "exact": seconds["exact"] / LAYERS * 1e6,
            "alone": seconds["alone"] / HIGHS_LAYERS * 1e6,
        }
        want = np.array(highs())
        peak = exact.solve(counts).peak.numpy().copy()
        errors.append(float(np.abs(peak[:HIGHS_LAYERS] / want - 1).max()))
        speedups.append(layer_us["highs"] / layer_us["exact"])
        ours_us.append(layer_us["exact"])
        batched = best_of({"interior": partial(interior.solve, counts)}, repeats=3)["interior"]
        off = float(np.abs(interior.solve(counts).peak.numpy() / peak - 1).max())
        rows += [
            Row(f"lplb_{name}_speedup_vs_highs", speedups[-1], "ratio"),
            Row(
                f"lplb_{name}_speedup_vs_highs_one_call_each",
                layer_us["highs"] / layer_us["alone"],
                "ratio",
            ),
            Row(f"lplb_{name}_us_per_layer", layer_us["exact"], "us"),
            Row(f"lplb_{name}_us_per_layer_one_call_each", layer_us["alone"], "us"),
            Row(f"lplb_{name}_highs_us_per_layer", layer_us["highs"], "us"),
            Row(f"lplb_{name}_interior_cpu_us_per_layer", batched / LAYERS * 1e6, "us"),
            Row(f"lplb_{name}_interior_max_relative_error", off, "1"),
        ]
    headline = [
        Row("lplb_speedup_vs_highs", min(speedups), "ratio"),
        Row("lplb_max_relative_error", max(errors), "1"),
        Row("lplb_us_per_layer", max(ours_us), "us"),
    ]
    return headline + rows
