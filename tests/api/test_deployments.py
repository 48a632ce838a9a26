import asyncio
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.api.convert import placement_json, placement_out
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.finding import Finding, FindingCode, Severity
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.ports.operations import LedElsewhere, NotLeading
from tests.api.conftest import assert_problem
from tests.api.fakes import SHAPE, FakeView, make_plan, make_window
from tests.planning.signals.test_live_findings import LOST


async def test_deployments_are_listed_by_name_in_pages(client):
    whole = (await client.get("/v1/deployments")).json()
    assert [row["deployment"] for row in whole["items"]] == ["demo", "fresh"]
    assert whole["next_page_token"] is None
    first = (await client.get("/v1/deployments", params={"page_size": 1})).json()
    assert [row["deployment"] for row in first["items"]] == ["demo"]
    second = (
        await client.get(
            "/v1/deployments", params={"page_size": 1, "page_token": first["next_page_token"]}
        )
    ).json()
    assert [row["deployment"] for row in second["items"]] == ["fresh"]
    assert second["next_page_token"] is None


async def test_the_list_has_only_the_leader_of_deployments_led_elsewhere(client, operations):
    operations.elsewhere = [
        LedElsewhere(DeploymentId("chat"), "b", "b:50051"),
        LedElsewhere(DeploymentId("gone"), None, None),
    ]
    rows = (await client.get("/v1/deployments")).json()["items"]
    assert [row["deployment"] for row in rows] == ["chat", "demo", "fresh", "gone"]
    assert rows[1]["leader_address"] == "controller-0:50051"
    for row, leader, address in ((rows[0], "b", "b:50051"), (rows[3], None, None)):
        assert row.keys() == rows[1].keys()
        known = {name: value for name, value in row.items() if value is not None}
        named = {"leader": leader, "leader_address": address} if leader else {}
        expected = {"deployment": row["deployment"], "state": "follower", "reason": "not_leader"}
        words = {"reason_text": sentence(Reason.NOT_LEADER)}
        assert known.pop("health")["level"] == ("unknown" if leader else "bad")
        assert known == expected | words | named


async def test_an_epoch_that_is_not_known_is_null(client, operations):
    operations.show(epoch=None, frozen_until_unix=None)
    for path in ("", "/load", "/heatmap"):
        answer = await client.get(f"/v1/deployments/demo{path}")
        assert (answer.status_code, answer.json()["epoch"]) == (200, None)


@pytest.mark.parametrize("token", ["x", "%%%", "bm9ib2R5"])
async def test_an_invalid_page_token_is_refused(client, token):
    assert_problem(await client.get("/v1/deployments", params={"page_token": token}), 422)


async def test_deployment_shows_the_plan_and_null_for_unknown(operations, client):
    body = (await client.get("/v1/deployments/demo")).json()
    assert (body["epoch"], body["state"], body["balancedness_mean"]) == (3, "ready", 0.8)
    assert body["shape"]["num_logical_experts"] == 4
    assert [rank["load_share"] for rank in body["ranks"]] == [0.5, 0.5]
    assert body["active_plan"] is None
    unknown = (await client.get("/v1/deployments/fresh")).json()
    assert unknown["balancedness_mean"] is None
    assert unknown["step"] is None


@LOST
async def test_what_is_wrong_with_the_counts_is_told_and_unknown_is_null(client, operations):
    finding = Finding(
        FindingCode.IDLE_EXPERTS, Severity.DOUBT, "never count", "rank 1", "all 6", share=0.25
    )
    shown = {}
    for findings in ((finding,), (), None):
        operations.show(findings=findings)
        shown[findings] = (await client.get("/v1/deployments/demo")).json()["findings"]
    told = {"code": "idle_experts", "severity": "doubt", "where": "rank 1", "share": 0.25}
    assert shown[(finding,)] == [told | {"words": "never count: rank 1, all 6"}]
    assert (shown[()], shown[None]) == ([], None)


async def test_active_plan_and_values_that_are_not_finite(client, operations):
    operations.show(active_plan=make_plan(), balancedness_mean=float("nan"), staging_bytes_total=9)
    body = (await client.get("/v1/deployments/demo")).json()
    assert body["balancedness_mean"] is None
    assert body["active_plan"]["plan_id"] == "p-1"
    assert body["active_plan"]["moves"] == 1
    assert body["staging_bytes_total"] == 9


async def test_placement_and_its_derived_maps_agree(client):
    body = (await client.get("/v1/deployments/demo/placement")).json()
    want = Placement.initial(SHAPE)
    assert body["physical_to_logical"] == want.phy2log.tolist()
    assert (body["epoch"], body["digest"]) == (3, want.digest)
    for layer, experts in enumerate(body["logical_to_physical"]):
        for expert, slots in enumerate(experts):
            assert len(slots) == body["replica_count"][layer][expert]
            assert all(body["physical_to_logical"][layer][slot] == expert for slot in slots)


def test_a_placement_that_is_written_layer_by_layer_is_the_documented_one():
    placement = Placement(np.array([[0, 1, -1, 2, 0, 3], [3, 2, 1, 0, -1, -1]], np.int32), 2, 4)
    for epoch in (7, None):
        want = placement_out(placement, epoch).model_dump_json()
        assert placement_json(placement, epoch) == want


async def test_placement_before_the_ranks_reported_it(client):
    assert_problem(await client.get("/v1/deployments/fresh/placement"), 503, "ranks_missing")


async def test_load_matrices_per_phase(client):
    body = (await client.get("/v1/deployments/demo/load")).json()
    assert body["phases"]["prefill"] is None
    decode = body["phases"]["decode"]
    assert decode["steps"] == 5
    assert decode["tokens_per_expert"] == [[8, 4, 2, 2], [4, 4, 4, 4]]
    per_rank = np.array(decode["tokens_per_rank"])
    assert per_rank.shape == (2, 2)
    assert per_rank.sum(axis=1).tolist() == [16, 16]
    # Rank 0 holds experts 0, 1 and a copy of 2 or more, so it has the most load of layer 0.
    assert decode["balancedness_by_layer"][0] == pytest.approx(8 / per_rank[0].max())


async def test_load_of_a_layer_without_tokens_is_unknown(client, operations):
    window = make_window()
    window.counts[:, 1] = 0
    operations.views["demo"].windows = {Phase.DECODE: window}
    decode = (await client.get("/v1/deployments/demo/load")).json()["phases"]["decode"]
    assert decode["balancedness_by_layer"][1] is None


async def test_a_policy_change_needs_the_current_etag(client):
    read = await client.get("/v1/deployments/demo/policy")
    tag = read.headers["etag"]
    assert read.json() == {"mode": "auto", "policy": "eplb"}
    changed = await client.patch(
        "/v1/deployments/demo/policy", json={"mode": "observe"}, headers={"If-Match": tag}
    )
    assert changed.json() == {"mode": "observe", "policy": "eplb"}
    assert changed.headers["etag"] != tag
    late = await client.patch(
        "/v1/deployments/demo/policy", json={"mode": "auto"}, headers={"If-Match": tag}
    )
    assert_problem(late, 412)
    assert (await client.get("/v1/deployments/demo/policy")).json()["mode"] == "observe"
    assert_problem(await client.patch("/v1/deployments/demo/policy", json={"mode": "yolo"}), 422)


@pytest.mark.parametrize(
    ("form", "status"), [("*", 200), ('"none", {tag}', 200), ('"none", "nor this"', 412)]
)
async def test_if_match_takes_its_other_forms(client, form, status):
    path = "/v1/deployments/demo/policy"
    tag = (await client.get(path)).headers["etag"]
    headers = {"If-Match": form.format(tag=tag)}
    answer = await client.patch(path, json={"mode": "observe"}, headers=headers)
    assert answer.status_code == status


async def test_only_one_of_several_changes_of_the_same_document_is_made(client, operations):
    path = "/v1/deployments/demo/policy"
    headers = {"If-Match": (await client.get(path)).headers["etag"]}
    answers = await asyncio.gather(
        *(client.patch(path, json={"cycle_s": n}, headers=headers) for n in range(1, 7))
    )
    taken = [answer for answer in answers if answer.status_code == 200]
    assert [answer.json() for answer in taken] == [operations.document]
    for answer in answers:
        if answer not in taken:
            assert_problem(answer, 412, "stale_base")


async def test_a_change_by_another_replica_than_the_leader_is_no_stale_document(client, operations):
    tag = (await client.get("/v1/deployments/demo/policy")).headers["etag"]
    operations.refusal = NotLeading(LedElsewhere(DeploymentId("demo"), "b", "b:50051"))
    late = await client.patch("/v1/deployments/demo/policy", json={}, headers={"If-Match": tag})
    assert_problem(late, 503, "not_leader")
    operations.refusal = Conflict("a plan runs", Reason.PLAN_IN_PROGRESS)
    late = await client.patch("/v1/deployments/demo/policy", json={}, headers={"If-Match": tag})
    assert_problem(late, 409, "plan_in_progress")


async def test_ranks_that_retire_are_told_and_kept_for_the_audit(client, operations):
    path = "/v1/deployments/demo/resize"
    assert (await client.get(path)).status_code == 404
    asked = {"retire": [1], "from_ranks": 2, "plan_id": "evacuate"}
    answer = await client.post(path, json=asked)
    assert answer.status_code == 202
    assert answer.json() == (await client.get(path)).json()
    assert (answer.json()["plan_id"], answer.json()["stranded"]) == ("evacuate", 3)
    request = operations.calls[-1][2]
    assert (request.retire, request.from_ranks, request.requested_by) == ((1,), 2, "alice")
    status = (await client.get("/v1/deployments/demo")).json()
    assert status["resize"] == answer.json() and "Ranks 1 of 2 retire" in status["health"]["text"]
    assert (await client.post(path, json={"retire": [-1]})).status_code == 422


async def test_freeze_resume_and_who_asked(client, operations):
    assert (
        await client.post("/v1/deployments/demo/freeze", json={"seconds": 60})
    ).status_code == 204
    assert (await client.post("/v1/deployments/demo/resume")).status_code == 204
    assert operations.calls == [("freeze", "demo", 60.0, "alice"), ("resume", "demo", "alice")]
    for seconds in (-1, 1e9, "soon"):
        assert_problem(
            await client.post("/v1/deployments/demo/freeze", json={"seconds": seconds}), 422
        )


async def read_decisions(client, page_size):
    """Return the times of all decisions, read page by page."""
    seen: list[float] = []
    params: dict[str, Any] = {"page_size": page_size}
    while len(seen) < 100:
        body = (await client.get("/v1/deployments/demo/decisions", params=params)).json()
        seen += [row["at"] for row in body["items"]]
        params["page_token"] = body["next_page_token"]
        if params["page_token"] is None:
            return seen
    raise AssertionError("the pages go round")


async def test_decisions_page_through_without_gap_or_repeat(client):
    seen = await read_decisions(client, 7)
    assert len(seen) == 30
    assert seen == sorted(seen, reverse=True)


@pytest.mark.fault("a reader of decisions of which one was stored twice", "never came to the end")
async def test_decisions_that_are_stored_twice_page_through(client, operations, monkeypatch):
    rows = await operations.decisions("demo", 30)

    async def doubled(*_):
        return [row for row in rows for _ in range(2)]

    monkeypatch.setattr(operations, "decisions", doubled)
    assert await read_decisions(client, 1) == [row["at"] for row in rows]


async def test_liveness_never_asks_the_controller(client, operations):
    for lost in ("store", "planner"):
        operations.health = {
            "store": "ok",
            "planner": "ok",
            "grpc": "ok",
            lost: "connection refused",
        }
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    operations.health = {"store": "ok", "grpc": "not bound"}
    assert (await client.get("/readyz")).status_code == 503


async def test_a_policy_value_that_json_cannot_represent_is_null(client, operations):
    operations.document["max_payback_s"] = float("inf")
    assert (await client.get("/v1/deployments/demo/policy")).json()["max_payback_s"] is None


async def test_a_deployment_without_a_known_shape_does_not_hide_the_others(client, operations):
    operations.views["silent"] = FakeView(Unavailable("no rank of silent has connected yet"))
    names = [row["deployment"] for row in (await client.get("/v1/deployments")).json()["items"]]
    assert names == ["demo", "fresh"]
    assert_problem(await client.get("/v1/deployments/silent"), 503)
