"""Rollbacks: their limits, and the placements to which they lead."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    Reason,
    ShapeMismatch,
)
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.ports.operations import RollbackRequest
from tests.controller.cycles.manual_rig import BACK, rollback
from tests.protocol.machines import AFTER_ONE, BASE, DEPLOYMENT
from tests.waiting import until


@pytest.mark.parametrize("limits", [{"max_moves": 0}, {"max_bytes": 0}, {"max_layers": 0}])
async def test_a_rollback_keeps_the_limits_of_the_policy_unless_an_admin_asks(rig, limits):
    await rig.migrate()
    await rig.operations.set_policy(DEPLOYMENT, {"limits": limits}, "me")
    with pytest.raises(
        Conflict, match=f"needs 1.*{next(iter(limits))} of the policy is 0"
    ) as error:
        await rollback(rig)
    assert error.value.reason is Reason.LIMIT_EXCEEDED
    await rig.look_on()
    assert rig.ranks.maps == [BASE, AFTER_ONE]
    await rig.operations.rollback(DEPLOYMENT, RollbackRequest(BACK, bounded=False))
    await until(lambda: rig.ranks.placement == BASE)


async def test_a_group_that_began_again_returns_to_a_placement_of_its_former_history(rig):
    """The group starts cold, and the operator wants the placement that plans had led to."""
    await rig.migrate()
    rig.ranks.start_cold()
    await rig.restart()
    assert rig.ranks.placement == BASE
    rows = [
        (row.epoch, row.placement, row.replaced) for row in await rig.operations.epochs(DEPLOYMENT)
    ]
    assert rows == [(0, BASE, False), (1, AFTER_ONE, True)]
    with pytest.raises(NotFound, match="no placement of epoch 1 is recorded"):
        await rollback(rig, Epoch(1))
    back = RollbackRequest(BACK, to_placement=AFTER_ONE.digest)
    await rig.operations.rollback(DEPLOYMENT, back)
    await until(lambda: rig.ranks.placement == AFTER_ONE)
    await rig.at_rest()
    assert (await rig.operations.rollback(DEPLOYMENT, back)).phase is PlanPhase.COMMITTED
    with pytest.raises(Conflict) as caught:
        await rig.operations.rollback(DEPLOYMENT, replace(back, to_placement=BASE.digest))
    assert caught.value.reason is Reason.ID_REUSED


async def test_a_rollback_to_a_placement_that_does_not_fit_is_refused(rig):
    other = Placement(np.zeros((1, 2), np.int32), 2, 1)
    rig.store._replaced[DEPLOYMENT] = [(Epoch(4), other)]
    for asked, error, words in (
        (RollbackRequest(to_placement=other.digest), ShapeMismatch, "the group is"),
        (RollbackRequest(to_placement="0" * 32), NotFound, "no placement 0000"),
        (RollbackRequest(to_epoch=Epoch(0), to_placement=BASE.digest), InvalidInput, "name one"),
        (RollbackRequest(to_placement=BASE.digest), Conflict, "the present one"),
    ):
        with pytest.raises(error, match=words):
            await rig.operations.rollback(DEPLOYMENT, asked)
