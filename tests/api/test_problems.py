import pytest

from evenkeel_moe.errors import (
    Conflict,
    EvenkeelError,
    IllegalEvent,
    InfeasiblePlan,
    InvalidInput,
    NotFound,
    PeerViolation,
    Reason,
    ShapeMismatch,
    Unavailable,
)
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports.operations import LEASE_FREE, LedElsewhere, NotLeading
from tests.api.conftest import assert_problem


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (InvalidInput("mode is wrong"), 422, "invalid_input"),
        (ShapeMismatch("2 layers, not 3"), 422, "wrong_shape"),
        (NotFound("no such plan"), 404, "not_found"),
        (Conflict("moved", Reason.STALE_BASE), 409, "stale_base"),
        (InfeasiblePlan("no room", Reason.MEMORY_EXCEEDED), 422, "memory_exceeded"),
        (PeerViolation("rank 3 lies"), 502, "malformed"),
        (Unavailable("store is away"), 503, "store_unavailable"),
        (Unavailable("ask controller-1", Reason.NOT_LEADER), 503, "not_leader"),
    ],
)
async def test_each_error_has_its_status_and_reason(client, operations, error, status, reason):
    operations.error = error
    body = assert_problem(await client.get("/v1/deployments/demo"), status, reason)
    assert body["detail"] == str(error)
    assert body["instance"] == "/v1/deployments/demo"


@pytest.mark.parametrize(
    "error",
    [IllegalEvent("coordinator", "idle", "Ack"), RuntimeError("secret"), EvenkeelError("x")],
)
async def test_an_internal_error_shows_the_client_no_details(client, operations, error):
    operations.error = error
    response = await client.get("/v1/deployments/demo")
    assert_problem(response, 500)
    assert "secret" not in response.text
    assert "coordinator" not in response.text


@pytest.mark.parametrize(
    ("leader", "address", "words"),
    [
        ("b", "b:50051", "replica b at b:50051 leads demo, and this is another replica"),
        ("b", None, "replica b leads demo, and this is another replica"),
        (None, None, f"no replica leads demo at present: {LEASE_FREE}"),
    ],
)
async def test_a_replica_that_does_not_lead_names_the_leader(
    client, operations, leader, address, words
):
    operations.error = NotLeading(LedElsewhere(DeploymentId("demo"), leader, address))
    response = await client.get("/v1/deployments/demo/policy")
    body = assert_problem(response, 503, "not_leader")
    assert (body["leader"], body["leader_address"], body["detail"]) == (leader, address, words)
    assert int(response.headers["retry-after"]) > 0


async def test_unknown_path_and_method(client):
    assert_problem(await client.get("/v1/nothing"), 404, "not_found")
    response = await client.put("/v1/deployments/demo/load")
    assert_problem(response, 405)
    assert response.headers["allow"] == "GET"


async def test_a_body_with_an_unknown_field_is_refused(client):
    body = assert_problem(
        await client.post("/v1/deployments/demo/plans", json={"dryrun": True}), 422, "invalid_input"
    )
    assert "dryrun" in body["detail"]
    assert body["errors"][0]["location"] == ["body", "dryrun"]


async def test_a_body_that_is_not_json(client):
    response = await client.post(
        "/v1/deployments/demo/plans", content=b"{", headers={"content-type": "application/json"}
    )
    assert_problem(response, 422)


async def test_a_problem_may_contain_text_that_utf8_cannot_encode(client, operations):
    """JSON strings may contain lone surrogates, and error messages repeat them."""
    operations.refusal = InvalidInput("unknown policy fields \ud800; known: mode")
    body = assert_problem(
        await client.patch("/v1/deployments/demo/policy", json={}), 422, "invalid_input"
    )
    assert body["detail"] == "unknown policy fields ?; known: mode"


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "plans", b'{"\\ud800": 1}'),
        ("POST", "plans", b'{"policy": "\\ud800"}'),
        ("POST", "plans", b'{"limits": {"max_bytes": %s}}' % (b"9" * 400)),
        ("POST", "plans", b'{"phases": ["\\udfff"]}'),
        ("POST", "rollback", b'{"to_epoch": %s}' % (b"9" * 400)),
        ("POST", "rollback", b'{"\\udfff": null}'),
        ("POST", "freeze", b'{"seconds": %s}' % (b"9" * 400)),
        ("POST", "freeze", b'{"seconds": "\\ud800"}'),
        ("GET", "recommendation?max_age_s=" + "9" * 400, b""),
        ("GET", "heatmap?first_layer=" + "9" * 400, b""),
        ("GET", "decisions?page_size=" + "9" * 400, b""),
        ("GET", "plans?page_token=%ED%A0%80", b""),
    ],
)
async def test_numbers_out_of_range_and_lone_surrogates_are_invalid_input(
    client, method, path, content
):
    headers = {"Content-Type": "application/json"}
    answer = await client.request(
        method, f"/v1/deployments/demo/{path}", content=content, headers=headers
    )
    assert_problem(answer, 422)
