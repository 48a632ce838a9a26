"""Leads a real controller through every event that its metrics count.

Plans are committed and aborted, reports are refused, and steps are dropped.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire.link import Heartbeat
from tests.adapters.serving import Authority
from tests.integration.controller_rig import Controller, Group
from tests.waiting import deadline, until

DEPLOYMENT = "demo"
ENVIRONMENT = {
    "PLANNER__MODE": "auto",
    "METRICS__LAYER_RANK_SERIES": "64",
    "PLANNER__THRESHOLDS__RETRY_S": "1",
    "MIGRATION__PREPARE_DEADLINE_S": "8",
    "MIGRATION__BATCH_DEADLINE_S": "2",
    "INGEST__MAX_NEW_DEPLOYMENTS": "1",
}


class TlsController(Controller):
    """Serves the REST API with a certificate."""

    def __init__(self, folder: Path, **environment: str) -> None:
        (folder / "tls").mkdir(parents=True)
        self._authority = Authority(folder / "tls")
        self._authority.issue("rest")
        files = {"CERT": "rest.pem", "KEY": "rest.key"}
        tls = {f"REST__TLS_{part}_FILE": str(folder / "tls" / name) for part, name in files.items()}
        super().__init__(folder, **environment, **tls)

    async def start(self) -> None:
        await super().start()
        await self.http.aclose()
        self.http = httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.ports['rest']}",
            headers=self.http.headers,
            timeout=self.http.timeout,
            trust_env=False,
            verify=ssl.create_default_context(cafile=self._authority.folder / "ca.pem"),
        )


class MeasuredGroup(Group):
    """Ranks that time their compute; rank 3 is twice as slow."""

    def route(self, num_steps: int, tokens: int = 64) -> list[LoadReport]:
        def timed(report: LoadReport) -> LoadReport:
            pace = 2e-6 if report.rank == 3 else 1e-6
            steps = report.steps.copy()
            steps["compute_s"] = report.counts.sum(axis=(1, 2)) * pace
            return replace(report, steps=steps)

        return [timed(report) for report in super().route(num_steps, tokens)]


@dataclass
class Seen:
    """The results of scrapes: (sample name, label names) of all series seen, and the last text."""

    series: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    families: dict[str, str] = field(default_factory=dict)
    """Name -> type."""
    text: str = ""

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.series}

    def labels(self, name: str) -> set[str]:
        return {label for other, labels in self.series if other == name for label in labels}

    def take(self, text: str) -> None:
        self.text = text
        for family in text_string_to_metric_families(text):
            self.families[family.name] = family.type
            for sample in family.samples:
                self.series.add((sample.name, frozenset(sample.labels)))


async def _scrape(controller: Controller, seen: Seen) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            seen.take(
                (await client.get(f"http://127.0.0.1:{controller.ports['metrics']}/metrics")).text
            )
            await asyncio.sleep(0.2)


def ended(controller: Controller, phase: str, at_least: int):
    async def ask():
        plans = [plan for plan in await controller.plans(DEPLOYMENT) if plan["phase"] == phase]
        return len(plans) >= at_least and plans

    return ask


@contextlib.asynccontextmanager
async def controller_with_a_past(folder: Path) -> AsyncIterator[tuple[Controller, Group, Seen]]:
    """Yield a controller with serving ranks, and the results of its scrapes so far.

    A plan was committed and another was aborted by its deadline; a report was refused, and steps
    were dropped. The store had a record that nobody can read.
    """
    seen = Seen()
    async with (
        _store_with_a_bad_record(folder / "store") as url,
        TlsController(folder, **ENVIRONMENT, REDIS__URL=url) as controller,
        MeasuredGroup(DEPLOYMENT) as group,
    ):
        scraping = asyncio.create_task(_scrape(controller, seen))
        try:
            await group.connect(controller.address)
            await until(lambda: controller.state("ready", DEPLOYMENT))
            await until(lambda: controller.events("planner_ready"), within_s=120)
            group.serve_on()
            yield controller, group, seen
        finally:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)


@contextlib.asynccontextmanager
async def _store_with_a_bad_record(folder: Path) -> AsyncIterator[str]:
    store = EmbeddedValkey(folder)
    await store.start()
    try:
        client = connect(store.url, timeout_s=deadline(5))
        await client.zadd("evenkeel:seen", {b"\xff": 1.0})
        await disconnect(client)
        yield store.url
    finally:
        await store.stop()


async def live_through_everything(
    controller: Controller,
    group: Group,
    seen: Seen,
    noticed: Callable[[str], Awaitable[object]] | None = None,
) -> None:
    """Cause every event that has a metric.

    Args:
        noticed: returns True once another reader has seen a metric; short-lived states are held
            until then.
    """

    async def shown(name: str) -> bool:
        return name in seen.names and (noticed is None or bool(await noticed(name)))

    await until(ended(controller, "committed", 1), within_s=60)
    # Only decisions that looked at the window have it, and few of those follow.
    await until(lambda: shown("evenkeel_time_balance_ratio"), within_s=60)
    rank = group.ranks[0]
    report = group.route(1)[0]
    await rank.send(replace(report, dropped_steps=3))
    await rank.send(_of_an_epoch_that_never_was(group.route(1)[0]))
    await until(lambda: "evenkeel_report_steps_rejected_total" in seen.names)
    await until(lambda: "evenkeel_report_steps_dropped_total" in seen.names)
    async with Group("new-1") as first, Group("new-2") as second:
        for new in (first, second):
            await new.ranks[0].connect(controller.address)
        await until(lambda: "evenkeel_deployments_refused_total" in seen.names)
        await first.ranks[0].send_wire(agent_pb2.RankMessage())
        await until(lambda: "evenkeel_peers_refused_total" in seen.names)
    await rank.send(Heartbeat(group.step, 10_000, 1 << 20, "an engine that stopped half way"))
    await until(lambda: shown("evenkeel_rank_trouble"))
    await rank.send(Heartbeat(group.step, 10_000, 1 << 20, ""))
    for one in group.ranks:
        one.votes = False
    group.popularity = group.draw(seed=7)
    await until(lambda: shown("evenkeel_plan_phase"), within_s=60)
    await until(ended(controller, "aborted", 1), within_s=60)
    await until(lambda: "evenkeel_last_plan_failed_timestamp_seconds" in seen.names)
    for one in group.ranks:
        one.votes = True
    await until(ended(controller, "committed", 2), within_s=60)
    await until(lambda: "evenkeel_last_plan_gain_ratio" in seen.names)
    base = f"/v1/deployments/{DEPLOYMENT}"
    (await controller.http.post(f"{base}/rollback", json={"plan_id": "back"})).raise_for_status()
    await until(lambda: shown("evenkeel_held_reason"), within_s=60)
    await until(ended(controller, "committed", 3), within_s=60)
    (await controller.http.post(f"{base}/resume")).raise_for_status()
    (await controller.http.patch(f"{base}/policy", json={"mode": "propose"})).raise_for_status()
    group.popularity = group.draw(seed=11)
    await until(lambda: shown("evenkeel_proposal_expires_timestamp_seconds"), within_s=60)
    (await controller.http.post(f"{base}/freeze", json={"seconds": 60})).raise_for_status()
    await until(lambda: shown("evenkeel_frozen_until_timestamp_seconds"), within_s=60)


def _of_an_epoch_that_never_was(report: LoadReport) -> LoadReport:
    steps = report.steps.copy()
    steps["epoch"] = 10_000
    return replace(report, steps=steps)
