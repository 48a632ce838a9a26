"""The audit rows of requests for changes."""

import asyncio
import json

import pytest

from evenkeel_moe.model.placement import Placement
from tests.api.conftest import assert_problem, make_client
from tests.api.fakes import SHAPE

PLANS = "/v1/deployments/demo/plans"


async def test_every_request_for_a_change_is_recorded_with_its_outcome(
    app, client, reader, operations
):
    await reader.post("/v1/deployments/demo/resume")
    await client.post(PLANS, json={"plan_id": "p"}, headers={"Idempotency-Key": "k"})
    await client.post(PLANS, json={"limits": 3})
    await client.get(PLANS)
    await client.patch("/v1/nothing")
    async with make_client(app, "unknown-token-0123") as unknown:
        await unknown.post(PLANS, json={})
    rows = [
        (row["by"], row["role"], row["method"], row["path"], row["status"], row["deployment"])
        for row in reversed(operations.rows)
    ]
    assert rows == [
        ("bob", "read", "POST", "/v1/deployments/demo/resume", 403, "demo"),
        ("alice", "operate", "POST", PLANS, 201, "demo"),
        ("alice", "operate", "POST", PLANS, 422, "demo"),
        ("alice", "operate", "PATCH", "/v1/nothing", 404, None),
    ]
    assert [row["idempotency_key"] for row in reversed(operations.rows)] == [None, "k", None, None]


async def test_a_request_is_recorded_with_what_it_asked_for(client, operations):
    path = "/v1/deployments/demo/policy"
    await client.patch(path, json={"mode": "observe", "thresholds": {"plan_below": 0.8}})
    await client.patch(path, json={"limits": {"max_moves": 3}})
    await client.patch(path, json={"shadow_policies": ["x" * 60] * 5})
    await client.post("/v1/deployments/demo/freeze", json={"seconds": 1})
    rows = (await client.get("/v1/deployments/demo/audit")).json()["items"]
    assert [(row["status"] < 400, row["change"]) for row in reversed(rows)] == [
        (True, '{"mode":"observe","thresholds":{"plan_below":0.8}}'),
        (False, '{"limits":{"max_moves":3}}'),
        (True, f'{{"shadow_policies":{["x" * 60] * 5}'.replace("'", '"').replace(" ", "")[:256]),
        (True, '{"seconds":1.0}'),
    ]


async def test_requests_about_plans_are_recorded_with_what_they_asked_for(client, operations):
    target = Placement.initial(SHAPE)
    limits = {"max_moves": 8}
    await client.post(PLANS, json={"plan_id": "a", "limits": limits})
    rows = target.phy2log.tolist()
    await client.post(PLANS, json={"plan_id": "b", "target": {"physical_to_logical": rows}})
    await client.post(f"{PLANS}/a/approve")
    await client.post("/v1/deployments/demo/rollback")
    await client.post("/v1/deployments/demo/rollback", json={"plan_id": "c", "to_epoch": 1})
    page = (await client.get("/v1/deployments/demo/audit")).json()["items"]
    undone = (await client.get(PLANS)).json()["items"][1]["plan_id"]
    assert [row["change"] and json.loads(row["change"]) for row in reversed(page)] == [
        {"plan_id": "a", "limits": limits},
        {"plan_id": "b", "target": target.digest},
        None,
        {"plan_id": undone},
        {"plan_id": "c", "to_epoch": 1},
    ]


async def test_an_internal_error_is_recorded_as_500(client, operations):
    operations.error = ZeroDivisionError("1 / 0")
    assert_problem(await client.post("/v1/deployments/demo/resume"), 500)
    assert [row["status"] for row in operations.rows] == [500]


@pytest.mark.fault(
    "an operator whose change was interrupted by a shutdown", "found no audit row of it"
)
async def test_a_change_that_is_interrupted_is_recorded_too(client, operations, monkeypatch):
    begun = asyncio.Event()

    async def resume(*_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(operations, "resume", resume)
    asking = asyncio.create_task(client.post("/v1/deployments/demo/resume"))
    await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    assert [row["status"] for row in operations.rows] == [500]


async def test_the_audit_rows_are_read_in_pages(client, operations):
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
