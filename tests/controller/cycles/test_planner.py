"""Automatic cycles of one deployment."""

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.protocol import control_messages as ctl
from tests.controller.replicas import ONE
from tests.protocol.machines import BASE
from tests.waiting import until


async def test_a_cycle_does_not_wait_while_the_planner_compiles_its_kernels(
    leading_two, monkeypatch
):
    """The machine's deadline for a cycle counted it, and ended the cycle as planner_failed."""
    registry, _, _ = leading_two
    planner, decided = registry.deployments[ONE].planner, []
    monkeypatch.setattr(planner.inbox, "post", decided.append)
    planner.begin_cycle(ctl.RunCycle(7, Epoch(0), BASE, Generation("g1"), 1))
    await until(lambda: decided)
    assert decided == [ctl.CycleDecided(7, Reason.PLANNER_STARTING)]
    assert not planner.pool.warm, "it answered before the kernels were compiled"
