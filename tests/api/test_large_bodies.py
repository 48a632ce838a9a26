"""Large bodies are parsed and validated in a thread, with the same answers as small ones."""

import json
import threading

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, field_validator

from evenkeel_moe.api.large_bodies import LARGE_BYTES, LargeBodyRoute
from evenkeel_moe.api.plans import router as plans


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
