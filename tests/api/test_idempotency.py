"""`Idempotency-Key` becomes the id of a plan or rollback: a repetition finds the same one."""

from tests.api.fakes import make_operations

PLANS = "/v1/deployments/demo/plans"
ROLLBACK = "/v1/deployments/demo/rollback"
KEY = "k-1"


async def plan_id(client, path, **body):
    """Return the id of the plan that a request with the key makes."""
    answer = await client.post(path, json=body, headers={"Idempotency-Key": KEY})
    assert answer.is_success and answer.headers["location"].startswith(f"{PLANS}/")
    return answer.headers["location"].removeprefix(f"{PLANS}/")


async def test_a_plan_has_the_id_in_the_body_or_else_the_key(client):
    assert await plan_id(client, PLANS) == KEY
    assert await plan_id(client, PLANS, plan_id="mine") == "mine"


async def test_a_rollback_has_the_id_in_the_body_or_else_one_by_key_and_token(client, admin, app):
    """Without an id, the placement before the last plan would be another one after a rollback."""
    assert await plan_id(client, ROLLBACK, plan_id="mine") == "mine"
    first = await plan_id(client, ROLLBACK)
    # A plan may still use the key as its id.
    assert first not in (KEY, await plan_id(admin, ROLLBACK))
    app.state.operations = make_operations()  # As after a restart.
    assert await plan_id(client, ROLLBACK, to_epoch=2) == first
