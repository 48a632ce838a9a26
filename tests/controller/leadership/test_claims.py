"""A new deployment leaves nothing in the store until it is claimed."""

import pytest

from evenkeel_moe.errors import Conflict, Reason
from evenkeel_moe.ports.stores import Lease
from tests.controller.leadership.conftest import DEMO


async def test_a_new_deployment_is_listed_once_it_is_claimed(rig):
    keeper = rig.start("a", lasting=False)
    await keeper.decided(5)
    await rig.after("renew_lease", 1)
    assert not keeper.lasting and await rig.store.deployments() == []
    await keeper.claim()
    assert keeper.lasting and await rig.store.deployments() == [DEMO]
    asked = rig.calls["renew_lease"]
    await keeper.claim()
    assert rig.calls["renew_lease"] == asked, "it is claimed already"


@pytest.mark.parametrize("held", [False, True])
async def test_a_deployment_that_another_replica_leads_cannot_be_claimed(rig, held):
    keeper = rig.keeper("a", lasting=False)
    if held:
        keeper.lease = Lease("a", 1, False)
    with pytest.raises(Conflict, match="demo: another replica leads") as caught:
        await keeper.claim()
    assert caught.value.reason is Reason.LEASE_LOST
    assert not keeper.lasting


@pytest.mark.parametrize(
    "lasting, forget, next_term", [(False, True, 1), (False, False, 2), (True, True, 2)]
)
async def test_a_released_lease_is_free_and_a_new_deployment_can_be_forgotten(
    rig, lasting, forget, next_term
):
    keeper = rig.start("a", lasting=lasting)
    await keeper.decided(5)
    keeper.want = lambda: None
    keeper._wanted.clear()
    await keeper.release(forget=forget)
    assert not keeper.leading and ("lost", "a") not in rig.happened
    assert await rig.store.acquire_lease(DEMO, "b", 60.0, 0) == Lease("b", next_term)
    await keeper.release(forget=forget)
    assert rig.calls["release_lease"] + rig.calls["drop_lease"] == 1


async def test_a_deployment_with_records_is_claimed_already(rig):
    await rig.store.store_document(DEMO, "policy", {}, 1)
    keeper = rig.start("a", lasting=False)
    await keeper.decided(5)
    assert keeper.leading and keeper.lasting
