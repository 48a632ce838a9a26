"""Large bodies are parsed and validated in a thread, with the same answers as small ones."""

import json
import threading
import tracemalloc

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, field_validator

from evenkeel_moe.api.large_bodies import LARGE_BYTES, LargeBodyRoute
from evenkeel_moe.api.plans import router as plans
from tests.api.conftest import assert_problem


class Rows(BaseModel):
    rows: list[int]
    threads: list[int] = []

    @field_validator("rows")
    @classmethod
    def note_thread(cls, rows: list[int]) -> list[int]:
        validated_in.append(threading.get_ident())
        return rows


validated_in: list[int] = []


async def post(body: bytes) -> httpx.Response:
    app, router = FastAPI(), APIRouter(route_class=LargeBodyRoute)

    @router.post("/rows")
    async def take(body: Rows) -> int:
        return len(body.rows)

    app.include_router(router)
    validated_in.clear()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        headers = {"content-type": "application/json"}
        return await client.post("/rows", content=body, headers=headers)


def rows(count: int) -> bytes:
    return json.dumps({"rows": [7] * count}).encode()


@pytest.mark.parametrize(("count", "in_loop"), [(10, True), (LARGE_BYTES, False)])
async def test_only_small_bodies_are_validated_in_the_loop(count, in_loop):
    answer = await post(rows(count))
    assert (answer.status_code, answer.json()) == (200, count)
    assert len(validated_in) == 1, "validated once"
    assert (validated_in[0] == threading.get_ident()) is in_loop


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (2 * LARGE_BYTES),
        b'{"rows": [' + b"1," * LARGE_BYTES + b"]}",
        b'{"rows": ["' + b"x" * LARGE_BYTES + b'"]}',
        b"\xff" * (2 * LARGE_BYTES),
    ],
)
async def test_large_bodies_that_are_wrong_are_refused_as_small_ones_are(body):
    assert (await post(body)).status_code == 422


def test_the_routes_of_plans_do_it():
    assert all(isinstance(route, LargeBodyRoute) for route in plans.routes)


MIB = 1 << 20
MANY = 690_000
"""Names of ten bytes with their values that fit into 8 MB."""
NAMES = ",".join(f'"k{number:06d}":1' for number in range(MANY))
LARGE = {
    "names": f"{{{NAMES}}}",
    "names inside": f'{{"limits":{{{NAMES}}}}}',
    "names of an option": f'{{"policy_options":{{"gem":{{{NAMES}}}}}}}',
    "objects": f'{{"target":{{"physical_to_logical":[{",".join(["{}"] * 2_700_000)}]}}}}',
    "lists": f'{{"target":{{"physical_to_logical":[{",".join(["[]"] * 2_700_000)}]}}}}',
    "texts": f'{{"phases":[{",".join([chr(34) * 2] * 2_700_000)}]}}',
}
ROUTES = [("PATCH", "policy"), ("POST", "plans"), ("POST", "rollback"), ("POST", "freeze")]
unknown = pytest.mark.fault(
    "whoever shares a controller", "8 MB of unknown names took gigabytes and stopped the loop"
)


@unknown
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[path for _, path in ROUTES])
@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON"])
async def test_megabytes_of_names_are_refused_before_they_are_parsed(
    client, kind, method, path, content_type
):
    body, headers = LARGE[kind].encode(), {"Content-Type": content_type}
    url = f"/v1/deployments/demo/{path}"
    answer = await client.request(method, url, content=body, headers=headers)
    problem = assert_problem(answer, 422, "invalid_input")
    assert "at most 32768 are read" in problem["detail"]
    assert len(problem["errors"]) == 1


@unknown
async def test_a_body_of_many_names_takes_little_more_memory_than_it_has(client):
    body, headers = LARGE["names"].encode(), {"Content-Type": "application/json"}
    tracemalloc.start()
    try:
        await client.post("/v1/deployments/demo/plans", content=body, headers=headers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * MIB, f"{peak / MIB:.0f} MiB for a body of 8 MiB"


@unknown
async def test_a_change_of_the_policy_with_millions_of_values_is_refused(client, operations):
    body = json.dumps({"cycle_s": [1] * 2_000_000}).encode()
    headers = {"Content-Type": "application/json"}
    answer = await client.patch("/v1/deployments/demo/policy", content=body, headers=headers)
    problem = assert_problem(answer, 422, "invalid_input")
    assert problem["detail"] == "body.cycle_s: Input should be a valid number"
    assert "cycle_s" not in operations.document
