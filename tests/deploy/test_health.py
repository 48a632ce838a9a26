"""The health that a running controller tells agrees with the alerts."""

import asyncio
import json
import re
import time
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from evenkeel_moe.api.words.health import health_of
from evenkeel_moe.ports.status import DELIVERED_BOUNDS
from evenkeel_moe.wire.link import Heartbeat
from tests.api.fakes import make_status
from tests.deploy.queries import RULES
from tests.deploy.test_rules import promtool
from tests.integration.controller_rig import Controller, Group
from tests.telemetry.test_load_check import HALVED
from tests.waiting import until

pytestmark = [pytest.mark.promtool, pytest.mark.integration, pytest.mark.timeout(300)]
REFRESH_S = 0.2
EVALUATED_S = 900
"""Seconds for which the alerts see the numbers; most wait for 10 minutes at most."""


def alerts_of(scrape: str, now: float, folder: Path) -> set[str]:
    """The alerts that fire if the numbers of a scrape stay as they are for 15 minutes.

    Prometheus counts the time of its tests from 0, so that moments are moved to have their age.
    """
    series = [{"series": 'up{job="evenkeel"}', "values": "1x15"}]
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            labels = {**sample.labels, "job": "evenkeel"}
            shown = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            moved = EVALUATED_S - now if sample.name.endswith("_timestamp_seconds") else 0.0
            values = f"{sample.value + moved!r}x15"
            series.append({"series": f"{sample.name}{{{shown}}}", "values": values})
    asked = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{EVALUATED_S}s",
        "exp_samples": [],
    }
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    done = promtool("test", "rules", file)
    told = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in told, told
    return set(re.findall(r'alertname="Evenkeel(\w+)"', told))


@HALVED
async def test_health_is_not_good_beside_an_alert_and_good_without_one(tmp_path):
    controller = Controller(
        tmp_path, PLANNER__MODE="observe", WINDOW__STEPS="256", METRICS__REFRESH_S=str(REFRESH_S)
    )
    async with controller, Group() as group:

        async def alerts_later(later_s: float) -> set[str]:
            """The alerts if nothing is heard for some seconds more."""
            async with httpx.AsyncClient(trust_env=False) as metrics:
                url = f"http://127.0.0.1:{controller.ports['metrics']}/metrics"
                text = (await metrics.get(url)).text
            return alerts_of(text, time.time() + later_s, tmp_path)

        async def moment() -> tuple[set[str], dict[str, str]]:
            """The alerts and the health now."""
            before = await controller.status()
            await asyncio.sleep(2 * REFRESH_S)  # The scrape tells of a moment between the answers.
            alerts, after = await alerts_later(0.0), await controller.status()
            seen = [deployment["health"] for deployment in (before, after)]
            assert not alerts or any(each["level"] != "good" for each in seen), (alerts, seen)
            return alerts, seen[-1]

        async def fires(alert: str, words: str) -> None:
            async def told() -> bool:
                alerts, health = await moment()
                return alert in alerts and words in health["text"]

            await until(told, within_s=60)

        async def is_quiet() -> bool:
            alerts, health = await moment()
            return not alerts and health["level"] == "good"

        async def waits_for_approval() -> bool:
            health = (await controller.status())["health"]
            alerts = await alerts_later(2000)
            return (
                health["text"] == "1 proposal waits for approval." and "ProposalWaiting" in alerts
            )

        await group.connect(controller.address)
        group.serve_on()
        await until(lambda: controller.events("planner_ready"), within_s=120)
        skewed = group.popularity
        await fires("BalancednessLow", "Balancedness is 0.")
        group.popularity = skewed * 0 + 1 / skewed.shape[1]
        await until(is_quiet, within_s=60)
        group.half_counted = [1]
        await fires("CountsImplausible", "The counts are in doubt: layers of one step routed")
        group.half_counted = []
        await until(is_quiet, within_s=60)
        decision, later = (await controller.status())["last_decision"], time.time() + 1000
        assert "NoDecisions" in await alerts_later(1000)
        silent = make_status(at_unix=later, last_decision=decision)
        assert "No cycle has ended for" in health_of(silent, DELIVERED_BOUNDS).text

        rank = group.ranks[1]
        await rank.send(Heartbeat(group.step, 10_000, 1 << 20, "an engine that stopped half way"))
        await fires("RankTrouble", "1 rank takes no more waves")
        await rank.send(Heartbeat(group.step, 10_000, 1 << 20, ""))
        await until(is_quiet, within_s=60)

        base = "/v1/deployments/demo"
        group.popularity = skewed
        (await controller.http.patch(f"{base}/policy", json={"mode": "propose"})).raise_for_status()
        await until(waits_for_approval, within_s=60)

        await rank.close()
        await fires("RankLost", "1 rank of 4 not connected")
