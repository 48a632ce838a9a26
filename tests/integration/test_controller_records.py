"""Records of a real controller: who requested what, what was rejected, where the load is."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans

from evenkeel_moe.errors import Reason
from tests.api.conftest import ADMIN, OPERATE, READ
from tests.integration.controller_rig import Controller, Group, damaged
from tests.waiting import deadline, until

pytestmark = pytest.mark.integration

BASE = "/v1/deployments/demo"


async def test_heat_map_quarantine_audit_and_forgetting(tmp_path):
    async with Controller(tmp_path) as controller:
        async with Group() as group:
            await group.join(controller)
            await group.serve(32)
            await _rejected_reports_are_told_and_cleared(controller, group)
            await _the_heat_map_is_of_what_was_served(controller)
            busy = await controller.http.delete(BASE)
            assert (busy.status_code, busy.json()["reason"]) == (409, Reason.BUSY)
            assert (
                await controller.http.post(f"{BASE}/freeze", json={"seconds": 60})
            ).status_code == 204
        await controller.stop()
        await controller.start()
        # The record outlives the process; what it did since is on top.
        await until(lambda: controller.state("waiting_for_ranks"))
        rows = (await controller.http.get(f"{BASE}/audit")).json()["items"]
        assert [(row["method"], row["path"], row["status"], row["by"]) for row in rows] == [
            ("POST", f"{BASE}/freeze", 204, "admin"),
            ("DELETE", BASE, 409, "admin"),
            ("DELETE", f"{BASE}/quarantine", 204, "admin"),
        ]
        assert (await controller.http.delete(BASE)).status_code == 204
        assert (await controller.http.get(BASE)).status_code == 404
        assert (await controller.http.delete(BASE)).status_code == 404
        rows = (await controller.http.get("/v1/audit")).json()["items"]
        assert [(row["method"], row["status"]) for row in rows] == [
            ("DELETE", 404),
            ("DELETE", 204),
        ]
        # Ranks that come back are taken as before.
        async with Group(generation="g-2") as group:
            await group.join(controller)


async def _rejected_reports_are_told_and_cleared(controller, group):
    rank, (report, *_) = group.ranks[0], group.route(2)
    await rank.send_wire(damaged(report, counts=b"\0"))
    path = f"{BASE}/quarantine"

    async def rejected():
        return (await controller.http.get(path)).json()["items"]

    (row,) = await until(rejected)
    assert row["rank_steps"] == 2
    assert row["reason"] in set(Reason)
    assert row["samples"][0]["rank"] == 0
    assert row["samples"][0]["detail"]
    assert (await controller.http.delete(path)).status_code == 204
    assert await rejected() == []


async def _the_heat_map_is_of_what_was_served(controller):
    async def heat():
        body = (await controller.http.get(f"{BASE}/heatmap", params={"phase": "decode"})).json()
        return body if body["steps"] else None

    body = await until(heat)
    assert (len(body["experts"]), len(body["experts"][0]), len(body["ranks"][0])) == (3, 8, 4)
    for row in body["experts"] + body["ranks"]:
        assert sum(row) / len(row) == pytest.approx(1)
    other = (await controller.http.get(f"{BASE}/heatmap", params={"phase": "prefill"})).json()
    assert (other["steps"], other["experts"], other["ranks"]) == (0, None, None)


async def test_a_request_is_followed_through_the_log_by_its_trace(tmp_path):
    """The trace id of the header is in the log lines of the request and in the plan's record.

    A stream has its own trace id.
    """
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    async with Controller(tmp_path / "data") as controller, Group() as group:
        # First, because ranks that report nothing for long are lost.
        await until(lambda: controller.events("planner_ready"), within_s=90)
        await group.join(controller)
        await group.serve(128)
        await until(lambda: controller.counted(100))
        plan = {"plan_id": "mine", "policy": "eplb"}
        made = await controller.http.post(f"{BASE}/plans", json=plan, headers=headers)
        assert (made.status_code, made.headers["trace-id"]) == (201, trace)
        await controller.http.post(f"{BASE}/plans/mine/cancel")
        lines = await until(
            lambda: len(controller.events("plan")) == 2 and controller.events("plan")
        )
        assert [(row["plan_id"], row["deployment"], row["epoch"]) for row in lines] == [
            ("mine", "demo", 0)
        ] * 2
        assert lines[0]["trace_id"] == trace
        assert lines[1]["trace_id"] not in (None, trace)
        written = (await controller.http.get(f"{BASE}/audit")).json()["items"]
        assert [row["trace_id"] for row in written] == [lines[1]["trace_id"], trace]

        before = len(controller.log)
        assert (
            await controller.http.put("/v1/log-level", json={"level": "error"})
        ).status_code == 200
        await controller.http.post(f"{BASE}/freeze", json={"seconds": 1})
        assert (
            await controller.http.put("/v1/log-level", json={"level": "info"})
        ).status_code == 200
        await until(lambda: len(controller.events("log_level_changed")) == 2)
        assert not [row for row in controller.log[before:] if row["event"] == "frozen"]
        assert all({"ts", "level", "event"} <= set(row) for row in controller.log)
        assert controller.noise == []


# --- A real controller with ranks answers all requests of any role without a server error ---------


IDS = {"deployment": "demo", "plan_id": "p-1"}


def fuzz(url: str, token: str, unavailable: list[str]) -> dict[int, int]:
    """Send requests to every documented operation; return the number of answers by status.

    Appends the whole answers of status 503 to `unavailable`.
    """
    headers = {"Authorization": f"Bearer {token}"}
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    answers: dict[int, int] = {}
    for operation in schema.get_all_operations():
        one_operation(operation.ok(), headers, answers, unavailable)
    return answers


def one_operation(operation, headers, answers, unavailable):
    @given(case=operation.as_strategy(), known=booleans())
    @settings(
        max_examples=6,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case, known):
        if known:
            case.path_parameters |= {key: IDS[key] for key in case.path_parameters}
        answer = case.call(headers=headers, timeout=deadline(10))
        if answer.status_code == 503:
            unavailable.append(f"{case.method} {case.path}: {answer.text}")
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        answers[answer.status_code] = answers.get(answer.status_code, 0) + 1

    ask()


async def test_no_role_can_make_a_real_controller_fail(tmp_path):
    (tmp_path / "tokens").write_text(
        f"carol admin {ADMIN}\nalice operate {OPERATE}\nbob read {READ}\n"
    )
    async with Controller(tmp_path, PLANNER__MODE="propose") as controller, Group() as group:
        await until(lambda: controller.events("planner_ready"), within_s=90)
        await group.join(controller)
        group.serve_on()
        made = await controller.http.post("/v1/deployments/demo/plans", json={"plan_id": "p-1"})
        assert made.status_code in (201, 409), made.text
        url = f"http://127.0.0.1:{controller.ports['rest']}"
        unavailable: list[str] = []
        seen = {
            token: await asyncio.to_thread(fuzz, url, token, unavailable)
            for token in (READ, OPERATE, ADMIN)
        }
        # On a busy machine the controller may briefly lose its store or lease, but no request may
        # be the cause.
        assert (
            not unavailable or controller.events("store_lost") or controller.events("lease_lost")
        ), unavailable
        for answers in seen.values():
            assert answers[200] > 10
            assert sum(answers.values()) > 100
        assert seen[READ][403] > seen[OPERATE][403] > seen[ADMIN].get(403, 0) == 0
        assert controller.process.returncode is None
        await until(lambda: controller.state("ready"), within_s=60)
        rows = (await controller.http.get("/v1/audit", params={"page_size": 1000})).json()["items"]
        assert {row["by"] for row in rows} == {"carol", "alice", "bob"}
        assert [row for row in controller.log if "exception" in row] == []


async def test_a_key_holds_over_a_restart(tmp_path):
    async with Controller(tmp_path / "data") as controller, Group() as group:
        # First, because ranks that report nothing for long are lost.
        await until(lambda: controller.events("planner_ready"), within_s=90)
        await group.join(controller)
        await group.serve(128)
        await until(lambda: controller.counted(100))
        keyed: dict[str, Any] = {"headers": {"Idempotency-Key": "k-1"}}
        plan = {"policy": "eplb"}
        first = await controller.http.post(f"{BASE}/plans", json=plan, **keyed)
        assert (first.status_code, first.json()["plan_id"]) == (201, "k-1")
        await controller.stop()
        await controller.start()
        await group.reconnect(controller.address)
        await until(lambda: controller.state("ready"))
        again = await controller.http.post(f"{BASE}/plans", json=plan, **keyed)
        assert (again.status_code, again.json()["plan_id"]) == (201, "k-1")
        assert again.headers["location"] == first.headers["location"]
        other = await controller.http.post(f"{BASE}/plans", json={**plan, "policy": "gem"}, **keyed)
        assert (other.status_code, other.json()["reason"]) == (409, Reason.ID_REUSED)
