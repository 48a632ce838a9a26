"""A cycle tells the verdict about the steps before the cut as well as those after it."""

import numpy as np
import pytest

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.cycle import CycleInputs, WindowSplit, judge_target
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import VerdictRules, judge
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.signals.change_detection import Change

SHAPE = ModelShape(2, 8, 4, 3, 2, 1000)
CUT = 32


def times(load, placement):
    return moe_time.step_times(load, placement).sum(axis=1)


@pytest.mark.parametrize("begin", [0, 12])
def test_the_verdict_knows_the_steps_planned_on_since_the_change(begin):
    mean = np.full((2, 8), 20.0)
    mean[:, :2] = 150.0
    load = np.random.default_rng(0).poisson(mean, (48, 2, 8)).astype(np.uint32)
    load[:begin] = load[:begin, :, ::-1]
    current = Placement.initial(SHAPE)
    target = Placement(np.roll(current.phy2log, 1, axis=1), 4, 8)
    verdict, _ = judge_target(
        CycleInputs(
            load=load,
            shape=SHAPE,
            topology=Topology.single_node(4),
            current=current,
            policy="eplb",
            settings=GateSettings(),
            staging_bytes=(4000,) * 4,
            now_unix=0.0,
            mode=Mode.AUTO,
            ranks_fresh=4,
            newest_step_age_s=0.0,
        ),
        target,
        WindowSplit(begin, CUT, Change(begin, 0.0)),
    )
    assert verdict is not None
    planned, later = load[begin:CUT], load[CUT:]
    wanted = judge(
        times(later, current),
        times(later, target),
        planned_on=(times(planned, current), times(planned, target)),
        copy_cost=verdict.copy_cost,
        rules=VerdictRules(few_steps=16),
    )
    assert (verdict.gain, verdict.gain_lower) == (wanted.gain, wanted.gain_lower)
    alone = judge(times(later, current), times(later, target))
    assert verdict.gain_lower < alone.gain_lower
