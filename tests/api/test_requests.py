"""Middleware of every request: size limits, idempotency keys and audit."""

import asyncio
import json

import pytest

from evenkeel_moe.api import create_app
from evenkeel_moe.api.bodies import MAX_BODY_BYTES
from evenkeel_moe.api.idempotency import Idempotency
from evenkeel_moe.errors import Conflict, Unavailable
from tests.api.conftest import ADMIN, OPERATE, READ, TOKENS, assert_problem, make_client

PLANS = "/v1/deployments/demo/plans"
ROLLBACK = "/v1/deployments/demo/rollback"


# --- size -------------------------------------------------------------------------------------


async def test_a_body_over_the_limit_is_413_with_and_without_content_length(operations):
    app = create_app(operations, TOKENS, max_body_bytes=1000)

    async def drip():
        for _ in range(11):
            yield b" " * 100

    async with make_client(app) as client:
        body = assert_problem(await client.post(PLANS, content=b" " * 1001), 413, "limit_exceeded")
        assert "1000 bytes" in body["detail"]
        assert_problem(await client.post(PLANS, content=drip()), 413)
        json_type = {"Content-Type": "application/json"}
        fits = json.dumps({"plan_id": "p"}).encode().ljust(1000)
        assert (await client.post(PLANS, content=fits, headers=json_type)).status_code == 202
        for length in ("1001", "9" * 4301):
            assert_problem(
                await client.post(PLANS, content=b"{}", headers={"Content-Length": length}), 413
            )
        padded = {**json_type, "Content-Length": "2".rjust(4301, "0")}
        assert (await client.post(PLANS, content=b"{}", headers=padded)).status_code == 202
    async with make_client(app, None) as client:
        assert_problem(await client.post(PLANS, content=b" " * 1001), 401)
    assert len(operations.calls) == 2


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_a_request_with_an_incomplete_body_is_ignored(app, operations, key):
    """A rollback without its body would be another rollback."""
    messages = [
        {"type": "http.request", "body": b"", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", f"Bearer {OPERATE}".encode()), (b"content-length", b"14")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": ROLLBACK,
        "raw_path": ROLLBACK.encode(),
        "query_string": b"",
        "headers": headers if key is None else [*headers, (b"idempotency-key", key.encode())],
    }
    await app(scope, receive, send)
    assert operations.calls == []
    assert sent == []


def test_the_largest_target_fits():
    rows = [[-1] * (320 * 9)] * 61
    assert len(json.dumps({"target": {"physical_to_logical": rows}})) < MAX_BODY_BYTES / 4


# --- idempotency keys --------------------------------------------------------------------------


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

    operations.kept_answer = away
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

    async def slow(*arguments):
        entered.set()
        await leave.wait()
        return await rollback(*arguments)

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
    """Return an application that responds with the number of the call and 100 bytes."""

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


# --- audit ------------------------------------------------------------------------------------


async def test_every_request_for_a_change_is_recorded_with_its_outcome(app, operations):
    async with make_client(app, READ) as client:
        await client.post("/v1/deployments/demo/resume")
    async with make_client(app, OPERATE) as client:
        await client.post(PLANS, json={"plan_id": "p"}, headers={"Idempotency-Key": "k"})
        await client.post(PLANS, json={"limits": 3})
        await client.get(PLANS)
        await client.patch("/v1/nothing")
    async with make_client(app, "unknown-token-0123") as client:
        await client.post(PLANS, json={})
    rows = [
        (row["by"], row["role"], row["method"], row["path"], row["status"], row["deployment"])
        for row in reversed(operations.rows)
    ]
    assert rows == [
        ("bob", "read", "POST", "/v1/deployments/demo/resume", 403, "demo"),
        ("alice", "operate", "POST", PLANS, 202, "demo"),
        ("alice", "operate", "POST", PLANS, 422, "demo"),
        ("alice", "operate", "PATCH", "/v1/nothing", 404, None),
    ]
    assert [row["idempotency_key"] for row in reversed(operations.rows)] == [None, "k", None, None]


async def test_an_internal_error_is_recorded_as_500(app, operations):
    operations.error = ZeroDivisionError("1 / 0")
    async with make_client(app) as client:
        assert_problem(await client.post("/v1/deployments/demo/resume"), 500)
    assert [row["status"] for row in operations.rows] == [500]


async def test_the_audit_rows_are_read_in_pages(app, operations):
    async with make_client(app) as client:
        for seconds in range(5):
            await client.post("/v1/deployments/demo/freeze", json={"seconds": seconds})
        await client.post("/v1/deployments/fresh/resume")
        first = (await client.get("/v1/deployments/demo/audit", params={"page_size": 3})).json()
        token = first["next_page_token"]
        rest = await client.get(
            "/v1/deployments/demo/audit", params={"page_size": 3, "page_token": token}
        )
        everything = (await client.get("/v1/audit")).json()
    seen = first["items"] + rest.json()["items"]
    assert [row["id"] for row in seen] == [f"{n:04x}" for n in (4, 3, 2, 1, 0)]
    assert rest.json()["next_page_token"] is None
    assert [row["deployment"] for row in everything["items"]] == ["fresh"] + ["demo"] * 5
