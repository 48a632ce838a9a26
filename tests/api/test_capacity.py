import pytest

from evenkeel_moe.planning.decision.capacity import CapacityRequest
from tests.api.conftest import assert_problem
from tests.api.fakes import NOW

PATH = "/v1/deployments/demo/capacity"


async def test_widths_are_compared_with_null_for_unknown(client, operations):
    asked = {"to_ranks": [1, 4], "multi_node_bytes": 7}
    body = (await client.get(PATH, params=asked)).json()
    assert operations.calls == [("capacity", "demo", CapacityRequest((1, 4), multi_node_bytes=7))]
    assert (body["at"], body["epoch"], body["policy"]) == (NOW, 3, "eplb")
    assert (body["kv"], body["free_bytes"]) == (
        {"bytes_per_token": 10, "free_bytes": 50_000},
        None,
    )
    assert body["cost_model"]["unit"] == "tokens"
    now, one, four = body["rows"]
    assert [row["ranks"] for row in (now, one, four)] == [2, 1, 4]
    assert (now["present"], now["gain"], one["retire"], four["retire"]) == (True, 0, [1], [])
    assert one["kv_tokens"] == (50_000 - (one["expert_bytes"] - now["expert_bytes"])) // 10
    operations.capacity_inputs = {"kv": None, "unfit": ("Nothing is known.",)}
    bare = (await client.get(PATH, params={"to_ranks": 1})).json()
    for unknown in ("moe_time", "gain", "gain_lower", "balancedness", "kv_tokens"):
        assert [row[unknown] for row in bare["rows"]] == [None, None]


async def test_the_whole_request_reaches_the_controller(client, operations):
    await client.get(PATH, params={"retire": [1], "whole_nodes": "true", "to_slots": 4})
    assert operations.calls[-1][2] == CapacityRequest((), 4, (1,), True)
    await client.get(PATH)
    assert operations.calls[-1][2] == CapacityRequest()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"retire": 5}, "invalid_input"),
        ({"to_ranks": 1, "to_slots": 3}, "expert_without_replica"),
        ({"to_ranks": 3, "to_slots": 7}, "wrong_shape"),
        ({"to_ranks": 1, "retire": 1}, "invalid_input"),
        ({"to_ranks": 0}, "invalid_input"),
        ({"to_ranks": "many"}, "invalid_input"),
        ({"to_ranks": 4609}, "invalid_input"),
        ({"to_ranks": [*range(1, 34)]}, "invalid_input"),
        ({"multi_node_bytes": -1}, "invalid_input"),
        ({"to_slots": "9" * 400}, "invalid_input"),
    ],
)
async def test_widths_that_cannot_be_are_refused(client, asked, reason):
    answer = await client.get(PATH, params=asked)
    assert_problem(answer, 422)
    assert answer.json()["reason"] == reason
