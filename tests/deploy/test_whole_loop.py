"""The loop as a whole, with every process real: ranks, store, controller and Prometheus."""

import asyncio
import time

import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from tests.deploy.queries import at_once
from tests.deploy.test_live import Prometheus
from tests.integration.whole import DEPLOYMENT, Fleet, Served, plans, whole
from tests.waiting import deadline, until

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.promtool,
    pytest.mark.integration,
    pytest.mark.timeout(600),
]
ALERT = "EvenkeelBalancednessLow"
BALANCEDNESS = f'max(evenkeel_balancedness_mean_ratio{{deployment="{DEPLOYMENT}"}})'
THRESHOLD = 0.75
"""Of the alert. The engine starts at 0.65, and plans reach 0.9."""


class Loop:
    """What an operator does and sees: the controller's REST API, and Prometheus."""

    def __init__(self, served: Served, fleet: Fleet, prometheus: Prometheus) -> None:
        self.served, self.fleet, self.prometheus = served, fleet, prometheus

    async def alert(self) -> str | None:
        self.fleet.poll()
        return (await self.prometheus.alerts()).get(ALERT)

    async def balancedness(self) -> float:
        """Return the newest value that Prometheus has."""
        return (await self.prometheus.over_time(BALANCEDNESS, time.time() - 5))[-1]

    async def fires(self) -> None:
        async def firing():
            return await self.alert() == "firing" and await self.balancedness() < THRESHOLD

        await until(firing, within_s=60)

    async def resolves(self) -> None:
        async def resolved():
            return await self.alert() is None and await self.balancedness() > THRESHOLD

        await until(resolved, within_s=60)

    async def committed(self, policy: str, known: set[str]) -> dict:
        """Return a new plan of a policy once it is carried out."""

        def new():
            self.fleet.poll()
            found = [plan for plan in plans(self.served, "committed") if plan["kind"] != "rollback"]
            return [plan for plan in found if plan["plan_id"] not in known]

        (plan, *_) = await asyncio.to_thread(self.served.wait, new, 60, f"a plan of {policy}")
        assert (plan["policy"], plan["moves"] > 0) == (policy, True)
        return plan

    def known(self) -> set[str]:
        return {plan["plan_id"] for plan in plans(self.served)}

    def back_to_the_start(self, name: str) -> None:
        """Return to the placement that the engine started with; nothing is planned meanwhile."""
        self.served.patch_policy(mode="propose")
        self.served.post("/rollback", {"to_epoch": 0, "plan_id": name}).raise_for_status()

        def done():
            self.fleet.poll()
            return self.served.get(f"/plans/{name}")["phase"] == "committed"

        self.served.wait(done, 60, "the rollback")
        self.served.post("/resume").raise_for_status()


async def is_stored(url: str, key: str) -> bool:
    client = connect(url, timeout_s=deadline(5))
    try:
        return bool(await client.exists(key))
    finally:
        await disconnect(client)


async def test_each_policy_plans_by_itself_and_by_request_and_the_alert_follows(tmp_path):
    store = EmbeddedValkey(tmp_path / "store")
    await store.start()
    settings = {"REDIS__URL": store.url, "PLANNER__MODE": "propose"}
    try:
        with whole(tmp_path, settings) as (served, fleet):
            rules = at_once(ALERT)
            async with Prometheus(tmp_path / "prom", served.metrics_port, rules) as prometheus:
                loop = Loop(served, fleet, prometheus)
                for policy in ("eplb", "craft", "gem"):
                    served.wait(served.status, 60, "the ranks")
                    served.patch_policy(policy=policy)
                    await loop.fires()
                    known = loop.known()
                    served.patch_policy(mode="auto")
                    own = await loop.committed(policy, known)
                    assert own["kind"] == "automatic"
                    await loop.resolves()
                    loop.back_to_the_start(f"back-1-{policy}")
                    await loop.fires()
                    known = loop.known()
                    asked = {"policy": policy, "plan_id": f"asked-{policy}", "approve": True}
                    served.post("/plans", asked).raise_for_status()
                    plan = await loop.committed(policy, known)
                    assert (plan["plan_id"], plan["kind"]) == (asked["plan_id"], "manual")
                    await loop.resolves()
                    loop.back_to_the_start(f"back-2-{policy}")
                assert await is_stored(store.url, f"evenkeel:{{{DEPLOYMENT}}}:window:prefill")
                # Every weight that a rank got from another is compared bit by bit at the end.
                report = fleet.finish()
                assert report.ok and fleet.mismatches == 0, report
    finally:
        await store.stop()
