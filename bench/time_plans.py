"""Times keel's plans under the roofline, and on a model of Kimi K3's shape.

`roofline_plan_time_over_tokens` is the same problem under both cost models, in turn; the larger of
the ratios at k = 0.5 and 2. The K3-like shape has 92 layers of 896 experts on 64 ranks with 960
slots; its window has 256 steps. Its first plan starts from the placement of the engines, the later
one from the first plan after the load has drifted.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.loads import drifted, lognormal_steps
from bench.report import Row, best_of
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

V3 = ModelShape(58, 256, 32, 9, 8, 1)
K3 = ModelShape(92, 896, 64, 15, 16, 1)
REPEATS = 3


def _roofline(problem: PlacementProblem, reading: float) -> PlacementProblem:
    read = reading * float(problem.load.mean())
    cost = CostModel(replica=ReplicaWork(read_tokens=read))
    return replace(problem, objective=Objective(cost=cost))


def plan_rows() -> Iterator[list[Row]]:
    """Yield the ratio of planning times, then the seconds of plans of the K3-like shape."""
    load = lognormal_steps(64, V3.num_layers, V3.num_logical_experts)
    topology = Topology.single_node(V3.num_ranks)
    begun = time.perf_counter()
    start = plan_keel(PlacementProblem(load, V3, topology, current=Placement.initial(V3)))
    first_s = time.perf_counter() - begun
    later = PlacementProblem(drifted(load), V3, topology, current=start.placement)
    problems = {"tokens": later, "0.5": _roofline(later, 0.5), "2": _roofline(later, 2.0)}
    seconds = best_of(
        {name: partial(plan_keel, problem) for name, problem in problems.items()}, REPEATS
    )
    ratios = {name: seconds[name] / seconds["tokens"] for name in ("0.5", "2")}
    name = "roofline_plan_time_over_tokens"
    yield [Row(f"{name}_k{reading}", ratio, "ratio") for reading, ratio in ratios.items()]
    yield [Row(name, max(ratios.values()), "ratio")]
    yield [Row("v3_first_plan_s", first_s, "s"), Row("v3_plan_s", seconds["tokens"], "s")]
    load = lognormal_steps(256, K3.num_layers, K3.num_logical_experts)
    topology = Topology.single_node(K3.num_ranks)
    problem = PlacementProblem(load, K3, topology, current=Placement.initial(K3))
    begun = time.perf_counter()
    first = plan_keel(problem)
    first_s = time.perf_counter() - begun
    problem = replace(problem, load=drifted(load), current=first.placement)
    begun = time.perf_counter()
    plan_keel(problem)
    yield [
        Row("k3_first_plan_s", first_s, "s"),
        Row("k3_plan_s", time.perf_counter() - begun, "s"),
    ]
