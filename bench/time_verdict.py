"""Checks what the verdict says of plans under the roofline against the steps that follow.

As in `bench.planning_verdict`, a policy plans on part A of a window, the verdict judges its plan on
part B, and the plan is then scored on as many steps after B, which nobody has seen. The first plan
of a trace starts from the placement of the engines, the others from the one to which earlier
recommendations led. Plans are those of EPLB, which does not know what reading costs, and of keel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bench.planning_verdict import COPY_COST, LIFETIME, WINDOW, JudgedCall
from bench.planning_walk import Case
from bench.report import Row
from bench.time_models import roofline
from evenkeel_moe.formats import Trace
from evenkeel_moe.model.dispatch_model import DispatchModel
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
from evenkeel_moe.planning.decision.verdict import Call, held_out_steps
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import count_moves

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


def _judge(inputs: CycleInputs, after: np.ndarray) -> tuple[Call, float, float, Placement] | None:
    """Return call, promised and realised net gain, and target; None without copies or verdict."""
    split = split_window(inputs, change_of(inputs))
    target, _ = plan_target(inputs, split)
    copies = count_moves(inputs.current, target)
    verdict, _ = judge_target(inputs, target, split)
    if verdict is None or (target.phy2log == inputs.current.phy2log).all():
        return None
    later = after[: verdict.steps]
    cost, tokens = inputs.objective.cost, inputs.token_split
    old = moe_time.step_times(later, inputs.current, cost, tokens).sum(axis=1)
    new = moe_time.step_times(later, target, cost, tokens).sum(axis=1)
    realised = float((old - new).mean() - COPY_COST * copies / LIFETIME) / float(old.mean())
    return verdict.call, verdict.net_gain, realised, target


def _judged(
    trace: Trace, ranks: int, slots: int, policy: str, name: str, objective: Objective
) -> Iterator[_Judged]:
    """Judge the plans of one policy at every point of a trace."""
    steps = trace.num_steps
    window = min(WINDOW["prefill" if "prefill" in trace.name else "decode"], steps // 2)
    later = held_out_steps(window, int(GateSettings().min_held_out_steps))
    shape = ModelShape(
        trace.num_layers, trace.num_experts, ranks, slots // ranks, trace.top_k or 1, 1
    )
    current = Placement.initial(shape)
    for last in np.unique(np.linspace(window, steps - later, POINTS).astype(int)).tolist():
        inputs = CycleInputs(
            load=trace.counts[last - window : last].astype(np.uint32),
            shape=shape,
            topology=Topology.single_node(ranks),
            current=current,
            policy=policy,
            settings=GateSettings(),
            staging_bytes=(1 << 30,) * ranks,
            now_unix=0.0,
            mode=Mode.OBSERVE,
            ranks_fresh=ranks,
            newest_step_age_s=0.0,
            objective=replace(objective, copy_cost=COPY_COST, lifetime_steps=LIFETIME),
        )
        found = _judge(inputs, trace.counts[last : last + later].astype(np.float64))
        if found is None:
            continue
        call, promised, realised, target = found
        yield _Judged(call, realised, f"{name}_step{last}", policy, promised)
        if call is Call.RECOMMEND:
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
