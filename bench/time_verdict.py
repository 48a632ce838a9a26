"""Checks what the verdict says of plans under the roofline against the steps that follow.

As in `bench.planning_verdict`, a policy plans on part A of a window, the verdict judges its plan on
part B, and the plan is then scored on as many steps after B, which nobody has seen. The first plan
of a trace starts from the placement of the engines, the others from the one to which earlier
recommendations led. Plans are those of EPLB, which does not know what reading costs, and of keel.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.planning_verdict import JudgedCall, judge, windows_of
from bench.planning_walk import Case
from bench.report import Row
from bench.time_models import roofline
from evenkeel_moe.formats import Trace
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.verdict import Call
from evenkeel_moe.planning.problem.objective import Objective

POLICIES = ("eplb", "keel")
POINTS = 4
"""Plans of a trace, policy and cost model, at evenly spaced steps."""


@dataclass(frozen=True, slots=True)
class _Judged(JudgedCall):
    """One plan of the walks."""

    name: str
    policy: str
    promised: float

    @property
    def cost_time(self) -> bool:
        return self.call is Call.RECOMMEND and self.realised <= 0


def _judged(
    trace: Trace, ranks: int, slots: int, policy: str, name: str, objective: Objective
) -> Iterator[_Judged]:
    """Judge the plans of one policy at every point of a trace."""
    shape = ModelShape(
        trace.num_layers, trace.num_experts, ranks, slots // ranks, trace.top_k or 1, 1
    )
    current = Placement.initial(shape)
    for window in windows_of(trace.name, trace.num_steps, POINTS):
        verdict, realised, _, target = judge(
            trace.counts, window, current, shape, policy, objective
        )
        if verdict is None or (target.phy2log == current.phy2log).all():
            continue
        at = f"{name}_step{window.stop}"
        yield _Judged(verdict.call, realised, at, policy, verdict.net_gain)
        if verdict.call is Call.RECOMMEND:
            current = target


def verdict_rows(
    cases: list[Case],
    reads: tuple[float, ...],
    dispatches: tuple[DispatchModel, ...],
) -> list[Row]:
    """Return the shares over all traces, fleets and cost models; print every wrong verdict."""
    found: list[_Judged] = []
    for trace, ranks, slots in cases:
        for reading in reads:
            for dispatch in dispatches:
                mean = float(trace.counts.mean())
                objective = roofline(mean, reading, dispatch, trace.top_k or 1)
                name = f"{trace.name}_{ranks}x{slots}_k{reading:g}_{dispatch}"
                for policy in POLICIES:
                    found += _judged(trace, ranks, slots, policy, name, objective)
        called = [one for one in found if one.called]
        print(
            f"verdict: {trace.name} {ranks}x{slots}: {len(found)} plans so far,"
            f" {len(called)} called, {sum(one.right for one in called)} right",
            flush=True,
        )
    for one in found:
        if one.called and not one.right:
            print(
                f"wrong: {one.name} {one.policy}: {one.call}, promised {one.promised:.4f},"
                f" realised {one.realised:.4f}",
                flush=True,
            )
    rows = _shares("verdict", found)
    for policy in POLICIES:
        rows += _shares(f"verdict_{policy}", [one for one in found if one.policy == policy])
    return rows


def _shares(name: str, found: list[_Judged]) -> list[Row]:
    """Return the rows of a group; a share of nothing has no row."""
    called = [one for one in found if one.called]
    rows = [
        Row(f"{name}_plans", len(found), "plans"),
        Row(f"{name}_recommended_and_cost_time", sum(one.cost_time for one in found), "plans"),
    ]
    if called:
        right = sum(one.right for one in called) / len(called)
        rows += [
            Row(f"{name}_called_share", len(called) / len(found), "1"),
            Row(f"{name}_right_share", right, "1"),
        ]
    return rows
