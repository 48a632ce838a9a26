"""`Idempotency-Key`: a repeated request gets the first response again."""

import asyncio

import pytest

from evenkeel_moe.api import create_app
from evenkeel_moe.api.idempotency import Idempotency
from evenkeel_moe.errors import Conflict, Unavailable
from tests.api.conftest import ADMIN, OPERATE, TOKENS, assert_problem, make_client

PLANS = "/v1/deployments/demo/plans"
ROLLBACK = "/v1/deployments/demo/rollback"


async def test_a_key_with_the_same_body_repeats_the_response_and_does_nothing(client, operations):
    headers = {"Idempotency-Key": "k-1"}
    first = await client.post(ROLLBACK, json={"to_epoch": 1}, headers=headers)
    again = await client.post(ROLLBACK, json={"to_epoch": 1}, headers=headers)
    assert first.status_code == again.status_code == 202
    assert (again.content, again.headers["location"]) == (first.content, first.headers["location"])
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert len(operations.calls) == 1
    other = assert_problem(
        await client.post(ROLLBACK, json={"to_epoch": 2}, headers=headers), 422, "id_reused"
    )
    assert other["type"] == "urn:evenkeel:problem:key-reused"
    assert len(operations.calls) == 1


async def test_a_key_beside_a_plan_id_repeats_the_plan_of_that_id(client, operations):
    body, headers = {"plan_id": "mine", "dry_run": True}, {"Idempotency-Key": "k-1"}
    first = await client.post(PLANS, json=body, headers=headers)
    assert (first.status_code, first.json()["plan_id"]) == (201, "mine")
    assert (await client.post(PLANS, json=body, headers=headers)).content == first.content
    # Another key with the same id and body: the plan is found by its id.
    other = await client.post(PLANS, json=body, headers={"Idempotency-Key": "k-2"})
    assert other.json() == first.json()
    assert len(operations.records["demo"]) == 1
    assert_problem(
        await client.post(PLANS, json={**body, "plan_id": "x"}, headers=headers), 422, "id_reused"
    )
    # The plan_id in the body is independent of the key.
    assert_problem(
        await client.post(PLANS, json={"plan_id": "mine", "policy": "gem"}), 409, "id_reused"
    )


async def test_a_plan_is_found_by_its_key_after_a_restart(operations):
    headers = {"Idempotency-Key": "k-1"}
    async with make_client(create_app(operations, TOKENS)) as client:
        first = await client.post(PLANS, json={"policy": "gem"}, headers=headers)
    async with make_client(create_app(operations, TOKENS)) as client:
        again = await client.post(PLANS, json={"policy": "gem"}, headers=headers)
        assert (again.status_code, again.json()) == (202, first.json())
        assert_problem(
            await client.post(PLANS, json={"policy": "x"}, headers=headers), 422, "id_reused"
        )
    # Also without the stored response, because the key is the plan_id.
    operations.answers.clear()
    async with make_client(create_app(operations, TOKENS)) as client:
        assert_problem(
            await client.post(PLANS, json={"policy": "x"}, headers=headers), 409, "id_reused"
        )
        assert (
            await client.post(PLANS, json={"policy": "gem"}, headers=headers)
        ).json() == first.json()
    assert len(operations.records["demo"]) == 1


async def test_after_a_restart_the_repeated_response_has_the_current_plan(
    operations,
):
    """A repeated rollback would undo the first."""
    headers = {"Idempotency-Key": "walnut-7"}
    async with make_client(create_app(operations, TOKENS)) as client:
        first = await client.post(ROLLBACK, json={}, headers=headers)
        frozen = await client.post(
            "/v1/deployments/demo/freeze", json={"seconds": 5}, headers=headers
        )
        assert (first.status_code, frozen.status_code) == (202, 204)
    async with make_client(create_app(operations, TOKENS)) as client:
        again = await client.post(ROLLBACK, json={}, headers=headers)
        assert (again.status_code, again.headers["location"]) == (202, first.headers["location"])
        assert again.headers["idempotent-replayed"] == "true"
        assert again.json()["plan_id"] == first.json()["plan_id"]
        assert_problem(
            await client.post(ROLLBACK, json={"to_epoch": 2}, headers=headers), 422, "id_reused"
        )
        again = await client.post(
            "/v1/deployments/demo/freeze", json={"seconds": 5}, headers=headers
        )
        assert (again.status_code, again.content) == (204, b"")
        assert again.headers["idempotent-replayed"] == "true"
    assert [call[0] for call in operations.calls if call[0] in ("rollback", "freeze")] == [
        "rollback",
        "freeze",
    ]
    # The store has neither key nor token.
    assert "walnut-7" not in str(operations.answers)
    assert "alice" not in str(operations.answers)


async def test_a_rollback_whose_response_was_lost_is_found_by_its_key(operations):
    """If it was carried out, the placement before the last plan is now another one."""
    headers = {"Idempotency-Key": "k-1"}
    async with make_client(create_app(operations, TOKENS)) as client:
        first = await client.post(ROLLBACK, json={}, headers=headers)
    operations.answers.clear()  # 503, or the controller died before it could answer.
    async with make_client(create_app(operations, TOKENS)) as client:
        again = await client.post(ROLLBACK, json={}, headers=headers)
        assert (again.status_code, again.json()) == (202, first.json())
        operations.answers.clear()
    async with make_client(create_app(operations, TOKENS)) as client:
        other = await client.post(ROLLBACK, json={"to_epoch": 2}, headers=headers)
        assert_problem(other, 409, "id_reused")
    assert len(operations.records["demo"]) == 1
    # A plan may still use the key as its id.
    async with make_client(create_app(operations, TOKENS)) as client:
        assert (await client.post(PLANS, json={}, headers=headers)).json()["plan_id"] == "k-1"


async def test_nothing_is_done_while_stored_responses_are_unavailable(client, operations):
    async def away(deployment, name):
        raise Unavailable("the store is out of reach")

    operations.fetch_response = away
    answer = await client.post(ROLLBACK, json={}, headers={"Idempotency-Key": "k-1"})
    assert_problem(answer, 503, "store_unavailable")
    assert answer.headers["retry-after"]
    assert operations.calls == []
    assert (await client.post(ROLLBACK, json={})).status_code == 202


async def test_keys_of_other_tokens_and_paths_are_other_keys(app, operations):
    headers = {"Idempotency-Key": "k-1"}
    for token in (OPERATE, ADMIN):
        async with make_client(app, token) as client:
            assert (await client.post(ROLLBACK, json={}, headers=headers)).status_code == 202
            freeze = await client.post(
                "/v1/deployments/demo/freeze", json={"seconds": 5}, headers=headers
            )
            assert freeze.status_code == 204
    assert [call[0] for call in operations.calls] == ["rollback", "freeze"] * 2


async def test_an_error_is_not_kept(client, operations):
    headers = {"Idempotency-Key": "k-1"}
    operations.error = Conflict("not now")
    assert_problem(await client.post(ROLLBACK, json={}, headers=headers), 409)
    operations.error = None
    assert (await client.post(ROLLBACK, json={}, headers=headers)).status_code == 202


async def test_a_repetition_while_the_first_is_in_progress_must_wait(
    client, operations, monkeypatch
):
    entered, leave = asyncio.Event(), asyncio.Event()
    rollback = operations.rollback

    async def slow(*arguments, **options):
        entered.set()
        await leave.wait()
        return await rollback(*arguments, **options)

    operations.rollback = slow
    headers = {"Idempotency-Key": "k-1"}
    first = asyncio.create_task(client.post(ROLLBACK, json={}, headers=headers))
    await asyncio.wait_for(entered.wait(), 30)
    second = await client.post(ROLLBACK, json={}, headers=headers)
    assert_problem(second, 409, "busy")
    assert_problem(
        await client.post(ROLLBACK, json={"to_epoch": 1}, headers=headers), 422, "id_reused"
    )
    assert second.headers["retry-after"] == "1"
    leave.set()
    assert (await first).status_code == 202
    assert (await client.post(ROLLBACK, json={}, headers=headers)).content == (await first).content
    assert len(operations.calls) == 1


class Counting:
    """An application that responds with the number of the call and 100 bytes."""

    def __init__(self):
        self.calls = 0

    async def __call__(self, scope, receive, send):
        self.calls += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(self.calls).encode().ljust(100)})


@pytest.mark.parametrize("bounds", [{"most_keys": 3}, {"most_bytes": 399}])
async def test_responses_in_memory_are_bounded_by_keys_and_bytes(bounds, operations):
    inner = Counting()
    app = Idempotency(inner, lambda: operations, 1000, **bounds)

    async def post(key):
        sent = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(b"idempotency-key", key.encode())],
            "state": {"token": TOKENS.find(OPERATE)},
        }
        await app(scope, receive, send)
        return int(sent[1]["body"])

    assert [await post(key) for key in "abc"] == [1, 2, 3]
    assert [await post(key) for key in "abc"] == [1, 2, 3]
    assert await post("d") == 4
    assert [await post(key) for key in "bcd"] == [2, 3, 4]
    assert await post("a") == 5
    assert inner.calls == 5
