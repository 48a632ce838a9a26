"""One controller process with ranks that register, report, vote and swap: planning end to end."""

import asyncio
from dataclasses import replace

import numpy as np
import psutil
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.wire.link import CostCurve, Heartbeat
from tests.integration.controller_rig import Controller, Group, NewController
from tests.waiting import until

pytestmark = pytest.mark.integration


def has_phase(controller, phase, kind="automatic"):
    async def ask():
        return [p for p in await controller.plans() if (p["phase"], p["kind"]) == (phase, kind)]

    return ask


async def test_the_controller_rebalances_by_itself_and_answers_a_change_of_traffic(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="auto") as controller, Group() as group:
        await group.join(controller)
        group.serve_on()
        first = await until(has_phase(controller, "committed"), within_s=60)
        assert group.epoch == 1
        assert first[0]["planned_because"] == Reason.BALANCE_BELOW_THRESHOLD
        assert first[0]["numbers"]["gain"] > 0.05
        balanced = await until(lambda: _balance(controller, above=0.8))
        before = first[0]["numbers"]["balancedness_mean"]
        assert balanced["balancedness_mean"] > before + 0.1
        assert balanced["epoch"] == 1
        assert {rank["epoch"] for rank in balanced["ranks"]} == {1}
        assert sum(rank["load_share"] for rank in balanced["ranks"]) == pytest.approx(1)

        # Let the window fill with the first traffic, then serve another.
        await until(lambda: _balance(controller, steps=300))
        group.popularity = group.draw(seed=7)
        await until(lambda: group.epoch >= 2, within_s=20)

        async def another():
            newest = await has_phase(controller, "committed")()
            return newest if newest[0]["plan_id"] != first[0]["plan_id"] else None

        second = (await until(another))[0]
        assert second["planned_because"] in (Reason.LOAD_CHANGED, Reason.BALANCE_BELOW_THRESHOLD)
        assert second["base_epoch"] == 1

        series = await controller.metrics()
        assert (
            series[
                'evenkeel_plans_ended_total{deployment="demo",phase="committed",reason="committed"}'
            ]
            >= 2
        )
        assert series['evenkeel_wave_duration_seconds_count{deployment="demo"}'] >= 2
        assert series['evenkeel_swap_stall_seconds_count{deployment="demo"}'] >= 8
        assert series['evenkeel_report_steps_total{deployment="demo"}'] >= 4 * 300
        reasons = {row["reason"] for row in await controller.decisions()}
        assert reasons & {Reason.PLAN_STARTED}
        assert not controller.failures()


async def _balance(controller, *, above=0.0, steps=0):
    status = await controller.status()
    mean = status.get("balancedness_mean")
    return status if mean is not None and mean > above and status["window_steps"] >= steps else None


async def test_proposals_wait_for_approval_and_operators_decide(tmp_path):
    environment = {"PLANNER__MODE": "propose", "PLANNER__THRESHOLDS__COOLDOWN_S": "0"}
    async with Controller(tmp_path, **environment) as controller, Group() as group:
        http = controller.http
        await group.join(controller)
        group.serve_on()
        (proposed,) = await until(has_phase(controller, "proposed"), within_s=60)
        assert group.epoch == 0
        base = "/v1/deployments/demo"

        # A plan by hand waits for approval; its id names it for good.
        body = {"plan_id": "by-hand", "limits": {"max_moves": 100}}
        made = await http.post(f"{base}/plans", json=body)
        assert (made.status_code, made.json()["phase"]) == (201, "proposed")
        again = await http.post(f"{base}/plans", json=body)
        assert again.json()["created_at"] == made.json()["created_at"]
        other = await http.post(f"{base}/plans", json={**body, "limits": {"max_moves": 7}})
        assert (other.status_code, other.json()["reason"]) == (409, Reason.ID_REUSED)

        # Approving one makes the others stale.
        done = await http.post(f"{base}/plans/{proposed['plan_id']}/approve")
        assert done.status_code == 202
        await until(lambda: group.epoch == 1)
        assert (await until(has_phase(controller, "committed")))[0]["approved_by"] == "admin"
        stale = await http.post(f"{base}/plans/by-hand/approve")
        assert (stale.status_code, stale.json()["reason"]) == (409, Reason.STALE_BASE)

        # Back to where it was; automatic plans then wait for a person, also in auto mode.
        back = await http.post(f"{base}/rollback")
        assert back.status_code == 202, back.json()
        await until(lambda: group.epoch == 2)
        assert group.placement.digest == type(group.placement).initial(group.shape).digest
        assert (await controller.status())["held"]
        changed = await http.patch(
            f"{base}/policy", json={"mode": "auto", "thresholds": {"min_gain": 0.02}}
        )
        assert changed.json()["thresholds"]["min_gain"] == 0.02
        await until(lambda: controller.decided(Reason.HELD_AFTER_ROLLBACK))
        wrong = await http.patch(f"{base}/policy", json={"thresholds": {"min_gian": 1}})
        assert wrong.status_code == 422
        assert "min_gian" in wrong.json()["detail"]
        assert (await http.post(f"{base}/resume")).status_code == 204
        assert (await http.post(f"{base}/freeze", json={"seconds": 600})).status_code == 204
        await until(lambda: controller.decided(Reason.FROZEN))
        assert group.epoch == 2
        refused = await http.post(f"{base}/plans", json={"approve": True})
        assert (refused.status_code, refused.json()["reason"]) == (409, Reason.FROZEN)
        assert (await http.post(f"{base}/resume")).status_code == 204
        await until(lambda: group.epoch == 3, within_s=30)
        story = (await http.get(f"{base}/plans/{proposed['plan_id']}/story")).json()
        assert [row["event"] for row in story["rows"]][:2] == ["created", "approved"]


async def test_an_explicit_target_is_reached_and_an_impossible_one_refused(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="observe") as controller, Group() as group:
        await group.join(controller)
        group.serve_on()
        await until(lambda: _balance(controller, steps=100))
        url = "/v1/deployments/demo/plans"
        rows = group.placement.phy2log.copy()
        first, last = set(rows[0, :3]), set(rows[0, 9:])
        mine = next(slot for slot in range(3) if rows[0, slot] not in last)
        its = next(slot for slot in range(9, 12) if rows[0, slot] not in first)
        rows[0, [mine, its]] = rows[0, [its, mine]]
        target = {"physical_to_logical": rows.tolist()}
        made = await controller.http.post(url, json={"target": target, "approve": True})
        assert made.status_code == 202, made.json()
        # The ranks swap shortly before the controller has all their answers and ends the plan.
        await until(has_phase(controller, "committed", kind="manual"))
        assert group.epoch == 1
        assert sorted(group.placement.phy2log[0]) == sorted(rows[0])
        rows[1] = 0
        target = {"physical_to_logical": rows.tolist()}
        refused = await controller.http.post(url, json={"target": target})
        assert (refused.status_code, refused.json()["reason"]) == (
            422,
            Reason.EXPERT_WITHOUT_REPLICA,
        )
        unknown = await controller.http.post(url, json={"policy": "best"})
        assert (unknown.status_code, unknown.json()["reason"]) == (422, Reason.UNKNOWN_POLICY)


async def test_it_stops_cleanly_and_leaves_no_process(tmp_path):
    async with NewController(tmp_path) as controller, Group() as group:
        await group.connect(controller.address)
        await until(lambda: controller.events("planner_ready"), within_s=60)
        children = psutil.Process(controller.process.pid).children(recursive=True)
        assert len(children) >= 2, "a store and a planner at least"
        assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o600
        assert await controller.stop() == 0
        assert controller.events("stopped")
        assert not controller.failures()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
        assert alive == []


# --- recommendations, and fleets that cannot carry plans out --------------------------------------


BASE = "/v1/deployments/demo"


async def test_a_recommendation_moves_nothing(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="observe") as controller, Group() as group:
        http = controller.http
        assert (await http.get(f"{BASE}/recommendation")).status_code == 404
        await group.join(controller)
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

        wider = {"to_ranks": 8, "multi_node_bytes": 160}
        now, eight = (await http.get(f"{BASE}/capacity", params=wider)).json()["rows"]
        assert (now["ranks"], now["kv_tokens"], eight["ranks"]) == (4, 4000, 8)
        assert eight["kv_tokens"] > now["kv_tokens"]
        assert eight["gain"] > 0 and eight["bytes_to_move"] == 1024 * eight["copies"] > 0
        wrong = await http.get(f"{BASE}/capacity", params={"retire": 4})
        assert (wrong.status_code, wrong.json()["reason"]) == (422, Reason.INVALID_INPUT)

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

        # They start again with a fourth slot in each of 3 layers, and tell the same KV cache.
        larger = replace(group.shape, slots_per_rank=4)
        async with Group(shape=larger, generation="g-2") as again:
            await again.connect(controller.address)

            async def compared():
                answer = (await http.get(f"{BASE}/recommendation")).json()
                promise = answer.get("kv_promise")
                return promise and promise["reported_tokens"] and answer

            answer = await until(compared)
            promised = (64_000 - 3 * 1024) // 16
            promise = answer["kv_promise"]
            assert (promise["promised_tokens"], promise["reported_tokens"]) == (promised, 4000)
            assert promise["ratio"] == 4000 / promised
            assert answer["words"][-1] == promise["words"]


async def test_a_fleet_that_cannot_carry_plans_out_is_not_asked_every_cycle(tmp_path):
    environment = {
        "PLANNER__MODE": "auto",
        "PLANNER__THRESHOLDS__RETRY_S": "600",
        "MIGRATION__PREPARE_DEADLINE_S": "1",
        "MIGRATION__BATCH_DEADLINE_S": "1",
    }
    async with Controller(tmp_path, **environment) as controller, Group() as group:
        group.ranks[2].votes = False
        await group.join(controller)
        group.serve_on()

        async def waiting():
            rows = [row for row in await controller.decisions() if row["reason"] == Reason.COOLDOWN]
            return rows if len(rows) >= 5 else None

        rows = await until(waiting, within_s=60)
        assert {row["numbers"]["cooldown_s"] for row in rows} == {600.0}
        assert {row["numbers"]["failed_plans"] for row in rows} == {1.0}
        (aborted,) = await controller.plans()
        assert (aborted["phase"], aborted["reason"]) == ("aborted", Reason.PREPARE_DEADLINE)
        assert aborted["error"]
        assert group.epoch == 0
        assert all(rank.epoch == 0 for rank in group.ranks)


# --- a real controller in `auto` plans for a slow rank, although tokens are balanced --------------


SHAPE = ModelShape(1, 8, 4, 2, 2, 1024)
POPULARITY = np.array([1.24, 1.16, 1.08, 1.0, 1.0, 0.92, 0.84, 0.76]) / 8
SLOW_RANK = 3
SLOWNESS = 1.12


class EvenGroup(Group):
    """Two experts of different popularity on each rank, which add up to the same load."""

    def __init__(self) -> None:
        super().__init__(shape=SHAPE)
        self.popularity = POPULARITY[None]
        self.placement = Placement(np.array([[0, 7, 1, 6, 2, 5, 3, 4]], np.int32), 4, 8)
        for rank in self.ranks:
            rank.placement = self.placement

    def route(self, num_steps: int, tokens: int = 512) -> list[LoadReport]:
        return super().route(num_steps, tokens)


def curve(rank: int) -> CostCurve:
    """Seconds that rise by equal steps with every eight tokens."""
    per_token = 1e-6 * (SLOWNESS if rank == SLOW_RANK else 1.0)
    return CostCurve(8, tuple(8 * per_token * np.arange(1, 257)), per_token)


async def test_a_slow_rank_is_planned_for_once_all_ranks_told_their_curves(tmp_path):
    environment = {"PLANNER__MODE": "auto", "PLANNER__POLICY": "keel"}
    async with Controller(tmp_path, **environment) as controller, EvenGroup() as group:
        await group.join(controller)
        await until(lambda: controller.events("planner_ready"), within_s=120)
        group.serve_on()

        async def decided(reason):
            rows = await controller.decisions()
            return next((row for row in rows if row["reason"] == reason), None)

        by_tokens = await until(lambda: decided("balance_above_threshold"), within_s=60)
        assert by_tokens["numbers"]["balancedness_mean"] > 0.93
        status = await controller.status()
        assert (status["cost_model"]["source"], status["time_balance"]) == ("tokens", None)

        for rank in group.ranks:
            await rank.send(curve(rank.rank))
        start = await until(lambda: decided("plan_started"), within_s=60)
        assert start["numbers"]["balancedness_mean"] > 0.93
        assert start["numbers"]["time_balance"] < 0.93
        assert start["numbers"]["gain_lower"] > 0

        async def improved():
            found = await controller.status()
            balance = found["time_balance"]
            return group.epoch > 0 and balance and balance > start["numbers"]["time_balance"] + 0.02

        await until(improved, within_s=60)
        load = POPULARITY[group.placement.phy2log.reshape(4, 2)].sum(axis=1)
        assert load.argmin() == SLOW_RANK
        status = await controller.status()
        assert status["cost_model"]["source"] == "profiled"
        assert status["cost_model"]["unit"] == "s"
        series = await controller.metrics()
        assert series['evenkeel_cost_model_info{deployment="demo",source="profiled"}'] == 1
        assert 0 < series['evenkeel_time_balance_ratio{deployment="demo"}'] <= 1
