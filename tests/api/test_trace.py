"""The trace id of a request: given or new, in response, audit and log."""

import structlog

from tests.api.conftest import assert_problem

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
FREEZE = "/v1/deployments/demo/freeze"


async def test_the_trace_of_the_caller_is_in_response_audit_and_log(client, operations):
    freeze, said = operations.freeze, []

    async def noted(*arguments):
        said.append(structlog.contextvars.get_contextvars())
        await freeze(*arguments)

    operations.freeze = noted
    answer = await client.post(FREEZE, json={"seconds": 1}, headers=HEADERS)
    assert answer.headers["trace-id"] == TRACE
    other = await client.post(FREEZE, json={"seconds": 1})
    made_up = other.headers["trace-id"]
    rows = (await client.get("/v1/audit")).json()["items"]
    assert [row["trace_id"] for row in rows] == [made_up, TRACE]
    assert [context["trace_id"] for context in said] == [TRACE, made_up]
    assert len({TRACE, made_up}) == 2
    # The next request of this task must not see it.
    assert "trace_id" not in structlog.contextvars.get_contextvars()


async def test_refused_and_failed_requests_have_a_trace_too(client, anonymous, operations, caplog):
    answer = await anonymous.post(FREEZE, json={"seconds": 1}, headers=HEADERS)
    assert_problem(answer, 401)
    assert answer.headers["trace-id"] == TRACE
    operations.error = ZeroDivisionError("1 / 0")
    assert_problem(await client.post(FREEZE, json={"seconds": 1}, headers=HEADERS), 500)
    (line,) = [vars(line) for line in caplog.records if line.message == "request_failed_by_defect"]
    assert (line["trace_id"], line["path"]) == (TRACE, FREEZE)
    assert [row["trace_id"] for row in operations.rows] == [TRACE]


async def test_the_log_level_is_read_by_all_and_changed_by_an_admin(admin, client, operations):
    assert (await client.get("/v1/log-level")).json() == {"level": "info"}
    assert_problem(await client.put("/v1/log-level", json={"level": "error"}), 403)
    changed = await admin.put("/v1/log-level", json={"level": "debug"})
    assert changed.json() == {"level": "debug"}
    assert_problem(await admin.put("/v1/log-level", json={"level": "loud"}), 422)
    assert (await client.get("/v1/log-level")).json() == {"level": "debug"}
    assert operations.calls == [("set_log_level", "debug", "carol")]
    assert [(row["by"], row["path"], row["status"]) for row in operations.rows] == [
        ("carol", "/v1/log-level", 422),
        ("carol", "/v1/log-level", 200),
        ("alice", "/v1/log-level", 403),
    ]
