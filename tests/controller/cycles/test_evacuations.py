"""Evacuations of ranks that retire, and requests for them that are repeated."""

import pytest

from evenkeel_moe.controller.cycles.cycle_inputs import build_evacuation
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.ports.operations import ResizeRequest
from tests.controller.cycles.manual_rig import InlinePlanner
from tests.protocol.machines import AFTER_ONE, BASE, DEPLOYMENT, plan_of
from tests.waiting import until


class Evacuations(InlinePlanner):
    """Calculates for all ranks the evacuation that changes one slot, until it is changed."""

    meanwhile = None
    target = AFTER_ONE

    async def run(self, function, *arguments):
        if function is not build_evacuation:
            return function(*arguments)
        target = self.target
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return arguments[1], target, () if arguments[0].current == target else plan_of(1).waves


@pytest.fixture
def evacuations(rig, monkeypatch):
    """Return the calculation of the rig's evacuations."""
    found = Evacuations()
    monkeypatch.setattr(rig.registry.shared.planner, "run", found.run)
    return found


async def evacuate(rig, rank, plan_id):
    await rig.operations.resize(DEPLOYMENT, ResizeRequest(retire=(rank,), plan_id=PlanId(plan_id)))


async def abort_evacuation(rig, rank, plan_id):
    """Begin an evacuation that the ranks refuse."""
    rig.ranks.ready = False
    await evacuate(rig, rank, plan_id)
    await until(lambda: rig.member.control.records.active is None)
    await rig.at_rest()
    rig.ranks.ready = True


async def test_an_evacuation_that_moved_the_experts_while_its_repetition_was_planned_is_not_refused(
    rig, evacuations
):
    async def first():
        await evacuate(rig, 1, "mine")
        await until(lambda: rig.ranks.placement == AFTER_ONE)
        await rig.at_rest()

    evacuations.meanwhile = first
    await evacuate(rig, 1, "mine")
    await rig.look_on()
    assert rig.ranks.maps == [BASE, AFTER_ONE]


async def test_a_repeated_evacuation_is_not_answered_before_its_first_request_is_stored(
    rig, evacuations
):
    rig.store.failing = 10_000
    for _ in range(2):
        with pytest.raises(Unavailable, match="tried again"):
            await rig.once_the_store_is_asked_again(lambda: evacuate(rig, 1, "mine"))
    rig.store.failing = 0
    await rig.once_the_store_is_asked_again(lambda: evacuate(rig, 1, "mine"))
    assert PlanId("mine") in rig.store._plans[DEPLOYMENT]
    await until(lambda: rig.ranks.placement == AFTER_ONE)


async def test_an_aborted_evacuation_is_not_repeated_under_its_id(rig, evacuations):
    await abort_evacuation(rig, 1, "mine")
    with pytest.raises(Conflict, match="plan mine is aborted.*ranks 1 alone") as caught:
        await evacuate(rig, 1, "mine")
    assert caught.value.reason is Reason.WRONG_PHASE
    await evacuate(rig, 1, "other")
    await until(lambda: rig.ranks.placement == AFTER_ONE)


async def test_an_evacuation_that_is_aborted_while_its_repetition_is_planned_moves_nothing_more(
    rig, evacuations
):
    """The placement has changed meanwhile, and experts still live there alone."""

    async def others():
        await abort_evacuation(rig, 1, "mine")
        await evacuate(rig, 1, "other")
        await until(lambda: rig.ranks.placement == AFTER_ONE)
        await rig.at_rest()
        evacuations.target = BASE

    evacuations.meanwhile = others
    with pytest.raises(Conflict, match="plan mine is aborted.*ranks 1 alone") as caught:
        await evacuate(rig, 1, "mine")
    assert caught.value.reason is Reason.WRONG_PHASE


async def test_while_ranks_retire_others_are_refused_whatever_the_id(rig, evacuations):
    await abort_evacuation(rig, 0, "old")
    await rig.operations.resume(DEPLOYMENT, "me")
    await evacuate(rig, 1, "new")
    await until(lambda: rig.ranks.placement == AFTER_ONE)
    await rig.at_rest()
    for plan_id in ("old", "new"):
        with pytest.raises(Conflict, match=r"ranks \[1\] retire already") as caught:
            await evacuate(rig, 0, plan_id)
        assert caught.value.reason is Reason.RESIZING
