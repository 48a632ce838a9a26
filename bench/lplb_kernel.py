"""LPLB's kernel against HiGHS on random problems: python -m bench.lplb_kernel --problems 10000.

Without a GPU the kernel runs under Triton's interpreter, some tenths of a second a problem.
"""

import argparse
import os
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog

from bench.report import Row, write_report
from evenkeel_moe.model.placement import Placement

SIZES = ((8, 64, 8), (8, 64, 16), (8, 128, 64), (16, 128, 16), (16, 128, 32), (32, 256, 32),
         (64, 256, 64), (72, 296, 64))  # fmt: skip
"""Ranks, experts and redundant slots of the problems; SGLang's article has 16 ranks with 16 and 32,
and a rack has 72."""
LAYERS = 4
"""Problems on one placement of each layer."""


def drawn_placement(rng: np.random.Generator, ranks: int, experts: int, spare: int) -> Placement:
    """Return `LAYERS` random layers: replicas of a few experts, slots in random order.

    Some experts get several replicas, and some replicas stand on one rank.
    """
    law = 1.0 / np.arange(1, experts + 1)
    rows = []
    for _ in range(LAYERS):
        replicas = rng.choice(experts, spare, p=rng.permutation(law / law.sum()))
        rows.append(rng.permutation(np.concatenate([np.arange(experts), replicas])))
    return Placement(np.array(rows, np.int32), ranks, experts)


def drawn_counts(rng: np.random.Generator, experts: int) -> NDArray[np.int64]:
    """Return (LAYERS, E) [tokens]: even to ten-fold skew, in some batches half of them idle."""
    counts = np.exp(rng.normal(4.0, rng.choice([0.1, 1.0, 2.0, 3.0]), (LAYERS, experts)))
    counts[rng.random(counts.shape) < rng.choice([0.0, 0.0, 0.5])] = 0.0
    return np.asarray(np.round(counts), np.int64)


def highs_peak(row: NDArray[np.int32], counts: NDArray[np.int64], ranks: int) -> float:
    """Return the least load of the fullest rank, by the linear program as published.

    Args:
        row: (S,) expert of each slot, negative if empty.
        counts: (E,) [tokens].
        ranks: R, with S / R slots each.
    """
    held = np.flatnonzero(row >= 0)
    slots, rank_of, row = len(held), held // (len(row) // ranks), row[held]
    loads = np.zeros((ranks, slots + 1))
    loads[rank_of, np.arange(slots)] = 1.0
    loads[:, -1] = -1.0
    whole = np.zeros((len(counts), slots + 1))
    whole[row, np.arange(slots)] = 1.0
    cost = np.zeros(slots + 1)
    cost[-1] = 1.0
    scale = max(1.0, float(counts.sum()) / ranks)
    found = linprog(cost, loads, np.zeros(ranks), whole, counts / scale, method="highs")
    if found.fun is None:
        raise RuntimeError(f"HiGHS: {found.message}")
    return float(found.fun) * scale


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the peaks of many problems, and print the largest relative difference by size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    # Read by Triton when the kernel is defined.
    from evenkeel_moe.dispatch.lplb_kernel import KernelSplit

    torch.set_num_threads(1)
    rng = np.random.default_rng(chosen.seed)
    worst: dict[str, list[float]] = {}
    begun = time.perf_counter()
    for number in range(-(-chosen.problems // LAYERS)):
        ranks, experts, spare = SIZES[number % len(SIZES)]
        placement = drawn_placement(rng, ranks, experts, spare)
        counts = drawn_counts(rng, experts)
        got = KernelSplit(placement, device).solve(torch.from_numpy(counts).to(device)).peak.cpu()
        for row, tokens, peak in zip(placement.phy2log, counts, got.tolist(), strict=True):
            best = highs_peak(row, tokens, ranks)
            difference = abs(peak - best) / max(best, 1.0)
            worst.setdefault(f"{ranks}_ranks_{spare}_replicas", []).append(difference)
    rows = [
        row
        for size, found in worst.items()
        for row in (
            Row(f"lplb_kernel_{size}_problems", float(len(found)), "1"),
            Row(f"lplb_kernel_{size}_largest_difference", max(found), "1"),
        )
    ]
    rows.append(Row("lplb_kernel_seconds", time.perf_counter() - begun, "s"))
    write_report("lplb_kernel", rows, ("triton", "scipy", "torch"))


if __name__ == "__main__":
    main()
