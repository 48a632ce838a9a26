"""`Idempotency-Key`: a plan or a rollback that is asked for again is the same plan."""

from evenkeel_moe.api import create_app
from evenkeel_moe.errors import Conflict
from tests.api.conftest import TOKENS, assert_problem, make_client

PLANS = "/v1/deployments/demo/plans"
ROLLBACK = "/v1/deployments/demo/rollback"
KEY = {"Idempotency-Key": "k-1"}


async def test_a_plan_is_found_by_its_key_after_a_restart(client, operations):
    first = await client.post(PLANS, json={"policy": "gem"}, headers=KEY)
    async with make_client(create_app(operations, TOKENS)) as client:
        again = await client.post(PLANS, json={"policy": "gem"}, headers=KEY)
        assert (again.status_code, again.json()) == (201, first.json())
        assert again.headers["location"] == first.headers["location"]
        assert_problem(
            await client.post(PLANS, json={"policy": "x"}, headers=KEY), 409, "id_reused"
        )
    assert len(operations.records["demo"]) == 1


async def test_a_plan_id_in_the_body_comes_before_the_key(client, operations):
    body = {"plan_id": "mine"}
    first = await client.post(PLANS, json=body, headers=KEY)
    assert (first.status_code, first.json()["plan_id"]) == (201, "mine")
    other = await client.post(PLANS, json=body, headers={"Idempotency-Key": "k-2"})
    assert other.json() == first.json()
    assert len(operations.records["demo"]) == 1
    assert_problem(
        await client.post(PLANS, json={**body, "policy": "gem"}, headers=KEY), 409, "id_reused"
    )


async def test_a_rollback_is_found_by_its_key_and_its_token(client, admin, operations):
    """If it was carried out, the placement before the last plan is now another one."""
    first = await client.post(ROLLBACK, json={}, headers=KEY)
    async with make_client(create_app(operations, TOKENS)) as later:
        again = await later.post(ROLLBACK, json={}, headers=KEY)
    assert (again.status_code, again.json()) == (202, first.json())
    other = await client.post(ROLLBACK, json={"to_epoch": 2}, headers=KEY)
    assert_problem(other, 409, "id_reused")
    assert len(operations.records["demo"]) == 1
    # A plan may still use the key as its id.
    assert (await client.post(PLANS, json={}, headers=KEY)).json()["plan_id"] == "k-1"
    another = await admin.post(ROLLBACK, json={}, headers=KEY)
    assert another.json()["plan_id"] != first.json()["plan_id"]


async def test_a_key_may_be_used_again_after_an_error(client, operations):
    operations.error = Conflict("not now")
    assert_problem(await client.post(ROLLBACK, json={}, headers=KEY), 409)
    operations.error = None
    assert (await client.post(ROLLBACK, json={}, headers=KEY)).status_code == 202
