"""Records of a real controller: who requested what, what was rejected, where the load is."""

from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from tests.integration.controller_rig import Controller, Group, damaged
from tests.waiting import until

pytestmark = pytest.mark.integration

BASE = "/v1/deployments/demo"


async def test_heat_map_quarantine_audit_and_forgetting(tmp_path):
    async with Controller(tmp_path) as controller:
        async with Group() as group:
            await group.connect(controller.address)
            await until(lambda: controller.state("ready"))
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
            await group.connect(controller.address)
            await until(lambda: controller.state("ready"))


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


async def test_a_key_holds_over_a_restart(tmp_path):
    async with Controller(tmp_path / "data") as controller, Group() as group:
        # First, because ranks that report nothing for long are lost.
        await until(lambda: controller.events("planner_ready"), within_s=90)
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        await group.serve(128)
        await until(lambda: _steps(controller, 100))
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


async def _steps(controller: Controller, number: int) -> bool:
    return ((await controller.status()).get("window_steps") or 0) >= number


async def test_a_request_is_followed_through_the_log_by_its_trace(tmp_path):
    """The trace id of the header is in the log lines of the request and in the plan's record.

    A stream has its own trace id.
    """
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    async with Controller(tmp_path / "data") as controller, Group() as group:
        # First, because ranks that report nothing for long are lost.
        await until(lambda: controller.events("planner_ready"), within_s=90)
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        await group.serve(128)
        await until(lambda: _steps(controller, 100))
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
