"""Records that outlive a process, and records that are removed: plans, freezes, deployments."""

import asyncio
import os
import signal
import time

import grpc
import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.errors import Reason
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.from_rank import encode_rank_message
from tests.contracts.conftest import bounded, valkey
from tests.contracts.test_stores import DEMO, every_plan, make_record
from tests.integration.controller_rig import Controller, Group
from tests.waiting import deadline, until

__all__ = ["valkey"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PLANS = "/v1/deployments/demo/plans"


def swapped_body(group, plan_id, layer=0, **changes):
    """A request to exchange two ranks' slots in one layer."""
    target = group.placement.phy2log.copy()
    row = target[layer].reshape(group.shape.num_ranks, -1)
    row[[0, 1]] = row[[1, 0]]
    return {"plan_id": plan_id, "target": {"physical_to_logical": target.tolist()}, **changes}


async def _ready(controller, group):
    await group.join(controller)
    await until(lambda: controller.events("planner_ready"), within_s=120)
    serving = group.serve_on()
    await until(lambda: controller.counted(96))
    return serving


async def _killed_and_back(controller, group, serving):
    """SIGKILL and a new life; the ranks serve on for both."""
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await controller.stop(signal.SIGKILL)
    await until(lambda: all(rank.call.done() for rank in group.ranks))
    await controller.start()
    await group.reconnect(controller.address)
    await until(lambda: controller.state("ready"))
    group.serve_on()


async def test_plans_keep_their_id_over_a_restart_and_their_history_is_paged(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="propose") as controller, Group() as group:
        serving = await _ready(controller, group)
        body = swapped_body(group, "mine", approve=True)
        first = await until(lambda: _answered(controller, body))
        assert first.status_code == 202, first.text

        async def committed():
            return (await controller.http.get(f"{PLANS}/mine")).json()["phase"] == "committed"

        await until(committed)
        for number in range(4):
            wanted = swapped_body(group, f"later-{number}")
            answer = await until(lambda body=wanted: _answered(controller, body))
            assert answer.status_code == 201, answer.text
        before = await controller.plans()
        story = (await controller.http.get(f"{PLANS}/mine/story")).json()["rows"]
        assert len(story) >= 3

        await _killed_and_back(controller, group, serving)

        # The same request by any caller is the same plan; another body is refused.
        again = await until(lambda: _answered(controller, body))
        assert again.status_code == 202, again.text
        assert again.json()["phase"] == "committed"
        assert again.json()["created_at"] == first.json()["created_at"]
        other = await until(lambda: _answered(controller, body | {"approve": False}))
        assert (other.status_code, other.json()["reason"]) == (409, Reason.ID_REUSED)
        rows = (await controller.http.get(f"{PLANS}/mine/story")).json()["rows"]
        assert rows[: len(story)] == story
        assert [row["event"] for row in rows[len(story) :]] in ([], ["measured"])

        seen, token = [], None
        while True:
            query = {"page_size": 2} | ({"page_token": token} if token else {})
            page = (await controller.http.get(PLANS, params=query)).json()
            assert len(page["items"]) <= 2
            seen += [plan["plan_id"] for plan in page["items"]]
            token = page["next_page_token"]
            if token is None:
                break
        manual = [plan["plan_id"] for plan in before if plan["kind"] == "manual"]
        assert [plan_id for plan_id in seen if plan_id in manual] == manual
        assert len(seen) == len(set(seen))


async def _answered(controller, body):
    """The answer; a busy machine may cost the lease for a moment, and a client then asks again."""
    answer = await controller.http.post(PLANS, json=body)
    return answer if answer.status_code != 503 else None


async def test_a_freeze_ends_by_itself_also_over_a_restart(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="propose") as controller, Group() as group:
        serving = await _ready(controller, group)
        freeze = "/v1/deployments/demo/freeze"
        frozen = await controller.http.post(freeze, json={"seconds": 3600})
        assert frozen.is_success, frozen.text
        until_unix = (await controller.status())["frozen_until_unix"]
        refused = await controller.http.post(PLANS, json=swapped_body(group, "early", approve=True))
        assert (refused.status_code, refused.json()["reason"]) == (409, Reason.FROZEN)

        await _killed_and_back(controller, group, serving)
        assert (await controller.status())["frozen_until_unix"] == pytest.approx(
            until_unix, abs=1.0
        )
        refused = await controller.http.post(PLANS, json=swapped_body(group, "later", approve=True))
        assert (refused.status_code, refused.json()["reason"]) == (409, Reason.FROZEN)
        # A freeze ends at its time without a request. Plans are then accepted again, and the copies
        # are verified as before (R4).
        ends = time.time() + 1
        assert (await controller.http.post(freeze, json={"seconds": 1})).is_success

        async def accepted():
            answer = await controller.http.post(
                PLANS, json=swapped_body(group, "late", approve=True)
            )
            return answer.is_success

        await until(accepted, within_s=40)
        assert time.time() >= ends
        await until(lambda: group.epoch > 0)
        assert len({rank.placement.digest for rank in group.ranks}) == 1


async def test_a_deployment_that_left_is_forgotten_with_its_series(tmp_path):
    async with Controller(tmp_path, INGEST__FORGET_AFTER_S="2") as controller:
        async with Group("leaver") as group:
            await group.join(controller)
            await group.serve(32)
            await until(lambda: _shown(controller, "leaver"))
        # A deployment that never registered is removed too, and so is a rank that disconnected
        # while it waited.
        async with Group("stranger") as group:
            await group.ranks[0].connect(controller.address)
            await until(lambda: _listed(controller, "stranger"))
        await until(lambda: _gone(controller, "leaver"), within_s=30)
        await until(lambda: _gone(controller, "stranger"), within_s=30)
        labels = [
            name for name in await controller.metrics() if "leaver" in name or "stranger" in name
        ]
        assert labels == []
        assert (await controller.http.get("/v1/deployments/leaver")).status_code == 404
        # Its records are there when it comes back.
        async with Group("leaver") as group:
            await group.join(controller)
            await group.serve(8)
            await until(lambda: _shown(controller, "leaver"))


async def test_a_rank_that_hung_up_while_the_lease_was_sought_leaves_nothing(tmp_path, valkey):
    """A chaos run found that its session, and so its deployment, was never removed."""
    settings = {"REDIS__URL": valkey.url, "REDIS__TIMEOUT_S": "0.5", "INGEST__FORGET_AFTER_S": "2"}
    async with Controller(tmp_path / "data", **settings) as controller:
        os.kill(valkey.pid, signal.SIGSTOP)
        try:
            async with (
                Group("hasty") as group,
                grpc.aio.insecure_channel(controller.address) as channel,
            ):
                for rank in group.ranks:
                    call = agent_pb2_grpc.RankLinkStub(channel).Attach()
                    await call.write(encode_rank_message(rank.hello()))
                    # For 0.5 s the store is asked for the name; then for 3 s for the lease.
                    await asyncio.sleep(1.5)
                    call.cancel()
        finally:
            os.kill(valkey.pid, signal.SIGCONT)
        await until(lambda: _forgotten(controller, "hasty"), within_s=30)
        assert not controller.failures()


async def _forgotten(controller, name):
    return name in {row["deployment"] for row in controller.events("deployment_forgotten")}


async def _shown(controller, name):
    return any(f'deployment="{name}"' in series for series in await controller.metrics())


async def _listed(controller, name):
    return (await controller.http.get(f"/v1/deployments/{name}")).status_code == 200


async def _gone(controller, name):
    forgotten = {row["deployment"] for row in controller.events("deployment_forgotten")}
    return name in forgotten and not await _shown(controller, name)


async def test_records_of_a_deployment_expire_after_its_last_leader(valkey):
    client = connect(valkey.url, timeout_s=deadline(2))
    store = bounded(RedisDeploymentStore(client), record_age_s=3.0)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    await store.store_plan(make_record(), lease.term)
    await store.store_document(DEMO, "policy", {"mode": "auto"}, lease.term)
    # While a lease is renewed, nothing may expire for longer than the age of records.
    for _ in range(4):
        await asyncio.sleep(1.0)
        assert await store.renew_lease(DEMO, lease, 60)
    assert len(await every_plan(store)) == 1
    assert await store.fetch_document(DEMO, "policy") is not None

    async def expired():
        await store.acquire_lease(DEMO.__class__("other"), "a", 60, 0)
        return await every_plan(store) == [] and DEMO not in await store.deployments()

    await until(expired, within_s=30, every_s=1.0)
    assert await store.fetch_document(DEMO, "policy") is None
    await disconnect(client)
