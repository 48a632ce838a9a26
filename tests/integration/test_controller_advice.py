"""Recommendations of a real controller, with shadow policies and with ranks that only observe."""

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.wire.link import Heartbeat
from tests.integration.controller_rig import Controller, Group
from tests.waiting import until

pytestmark = pytest.mark.integration

BASE = "/v1/deployments/demo"


async def test_a_recommendation_moves_nothing(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="observe") as controller, Group() as group:
        http = controller.http
        assert (await http.get(f"{BASE}/recommendation")).status_code == 404
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        early = (await http.get(f"{BASE}/recommendation")).json()
        assert early["call"] == "insufficient_evidence"
        assert (early["window_steps"], early["verdict"], early["newest_step"]) == (0, None, None)

        changed = await http.patch(f"{BASE}/policy", json={"shadow_policies": ["keel", "libra"]})
        assert changed.json()["shadow_policies"] == ["keel", "libra"]
        wrong = await http.patch(f"{BASE}/policy", json={"shadow_policies": ["wishful"]})
        assert (wrong.status_code, wrong.json()["reason"]) == (422, Reason.UNKNOWN_POLICY)

        group.serve_on()

        async def shadowed():
            return next((row for row in await controller.decisions() if row.get("shadow")), None)

        decision = await until(shadowed, within_s=60)
        assert decision["reason"] == Reason.OBSERVE_MODE
        assert set(decision["shadow"]) == {"keel", "libra"}
        assert {"at", "epoch", "reason", "call", "gain", "copies"} <= decision["shadow"][
            "keel"
        ].keys()

        found = (await http.get(f"{BASE}/recommendation", params={"max_age_s": 0})).json()
        assert found["call"] == "recommend"
        assert found["window_steps"] == found["planned_on_steps"] + found["scored_on_steps"]
        assert [row["policy"] for row in found["policies"]] == ["eplb", "keel", "libra"]
        assert found["verdict"]["gain_lower"] > found["verdict"]["copy_cost_share"]
        assert found["redundancy"]["present"] == 4
        # Every rank said that it has 10,000 bytes; an expert has 1024.
        assert found["free_bytes"] == 10_000
        for level in found["redundancy"]["levels"]:
            assert level["fits"] is (level["extra_bytes_per_rank"] <= 10_000)
        assert set(found["shadow"]) == {"keel", "libra"}
        # Every rank told a KV cache of 64,000 bytes for tokens of 16 bytes.
        rows = found["replica_tradeoff"]["rows"]
        assert {row["rule"] for row in rows} == {"uniform", "craft"}
        for row in rows:
            assert row["kv_tokens"] == (64_000 - row["extra_bytes_per_rank"]) // 16

        kept = (await http.get(f"{BASE}/recommendation", params={"max_age_s": 600})).json()
        assert kept["at"] == found["at"]
        newer = (await http.get(f"{BASE}/recommendation", params={"max_age_s": 0})).json()
        assert newer["at"] > found["at"]
        assert newer["newest_step"] >= found["newest_step"]
        assert group.epoch == 0
        assert await controller.plans() == []
        assert not controller.failures()

        # The ranks stop as planned: what was known of them is no longer the present.
        for rank in group.ranks:
            await rank.send(Heartbeat(group.step, 10_000, 1 << 20, stopping=True))
        await until(lambda: controller.state("waiting_for_ranks"))
        status = (await http.get(BASE)).json()
        assert (status["reason"], status["balancedness_mean"]) == (Reason.GROUP_STOPPED, None)
        gone = await http.get(f"{BASE}/recommendation", params={"max_age_s": 600})
        assert (gone.status_code, gone.json()["reason"]) == (503, Reason.RANKS_MISSING)


async def test_a_fleet_that_cannot_carry_plans_out_is_not_asked_every_cycle(tmp_path):
    environment = {
        "PLANNER__MODE": "auto",
        "PLANNER__THRESHOLDS__RETRY_S": "600",
        "MIGRATION__PREPARE_DEADLINE_S": "1",
        "MIGRATION__BATCH_DEADLINE_S": "1",
    }
    async with Controller(tmp_path, **environment) as controller, Group() as group:
        group.ranks[2].votes = False
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        group.serve_on()

        async def waiting():
            rows = [row for row in await controller.decisions() if row["reason"] == Reason.COOLDOWN]
            return rows if len(rows) >= 5 else None

        rows = await until(waiting, within_s=60)
        assert {row["numbers"]["cooldown_s"] for row in rows} == {600.0}
        assert {row["numbers"]["failed_plans"] for row in rows} == {1.0}
        plans = await controller.plans()
        assert [plan["phase"] for plan in plans] == ["aborted"]
        assert group.epoch == 0
