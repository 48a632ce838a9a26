"""Balancedness at few copies: keel under a move limit against a plain greedy swap search.

The old placement is EPLB's; then the load of every expert drifts by 25 %. Both searches see the
drifted load and are scored on it, so this measures the search and not foresight. keel's own price
of a copy, which is meant for noisy loads, is set to zero.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.loads import drifted, zipf_load
from bench.report import Row, best_of
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.eplb import rebalance_experts
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.schedule.relabel import count_moves

LAYERS, EXPERTS = 58, 256
FRONTS = ((288, 32, (32, 40, 60, 80)), (320, 64, (64, 80)))
"""(slots, ranks, copies per layer)."""


@kernel
def _greedy_swaps(
    load: NDArray[np.float64], row: NDArray[np.int32], ranks: int, copies: int
) -> int:
    """Repeatedly make the swap with the most loaded rank that leaves the lowest peak of both ranks.

    Mutates `row` (S,). No rank gets an expert twice. Returns the copies needed.
    """
    slots = row.shape[0]
    per_rank = slots // ranks
    held = np.zeros((load.shape[0], ranks), np.bool_)
    count = np.zeros(load.shape[0])
    for slot in range(slots):
        held[row[slot], slot // per_rank] = True
        count[row[slot]] += 1.0
    had = held.copy()
    total = np.zeros(ranks)
    for slot in range(slots):
        total[slot // per_rank] += load[row[slot]] / count[row[slot]]
    used = 0
    while True:
        hot = int(np.argmax(total))
        best, here, there, price = total[hot], -1, -1, 0
        for a in range(hot * per_rank, (hot + 1) * per_rank):
            for b in range(slots):
                e, f, other = row[a], row[b], b // per_rank
                if other == hot or held[e, other] or held[f, hot]:
                    continue
                moved = load[e] / count[e] - load[f] / count[f]
                peak = max(total[hot] - moved, total[other] + moved)
                more = (
                    int(not had[e, other])
                    + int(not had[f, hot])
                    - int(not had[e, hot])
                    - int(not had[f, other])
                )
                if peak < best and used + more <= copies:
                    best, here, there, price = peak, a, b, more
        if here < 0:
            return used
        e, f, other = row[here], row[there], there // per_rank
        moved = load[e] / count[e] - load[f] / count[f]
        total[hot] -= moved
        total[other] += moved
        row[here], row[there] = f, e
        held[e, hot], held[e, other], held[f, other], held[f, hot] = False, True, False, True
        used += price


def _greedy(load: NDArray[np.float64], old: Placement, copies: int) -> Placement:
    rows = old.phy2log.copy()
    for layer in range(len(rows)):
        _greedy_swaps(load[layer], rows[layer], old.num_ranks, copies)
    return Placement(rows, old.num_ranks, old.num_logical_experts)


def front_rows() -> list[Row]:
    """Return balancedness by number of copies, and the time of keel's slowest plan of 58 layers."""
    rows = []
    for slots, ranks, budgets in FRONTS:
        before = zipf_load(LAYERS, EXPERTS)
        load = drifted(before)
        old = Placement(
            rebalance_experts(before, slots, 1, 1, ranks, allow_duplicates=False), ranks, EXPERTS
        )
        shape = ModelShape(LAYERS, EXPERTS, ranks, slots // ranks, 8, 1)

        def balance(placement: Placement, load: NDArray[np.float64] = load) -> float:
            return metrics.balancedness_mean(metrics.rank_load(load[None], placement))

        rows.append(Row(f"front_{slots}_before", balance(old), "1"))
        plans = {}
        for copies in budgets:
            problem = PlacementProblem(
                load[None],
                shape,
                Topology.single_node(ranks),
                current=old,
                objective=Objective(limits=PlanLimits(max_moves=copies * LAYERS)),
            )
            plans[str(copies)] = partial(
                plan_keel, problem, KeelOptions(stickiness=0.0, caution=0.0)
            )
            placement = plans[str(copies)]().placement
            rows += [
                Row(f"front_{slots}_at_{copies}", balance(placement), "1"),
                Row(f"greedy_{slots}_at_{copies}", balance(_greedy(load, old, copies)), "1"),
                Row(
                    f"front_{slots}_copies_at_{copies}",
                    count_moves(old, placement) / LAYERS,
                    "copies/layer",
                ),
            ]
        rows.append(Row(f"front_{slots}_s", max(best_of(plans, repeats=5).values()), "s"))
    return rows
