"""Compares the metrics of a running controller with dashboards, alerts and documents."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.wire.link import NotLeader, RegistrationOutcome
from tests.deploy.chart import ROOT
from tests.deploy.live import DEPLOYMENT, controller_with_a_past, live_through_everything
from tests.deploy.queries import (
    ALERT_LABELS,
    RULES,
    TARGET_LABELS,
    annotation_queries,
    panel_queries,
    rule_queries,
)
from tests.deploy.test_rules import promtool
from tests.integration.controller_rig import Controller, Group, Rank
from tests.waiting import deadline, until

pytestmark = [pytest.mark.deploy, pytest.mark.integration, pytest.mark.timeout(300)]
PARTS = {"_bucket", "_sum", "_count"}


def described_metrics() -> dict[str, tuple[str, set[str], str]]:
    """Name -> (type, labels, unit) as docs/metrics.md has them."""
    rows = re.findall(
        r"^\| `((?:evenkeel|process)_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|",
        (ROOT / "docs" / "metrics.md").read_text(),
        re.M,
    )
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), unit.strip())
        for name, kind, labels, unit in rows
    }


@pytest.mark.slow
async def test_everything_shown_is_exported_and_everything_exported_is_described(tmp_path):
    async with controller_with_a_past(tmp_path) as (controller, group, seen):
        await live_through_everything(controller, group, seen)
        (tmp_path / "scrape").write_text(seen.text)

    for query in [*rule_queries(), *panel_queries(), *annotation_queries()]:
        assert query.metrics or re.search(r"\b(up|ALERTS)\{", query.expr), query
        assert query.metrics <= seen.names, (query.where, query.metrics - seen.names)
        known = {label for name in query.metrics for label in seen.labels(name)} | TARGET_LABELS
        if "ALERTS{" in query.expr:
            known |= ALERT_LABELS
        assert query.labels <= known, (query.where, query.labels - known)

    described = described_metrics()
    # Nothing of these happens here: no operator froze the deployment.
    never = {"evenkeel_frozen_until_timestamp_seconds"}
    exported = {
        name + "_total" if kind == "counter" else name: kind for name, kind in seen.families.items()
    }
    assert set(described) == set(exported)
    for name, (kind, labels, _) in described.items():
        assert kind == exported[name], name
        if name not in never:
            sample = name + "_count" if kind == "histogram" else name
            assert seen.labels(sample) == labels, name


async def test_of_two_replicas_only_the_leader_tells_of_a_deployment(tmp_path):
    store = EmbeddedValkey(tmp_path / "store")
    await store.start()
    environment = {"REDIS__URL": store.url, "LEADER__REPLICAS": "2"}
    one = Controller(tmp_path / "one", **environment, LEADER__REPLICA_ID="one")
    two = Controller(tmp_path / "two", **environment, LEADER__REPLICA_ID="two")

    async def told(controller, leads):
        series = await controller.metrics()
        if series.get('evenkeel_leading{deployment="demo"}') != leads:
            return None
        return {name for name in series if name.startswith(("evenkeel_rank_", "evenkeel_epoch"))}

    try:
        async with one, two, Group() as group:
            await group.connect(one.address)
            await until(lambda: one.state("ready"))
            stray = Rank(group, 0)
            assert isinstance(await stray.connect(two.address), NotLeader)
            await stray.close()
            assert await until(lambda: told(one, 1))
            await until(lambda: _is_empty(told(two, 0)))

            await one.stop()
            await until(lambda: _lead(group, two))
            assert await until(lambda: told(two, 1))
    finally:
        await store.stop()


async def _is_empty(asked):
    return await asked == set()


async def _lead(group, controller) -> bool:
    """Connect every rank again, as links do, until the replica takes them."""
    for rank in group.ranks:
        await rank.close()
        await rank.connect(controller.address)
    answers = [rank.answer for rank in group.ranks]
    return all(
        getattr(answer, "outcome", None) is RegistrationOutcome.ACCEPTED for answer in answers
    )


def test_units_are_those_of_the_names():
    for name, (kind, _, unit) in described_metrics().items():
        for suffix, expected in (("seconds", "s"), ("bytes", "bytes"), ("ratio", "1")):
            if suffix in name.removesuffix("_total").split("_")[-3:] and "per_token" not in name:
                wanted = "Unix s" if "timestamp" in name else expected
                assert unit == wanted, name
        assert kind in ("counter", "gauge", "histogram")


# --- with the real Prometheus ---


class Prometheus:
    """Debian's, on a free port and a folder of its own."""

    def __init__(self, folder: Path, target: int, rules: dict | None = None) -> None:
        binary = shutil.which("prometheus")
        assert binary is not None, (
            "prometheus is not on the path; on Debian: apt-get install prometheus"
        )
        self.port = free_ports(1)[0]
        config = {
            "global": {
                "scrape_interval": "500ms",
                "scrape_timeout": "400ms",
                "evaluation_interval": "500ms",
            },
            "scrape_configs": [
                {"job_name": "evenkeel", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            ],
        }
        folder.mkdir(parents=True)
        if rules is not None:
            (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
            config["rule_files"] = ["rules.yaml"]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            dying_with_parent(
                [
                    binary,
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ]
            ),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=deadline(20)
        )

    async def __aenter__(self) -> "Prometheus":
        await until(self.ready, within_s=60)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 30)
        self.log.close()

    async def ready(self) -> bool:
        assert self.process.poll() is None, f"see {self.log.name}"
        try:
            return (await self.http.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def over_time(self, expr: str, start: float) -> list[float]:
        """Every finite value of a query since `start`."""
        span: dict[str, str | float] = {
            "query": expr,
            "start": start,
            "end": time.time(),
            "step": 1,
        }
        answer = (await self.http.get("/api/v1/query_range", params=span)).json()
        assert answer["status"] == "success", (expr, answer)
        values = [float(value) for row in answer["data"]["result"] for _, value in row["values"]]
        return [value for value in values if value - value == 0]

    async def alerts(self) -> dict[str, str]:
        """Alert name -> state."""
        answer = (await self.http.get("/api/v1/alerts")).json()
        return {one["labels"]["alertname"]: one["state"] for one in answer["data"]["alerts"]}


@pytest.mark.promtool
async def test_every_panel_and_annotation_has_data_after_a_real_run(tmp_path):
    async with controller_with_a_past(tmp_path / "controller") as (controller, group, seen):
        start = time.time()
        rules = yaml.safe_load(RULES.read_text())
        async with Prometheus(
            tmp_path / "prometheus", controller.ports["metrics"], rules
        ) as prometheus:
            await live_through_everything(
                controller, group, seen, lambda name: prometheus.over_time(name, start)
            )
            missing = {query.where: query for query in [*panel_queries(), *annotation_queries()]}

            async def all_have_data():
                """Rates need two scrapes after the last thing happened."""
                for where, query in list(missing.items()):
                    if await prometheus.over_time(query.filled(DEPLOYMENT), start):
                        del missing[where]
                return not missing

            with contextlib.suppress(AssertionError):
                await until(all_have_data, within_s=30, every_s=1)
            assert sorted(missing) == []
            checked = promtool("check", "metrics", stdin=seen.text)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
