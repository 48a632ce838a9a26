"""Measures how soon the control loop answers a change of traffic: python -m bench.regret [CASE].

Regret is the predicted MoE time above a plan that knew the new traffic, summed from the change to
the end of that traffic, as a share of the time of that plan. The plan that knew is keel's, from the
placement that keel's loop had in force at the change. To be fair to the loop, it is scored on steps
that it was not made on either: the steps after a change are cut into four parts, and each part is
scored under the plan made on the other three.

At a step, the excess left is the time of the placement in force above the plan that knew, on the
steps from then on, divided by the same excess of the placement in force at the change. A half and a
tenth are reached at the first plan that leaves no more than that. If none does, the steps to the
end of that traffic count: a lower bound.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.dispatch_traces import TRACES
from bench.planning_walk import FLEETS
from bench.regret_loop import EWMA, OBJECTIVE, Course, Pace, run_loop
from bench.report import Row, print_parts
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.registry import warm_kernels
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

POLICIES = ("keel", "eplb", EWMA)
PARTS = 4
"""Parts of the steps after a change; the plan that knew is made on all but one."""
STEADY_FROM = 128
"""Step of steady traffic from which its time and copies count: the first plans are made by then."""

PACE = Pace(step_s=0.25, cycle_steps=8, delay_steps=4)
"""A cycle every 2 s, as by default, on an engine that makes four steps a second."""
SHORT = Pace(
    step_s=1.0,
    cycle_steps=2,
    delay_steps=1,
    window_steps=64,
    recent_steps=8,
    thresholds={"min_window_steps": 16, "min_held_out_steps": 4},
)
"""For traffic that changes every 16 steps: all numbers of steps are a quarter of the defaults."""


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """Recorded traffic with changes at known steps."""

    name: str
    load: NDArray[np.float64]
    """(T, L, E) [tokens]."""
    changes: tuple[int, ...]
    """First step of each new traffic, rising; none if the traffic is steady."""
    pace: Pace


def cases(folder: Path = TRACES) -> Iterator[Case]:
    """Yield traffic that changes, then steady traffic.

    Two recordings of one model in sequence are traffic that changes from one step to the next.
    Within `decode_abrupt` and V2-Lite's decode, sequences of the old traffic still run to their
    end, so the change is spread over up to a hundred steps.
    """

    def load(name: str) -> NDArray[np.float64]:
        return np.load(folder / f"{name}.npz")["T"].astype(np.float64)

    yield Case("A_prefill_abrupt", load("A_prefill_abrupt"), (134, 267), PACE)
    yield Case("A_decode_abrupt", load("A_decode_abrupt"), (134, 267), PACE)
    for old, new, pace in (
        ("A_prefill_mixed", "A_prefill_py", PACE),
        ("A_prefill_mixed", "A_prefill_de", PACE),
        ("A_decode_mixed", "A_decode_py", PACE),
        ("A_decode_mixed", "A_decode_de", PACE),
    ):
        before = load(old)[-pace.window_steps :]
        joined = np.concatenate([before, load(new)])
        yield Case(f"{old}_then_{new.rpartition('_')[2]}", joined, (len(before),), pace)
    before = load("dsv2lite_decode_mixed")[-PACE.window_steps :]
    intent = load("dsv2lite_decode_phased")[:INTENT_STEPS]
    joined = np.concatenate([before, intent])
    yield Case("dsv2lite_decode_mixed_then_intent", joined, (len(before),), PACE)
    yield Case("dsv2lite_prefill_phased", load("dsv2lite_prefill_phased"), (19, 35, 51), SHORT)
    for name in STEADY:
        yield Case(name, load(name), (), SHORT if "dsv2lite_prefill" in name else PACE)


INTENT_STEPS = 160
"""First steps of V2-Lite's decode in phases, which serve one task."""
STEADY = (
    "A_prefill_mixed",
    "A_decode_mixed",
    "A_decode_slow",
    "A_prefill_slow",
    "A_burst_diurnal",
    "dsv2lite_decode_mixed",
    "dsv2lite_prefill_mixed",
)


def told_times(
    load: NDArray[np.float64], shape: ModelShape, current: Placement
) -> NDArray[np.float64]:
    """Return the (T,) times of each step under a plan that knew all steps but its own part."""
    times = np.empty(len(load))
    edges = np.linspace(0, len(load), PARTS + 1).round().astype(int)
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        others = np.concatenate([load[:first], load[last:]])
        topology = Topology.single_node(shape.num_ranks)
        problem = PlacementProblem(others, shape, topology, current=current, objective=OBJECTIVE)
        placement = plan_keel(problem).placement
        times[first:last] = moe_time.step_times(load[first:last], placement).sum(axis=1)
    return times


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the loop to one change."""

    steps: int
    """Steps from the change to the end of that traffic."""
    told: float
    """Time of the plan that knew [tokens]."""
    regret: float
    """Time of the loop above it [tokens]."""
    to_half: int | None
    """Steps from the change to half of the excess; None if never reached."""
    to_tenth: int | None
    copies: int
    """Experts copied in plans that took effect in these steps."""


def answer_of(
    case: Case, course: Course, told: NDArray[np.float64], first: int, last: int
) -> Answer:
    """Return how the loop answered the change at step `first`; that traffic ends before `last`."""
    load = case.load[first:last]
    old = moe_time.step_times(load, course.in_force(first)).sum(axis=1) - told
    reached: dict[float, int] = {}
    copies = 0
    for step, placement, moved in zip(course.steps, course.placements, course.copies, strict=True):
        if not first < step < last:
            continue
        copies += moved
        since = step - first
        left = moe_time.step_times(load[since:], placement).sum() - told[since:].sum()
        for share in (0.5, 0.1):
            if share not in reached and left <= share * old[since:].sum():
                reached[share] = since
    return Answer(
        steps=last - first,
        told=float(told.sum()),
        regret=float(course.times[first:last].sum() - told.sum()),
        to_half=reached.get(0.5),
        to_tenth=reached.get(0.1),
        copies=copies,
    )


def _changing_rows(case: Case, shape: ModelShape, size: str) -> list[Row]:
    edges = [*case.changes, len(case.load)]
    spans = list(zip(edges[:-1], edges[1:], strict=True))
    courses = {name: run_loop(case.load, shape, name, case.pace) for name in POLICIES}
    told = [
        told_times(case.load[first:last], shape, courses["keel"].in_force(first))
        for first, last in spans
    ]
    rows = []
    for policy, course in courses.items():
        answers = [
            answer_of(case, course, known, first, last)
            for known, (first, last) in zip(told, spans, strict=True)
        ]
        name = f"regret_{case.name}_{size}_{policy}"
        rows.append(
            Row(f"{name}_share", sum(a.regret for a in answers) / sum(a.told for a in answers), "1")
        )
        for level in ("half", "tenth"):
            took = [getattr(answer, f"to_{level}") for answer in answers]
            counted = [a.steps if t is None else t for a, t in zip(answers, took, strict=True)]
            rows += [
                Row(f"{name}_steps_to_{level}", float(np.mean(counted)), "steps"),
                Row(f"{name}_{level}_never", took.count(None), "changes"),
            ]
        layers = case.load.shape[1]
        copies = sum(answer.copies for answer in answers) / layers / len(answers)
        rows.append(Row(f"{name}_copies", copies, "copies/layer"))
    return rows


def _steady_rows(case: Case, shape: ModelShape, size: str) -> list[Row]:
    course = run_loop(case.load, shape, "keel", case.pace)
    first = STEADY_FROM if case.pace is PACE else STEADY_FROM // 4
    fluid = moe_time.fluid_times(case.load[first:], shape.num_ranks).sum()
    moved = [n for step, n in zip(course.steps, course.copies, strict=True) if step >= first]
    name = f"steady_{case.name}_{size}_keel"
    return [
        Row(f"{name}_time_over_fluid", float(course.times[first:].sum() / fluid), "ratio"),
        Row(f"{name}_copies", sum(moved) / case.load.shape[1], "copies/layer"),
        Row(f"{name}_plans", len(moved), "plans"),
    ]


def regret_rows(
    names: list[str], fleets: tuple[tuple[int, int], ...] = FLEETS
) -> Iterator[list[Row]]:
    """Yield the rows of each case and fleet; without recorded traces, print so and yield none."""
    if not any(TRACES.glob("*.npz")):
        print(
            f"no regret rows: no recorded traces at {TRACES}; name their folder in EVENKEEL_TRACES"
        )
        return
    for ranks, slots in fleets:
        for case in cases():
            if names and not any(name in case.name for name in names):
                continue
            _, layers, experts = case.load.shape
            shape = ModelShape(layers, experts, ranks, slots // ranks, 1, 1)
            rows = _changing_rows if case.changes else _steady_rows
            yield rows(case, shape, f"{ranks}x{slots}")


def main() -> None:
    """Run every case, or those whose name contains one of the given words."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE")
    names = parser.parse_args().names
    warm_kernels()
    print_parts("regret", regret_rows(names))


if __name__ == "__main__":
    main()
