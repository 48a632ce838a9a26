from dataclasses import replace

import pytest

from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.delivered import DeliveredGain, ServingSpeed
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits, PlanPhase
from tests.api.conftest import ADMIN, OPERATE, assert_problem
from tests.api.fakes import NOW, SHAPE, make_plan

PLANS = "/v1/deployments/demo/plans"


async def test_of_a_dry_run_nothing_is_kept(client):
    shown = await client.post(PLANS, json={"dry_run": True})
    assert (shown.status_code, shown.json()["phase"]) == (200, "proposed")
    assert "location" not in shown.headers
    assert (await client.get(PLANS)).json()["items"] == []


async def test_a_plan_may_have_options_and_a_budget_of_its_own(client, operations):
    asked = {"policy_options": {"craft": {"rule": "knee"}}, "replica_budget": 2}
    for body, changes in (({}, {}), (asked, asked), ({"replica_budget": None}, {})):
        assert (await client.post(PLANS, json={"dry_run": True, **body})).status_code == 200
        assert operations.calls[-1][2].changes == changes
    for wrong in ({"replica_budget": 1.5}, {"policy_options": {"craft": 3}}):
        assert_problem(await client.post(PLANS, json=wrong), 422)


async def test_a_proposal_is_the_plan_that_approve_takes(client):
    made = await client.post(PLANS, json={})
    assert made.status_code == 201
    where = made.headers["location"]
    assert where == f"{PLANS}/{made.json()['plan_id']}"
    assert (await client.get(where)).json() == made.json()
    approved = await client.post(f"{where}/approve")
    assert approved.status_code == 202
    assert approved.headers["location"] == where
    assert approved.json()["phase"] == "approved"
    assert approved.json()["approved_by"] == "alice"
    assert approved.json()["target"] == made.json()["target"]


async def test_a_plan_shows_what_it_promised_and_delivered(client, operations):
    gained = DeliveredGain(NOW, 0.18, 0.01, 0.15, 0.21, 0.19, 64)
    gained = replace(gained, after=ServingSpeed(0.02, 450.0))
    record = make_plan("done", phase=PlanPhase.COMMITTED, delivered=gained)
    record = replace(record, plan=replace(record.plan, cost_source=CostSource.MEASURED))
    record.plan.numbers.update(gain=0.2, gain_lower=0.17)
    operations.records["demo"] = [record]
    shown = (await client.get(f"{PLANS}/done")).json()["delivered"]
    assert shown == {
        "gain": 0.18,
        "lower": 0.15,
        "upper": 0.21,
        "error": 0.01,
        "promised": 0.2,
        "promised_lower": 0.17,
        "over_promised": pytest.approx(0.9),
        "modelled": 0.19,
        "steps": 64,
        "cost_source": "measured",
        "unknown_because": None,
        "at": NOW,
        "before": None,
        "after": {"step_s": 0.02, "tokens_per_s": 450.0},
    }
    listed = (await client.get(PLANS)).json()["items"][0]
    assert listed["delivered"] == shown
    unknown = DeliveredGain(NOW, unknown_because="no rank reports seconds")
    operations.records["demo"] = [replace(record, delivered=unknown)]
    shown = (await client.get(f"{PLANS}/done")).json()["delivered"]
    assert (shown["gain"], shown["over_promised"]) == (None, None)
    assert shown["unknown_because"] == "no rank reports seconds"
    operations.records["demo"] = [replace(record, delivered=None)]
    assert (await client.get(f"{PLANS}/done")).json()["delivered"] is None


async def test_a_plan_that_runs_is_202(client):
    made = await client.post(PLANS, json={"approve": True})
    assert made.status_code == 202
    assert made.json()["phase"] == "approved"


async def test_the_request_reaches_the_controller_whole(client, operations):
    target = Placement.initial(SHAPE).phy2log.tolist()
    body = {
        "plan_id": "mine-1",
        "policy": "keel",
        "limits": {"max_moves": 4, "max_bytes": 4000, "max_layers": 2},
        "phases": ["decode", "decode", "prefill"],
        "dry_run": False,
        "approve": False,
        "target": {"physical_to_logical": target},
    }
    assert (await client.post(PLANS, json=body)).status_code == 201
    _, deployment, request = operations.calls[0]
    assert (deployment, request.plan_id, request.policy) == ("demo", "mine-1", "keel")
    assert request.limits == PlanLimits(4, 4000, 2)
    assert request.phases == (Phase.DECODE, Phase.PREFILL)
    assert request.target == Placement.initial(SHAPE)
    assert request.requested_by == "alice"


async def test_a_key_that_is_no_plan_id_is_refused(client):
    assert_problem(await client.post(PLANS, json={}, headers={"Idempotency-Key": "/"}), 422)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ([[0, 1, 2]], "wrong_shape"),
        ([[0, 1, 2, 3, 0, 1], [0, 1]], "wrong_shape"),
        ([[0, 1, 2, 3, 0, 9], [0, 1, 2, 3, 0, 1]], "expert_out_of_range"),
        ([], "invalid_input"),
        ([[-2, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]], "invalid_input"),
    ],
)
async def test_a_target_of_another_shape_is_refused(client, operations, target, reason):
    body = {"target": {"physical_to_logical": target}}
    assert_problem(await client.post(PLANS, json=body), 422, reason)
    assert operations.calls == []


@pytest.mark.parametrize(
    "unproven",
    [
        {"generation": "", "state": "waiting_for_ranks", "reason": "ranks_missing"},
        {"state": "follower", "reason": "not_leader"},
    ],
)
@pytest.mark.parametrize("target", [[[0, 1, 2]], [[0, 1, 2, 3, 0, 9], [0, 1, 2, 3, 0, 1]]])
async def test_a_target_of_another_shape_is_503_while_the_ranks_are_missing(
    client, operations, target, unproven
):
    """The first rank that registers after a restart may belong to another group."""
    view = operations.views["demo"]
    view.shown = replace(view.shown, **unproven)
    body = {"target": {"physical_to_logical": target}}
    assert_problem(await client.post(PLANS, json=body), 503, unproven["reason"])
    assert operations.calls == []


async def test_plans_page_through(client):
    for number in range(5):
        await client.post(PLANS, json={"plan_id": f"p{number}"})
    first = (await client.get(PLANS, params={"page_size": 3})).json()
    assert [row["plan_id"] for row in first["items"]] == ["p4", "p3", "p2"]
    # A plan created between two pages shifts nothing: the token names a row, not a position.
    await client.post(PLANS, json={"plan_id": "late"})
    rest = (
        await client.get(PLANS, params={"page_size": 3, "page_token": first["next_page_token"]})
    ).json()
    assert [row["plan_id"] for row in rest["items"]] == ["p1", "p0"]
    assert rest["next_page_token"] is None


async def test_cancel_story_and_unknown_plans(client):
    await client.post(PLANS, json={"plan_id": "p1"})
    cancelled = await client.post(f"{PLANS}/p1/cancel")
    assert (cancelled.status_code, cancelled.json()["phase"]) == (202, "cancelled")
    assert_problem(await client.post(f"{PLANS}/p1/approve"), 409, "wrong_phase")
    story = (await client.get(f"{PLANS}/p1/story")).json()
    assert story["reason"] == "cancelled"
    assert story["rows"][0]["event"] == "created"
    for path in ("nope", "nope/story"):
        assert_problem(await client.get(f"{PLANS}/{path}"), 404, "not_found")
    assert_problem(await client.get("/v1/deployments/nope/plans"), 404, "not_found")


async def test_rollback_names_its_epoch_or_takes_the_one_before(client, operations):
    plain = await client.post("/v1/deployments/demo/rollback")
    assert plain.status_code == 202
    assert plain.headers["location"].endswith("/rollback-1")
    await client.post("/v1/deployments/demo/rollback", json={"to_epoch": 2})
    assert [call[2] for call in operations.calls] == [None, 2]
    assert_problem(await client.post("/v1/deployments/demo/rollback", json={"to_epoch": -1}), 422)


async def test_the_preview_of_a_rollback_tells_its_cost_and_starts_nothing(client, operations):
    path = "/v1/deployments/demo/rollback"
    shown = await client.get(path, params={"to_epoch": 1})
    assert shown.json() == {
        "to_epoch": 1,
        "base_epoch": 3,
        "waves": 1,
        "moves": 1,
        "nbytes": 1000,
        "expected_stall_s": 0.004,
        "undoes": None,
        "figures": [
            {"name": "Copies between ranks", "value": "1", "note": "1 kB"},
            {"name": "Waves", "value": "1", "note": "1 layer changes"},
            {"name": "Extra replicas", "value": "4", "note": "2 in every layer"},
            {
                "name": "Expected stall",
                "value": "4 ms",
                "note": "of one step for each wave, by the swaps measured here. Copies run beside"
                " serving.",
            },
            {
                "name": "KV cache",
                "value": "unchanged",
                "note": "The number of slots stays the same.",
            },
        ],
        "hold_text": "In mode auto no plan is made until somebody resumes automatic plans.",
    }
    assert (await client.get(path)).json()["to_epoch"] == 2
    assert operations.calls == [] and operations.records["demo"] == []
    assert_problem(await client.get(path, params={"to_epoch": -1}), 422)


async def test_the_preview_of_a_rollback_names_the_one_plan_that_it_takes_back(client, operations):
    def led(plan_id, base, waves):
        record = make_plan(plan_id)
        (wave,) = record.plan.waves
        several = tuple(replace(wave, index=index) for index in range(waves))
        plan = replace(record.plan, base_epoch=base, waves=several)
        return replace(record, plan=plan, waves_committed=waves)

    async def undone(to_epoch):
        shown = await client.get("/v1/deployments/demo/rollback", params={"to_epoch": to_epoch})
        plan = shown.json()["undoes"]
        return plan and plan["plan_id"]

    operations.records["demo"] = [
        led("waits", 3, 0),
        led("last", 1, 2),
        led("of another generation", 0, 3),
    ]
    assert await undone(1) == "last"
    assert await undone(0) is None


@pytest.mark.parametrize(("token", "bounded"), [(OPERATE, True), (ADMIN, False)])
@pytest.mark.parametrize("path", ["plans/p1/approve", "rollback"])
async def test_only_an_admin_approves_or_rolls_back_beyond_the_limits(
    client, operations, token, bounded, path
):
    headers = {"Authorization": f"Bearer {token}"}
    await client.post(PLANS, json={"plan_id": "p1"})
    answer = await client.post(f"/v1/deployments/demo/{path}", headers=headers)
    assert answer.status_code == 202 and operations.bounded is bounded


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [("POST", PLANS, "phases"), ("PATCH", "/v1/deployments/demo/policy", "mode")],
)
async def test_a_deeply_nested_value_of_an_enumeration_is_refused(client, method, path, name):
    body = f'{{"{name}": {"[" * 900}{"]" * 900}}}'
    headers = {"Content-Type": "application/json"}
    assert_problem(await client.request(method, path, content=body, headers=headers), 422)
