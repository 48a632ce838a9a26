"""Planner speed and quality against other planners: python -m bench.planning [SECTION ...]."""

import subprocess
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.loads import zipf_load
from bench.peers import VLLM_VERSION, vllm_planner
from bench.planning_craft import craft_rows
from bench.planning_front import front_rows
from bench.planning_gem import gem_rows
from bench.planning_verdict import verdict_rows
from bench.planning_walk import FLEETS, cases, walk_rows
from bench.report import Row, best_of, run_sections
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.eplb import rebalance_experts
from evenkeel_moe.planning.policies.registry import warm_kernels
from evenkeel_moe.planning.problem import metrics

LAYERS, EXPERTS = 58, 256
SIZES = ((288, 32, 4), (320, 64, 8))
"""(slots, ranks, nodes) of the two DeepSeek-V3 deployments."""


def balance(load: NDArray[np.int64], rows: NDArray[np.generic], ranks: int) -> float:
    """Return the mean over layers of mean / max rank load, with an even split."""
    placement = Placement(np.asarray(rows, np.int32), ranks, EXPERTS)
    return metrics.balancedness_mean(metrics.rank_load(load[None], placement))


def eplb_rows() -> list[Row]:
    """Compare both forms of EPLB with vLLM's planner on the same array; conversion is excluded."""
    try:
        theirs = vllm_planner()
    except subprocess.CalledProcessError as refused:
        print(f"no row against vllm {VLLM_VERSION}: {refused}")
        return []
    rows = []
    for slots, ranks, nodes in SIZES:
        load = zipf_load(LAYERS, EXPERTS)
        tensor = torch.from_numpy(load)
        for form, sizes in (("", (1, 1)), ("_hierarchical", (8, nodes))):
            peer = partial(theirs.rebalance_experts, tensor, slots, *sizes, ranks)
            ours = partial(rebalance_experts, load, slots, *sizes, ranks)
            seconds = best_of({"vllm": peer, "ours": ours})
            name = f"eplb_{slots}{form}"
            ours_balance = balance(load, ours(), ranks)
            rows += [
                Row(f"{name}_speedup_vs_vllm", seconds["vllm"] / seconds["ours"], "ratio"),
                Row(
                    f"{name}_balancedness_minus_vllm",
                    ours_balance - balance(load, peer().numpy(), ranks),
                    "1",
                ),
                Row(f"{name}_balancedness", ours_balance, "1"),
                Row(f"{name}_s", seconds["ours"], "s"),
                Row(f"{name}_vllm_s", seconds["vllm"], "s"),
            ]
        apart = partial(rebalance_experts, load, slots, 1, 1, ranks, allow_duplicates=False)
        rows += [
            Row(f"eplb_{slots}_no_duplicates_balancedness", balance(load, apart(), ranks), "1"),
            Row(f"eplb_{slots}_no_duplicates_s", best_of({"ours": apart})["ours"], "s"),
        ]
    return rows


def sections() -> dict[str, Callable[[], Iterable[list[Row]]]]:
    """Return the parts of the bench by name, in order of importance; each yields its rows."""
    return {
        "eplb": lambda: [eplb_rows()],
        "front": lambda: [front_rows()],
        "gem": gem_rows,
        "craft": lambda: [craft_rows()],
        "walk": lambda: walk_rows([one for one in cases() if one[1:] == FLEETS[0]]),
        "verdict": lambda: [verdict_rows()],
        "larger": lambda: walk_rows([one for one in cases() if one[1:] != FLEETS[0]]),
    }


def main() -> None:
    """Run every section, or those named."""
    torch.set_num_threads(1)
    warm_kernels()
    print(f"vllm {VLLM_VERSION} (policy files of the wheel)")
    run_sections("planning", sections(), ("numpy", "numba", "torch"))


if __name__ == "__main__":
    main()
