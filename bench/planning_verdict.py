"""Checks verdicts against the steps that follow: python -m bench.planning_verdict.

The planner plans on part A of a window and calls its verdict on part B; the bench then looks at the
window after B. Every start point of every trace is judged twice. The first time the current
placement is the one that engines start with, as in observe mode: this is easy, since most plans
then save a lot. The second time it is the one that earlier recommendations led to, as under a
controller that follows its verdicts: this is hard, since the remaining gain is about as large as
the noise of a window.

A call is right if it predicts the sign of the gain of the window after B, less the price of the
copies over a lifetime. Every other trace, by name, belongs to the checking half: rules are chosen
on one half and checked on the other. Points without a plan to judge are counted separately.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.dispatch_traces import TRACES, Recorded, read_all
from bench.report import Row, write_report
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.cycle import (
    CycleInputs,
    change_of,
    judge_target,
    plan_target,
    split_window,
)
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import Call, Verdict, held_out_steps
from evenkeel_moe.planning.policies.registry import warm_kernels
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import count_moves

POINTS = 16
"""Start points of a trace, evenly spaced; their windows overlap."""
WINDOW = {"prefill": 96, "decode": 144}
"""Steps of a window, at most half of the trace."""
COPY_COST, LIFETIME = 200.0, 1000
"""Tokens that a copy costs, and steps that a placement lasts: the controller's defaults."""


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """The call of one verdict and the gain that followed."""

    call: Call | None
    """None if the policy proposed nothing."""
    realised: float
    """The net gain of the steps after B, copies paid, as a share of their time."""

    @property
    def called(self) -> bool:
        return self.call in (Call.RECOMMEND, Call.NOT_NOW)

    @property
    def right(self) -> bool:
        return self.called and (self.call is Call.RECOMMEND) == (self.realised > 0)


@dataclass(frozen=True, slots=True)
class Point(JudgedCall):
    """One start point of a trace."""

    trace: str
    checking: bool
    followed: bool
    """True if earlier verdicts led to the current placement; False if it is the initial one."""


def windows_of(name: str, steps: int, points: int) -> list[slice]:
    """Return the windows of a trace, evenly spaced; steps to score on follow each."""
    window = min(WINDOW["prefill" if "prefill" in name else "decode"], steps // 2)
    later = held_out_steps(window, int(GateSettings().min_held_out_steps))
    ends = np.unique(np.linspace(window, steps - later, points).astype(int)).tolist()
    return [slice(end - window, end) for end in ends]


def judge(
    load: NDArray[np.int64],
    window: slice,
    current: Placement,
    shape: ModelShape,
    policy: str,
    objective: Objective,
) -> tuple[Verdict | None, float, int, Placement]:
    """Let a policy plan on a window, and score its plan on the steps after it.

    Args:
        load: (T, L, E) [tokens].
        window: of the load.
        current: placement.
        shape: of the fleet.
        policy: its name.
        objective: without the price of copies.

    Returns:
        (verdict on the plan, its net gain that followed, its copies, its placement).
    """
    inputs = CycleInputs(
        load=load[window].astype(np.uint32),
        shape=shape,
        topology=Topology.single_node(shape.num_ranks),
        current=current,
        policy=policy,
        settings=GateSettings(),
        staging_bytes=(1 << 30,) * shape.num_ranks,
        now_unix=0.0,
        mode=Mode.OBSERVE,
        ranks_fresh=shape.num_ranks,
        newest_step_age_s=0.0,
        objective=replace(objective, copy_cost=COPY_COST, lifetime_steps=LIFETIME),
    )
    split = split_window(inputs, change_of(inputs))
    target, _ = plan_target(inputs, split)
    copies = count_moves(current, target)
    verdict, _ = judge_target(inputs, target, split)
    if verdict is None:
        return None, 0.0, copies, target
    after = load[window.stop :][: verdict.steps].astype(np.float64)
    cost, tokens = inputs.objective.cost, inputs.token_split
    old = moe_time.step_times(after, current, cost, tokens).sum(axis=1)
    new = moe_time.step_times(after, target, cost, tokens).sum(axis=1)
    realised = float((old - new).mean() - COPY_COST * copies / LIFETIME) / float(old.mean())
    return verdict, realised, copies, target


def _judge(
    trace: Recorded, window: slice, current: Placement, *, checking: bool, followed: bool
) -> tuple[Point, Placement]:
    """Return one point, and the placement of a controller that followed its verdict."""
    shape, objective = trace.shape(), Objective()
    verdict, realised, copies, target = judge(trace.load, window, current, shape, "keel", objective)
    if copies == 0:
        return Point(None, 0.0, trace.name, checking, followed), current
    assert verdict is not None
    point = Point(verdict.call, realised, trace.name, checking, followed)
    return point, target if verdict.call is Call.RECOMMEND else current


def points_of(trace: Recorded, *, checking: bool) -> Iterator[Point]:
    """Yield every point of a trace, under both placements."""
    initial = followed = Placement.initial(trace.shape())
    for index, window in enumerate(windows_of(trace.name, len(trace.load), POINTS)):
        point, left = _judge(trace, window, initial, checking=checking, followed=False)
        yield point
        if index == 0:
            # No verdict was followed yet, so the second point would equal the first.
            followed = left
            continue
        point, followed = _judge(trace, window, followed, checking=checking, followed=True)
        yield point


def _shares(name: str, points: list[Point]) -> list[Row]:
    """Return the rows of a group; a share of zero points has no row."""
    judged = [point for point in points if point.call is not None]
    called = [point for point in judged if point.called]
    rows = [
        Row(f"{name}_points", len(judged), "points"),
        Row(f"{name}_without_plan", len(points) - len(judged), "points"),
    ]
    if judged:
        rows.append(Row(f"{name}_called_share", len(called) / len(judged), "1"))
    if called:
        rows.append(
            Row(f"{name}_right_share", sum(point.right for point in called) / len(called), "1")
        )
    return rows


def verdict_rows(traces: Path = TRACES) -> list[Row]:
    """Return all rows; without recorded traces, print a message and return none."""
    if not traces.is_dir():
        print(
            f"no verdict rows: no recorded traces at {traces}; name their folder in EVENKEEL_TRACES"
        )
        return []
    points: list[Point] = []
    for index, trace in enumerate(read_all(traces)):
        points += points_of(trace, checking=index % 2 == 1)
        print(f"{trace.name}: {len(points)} points so far", flush=True)
    found = _shares("verdict", points)
    for name, wanted in (
        ("tuning", [p for p in points if not p.checking]),
        ("checking", [p for p in points if p.checking]),
        ("initial", [p for p in points if not p.followed]),
        ("followed", [p for p in points if p.followed]),
    ):
        found += _shares(f"verdict_{name}", wanted)
    for name in dict.fromkeys(point.trace for point in points):
        found += _shares(f"verdict_{name}", [p for p in points if p.trace == name])
    return found


def main() -> None:
    """Judge every trace and write the report."""
    warm_kernels()
    write_report("planning_verdict", verdict_rows(), ("numpy", "numba"))


if __name__ == "__main__":
    main()
