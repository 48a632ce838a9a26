"""What the honest fleet and an operator see while hostile peers are at work."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import httpx
import psutil

from tests.integration.controller_rig import Controller, Group

_DRIFT_S = 20.0
_LOOK_S = 5.0
_ASK_S = 0.5
_STEPS_WITHIN_S = 60.0
_LOSSES = ("lease_lost", "deployment_failed", "rank_displaced", "lease_not_acquired")
_FAILURES = ("task_failed", "deployment_failed", "ended_deployment_failed", "figures_failed")
_MOST_KEPT = 2000


@dataclass
class Fleet:
    """Honest groups, and how the controller treats them.

    Args:
        controller: under attack.
        groups: connected, and serving.
    """

    controller: Controller
    groups: list[Group]
    failures: list[str] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    """Seconds until an operator's request was answered: at least as late as the event loop was."""
    refused_requests: int = 0
    """Requests of the operator that were not answered: others took all connections."""
    most_bytes: int = 0
    """The largest memory of the controller's process that was seen."""
    lines: int = 0
    """Log lines of the controller."""

    def __post_init__(self) -> None:
        self.process = psutil.Process(self.controller.process.pid)
        self.names = {str(group.deployment) for group in self.groups}
        self._steps: dict[str, tuple[float, float]] = {}

    async def drift(self) -> None:
        """Let the traffic change, so that plans are wanted."""
        for seed in range(1, 1 << 30):
            await asyncio.sleep(_DRIFT_S)
            for number, group in enumerate(self.groups):
                group.popularity = group.draw(seed * len(self.groups) + number)

    async def ask(self) -> None:
        """Ask if the controller is well, and note how long the answer takes."""
        while True:
            began = time.monotonic()
            try:
                await self.controller.http.get("/healthz", timeout=30.0)
                self.answers_s.append(time.monotonic() - began)
            except httpx.HTTPError:
                self.refused_requests += 1
            await asyncio.sleep(_ASK_S)

    async def look(self) -> None:
        """Look for losses until there is one."""
        while not self.failures:
            await asyncio.sleep(_LOOK_S)
            self.judge()
            with contextlib.suppress(httpx.HTTPError):
                self.judge_steps(await self.controller.metrics())

    def judge(self) -> None:
        """Note what was lost since the last look, and forget the log lines that were read."""
        if self.controller.process.returncode is not None:
            self.failures.append(f"the controller ended: {self.controller.noise[-3:]}")
            return
        for group in self.groups:
            lost = [rank.rank for rank in group.ranks if rank.call.done()]
            if lost:
                self.failures.append(f"the streams of ranks {lost} of {group.deployment} ended")
        for row in self.controller.log:
            event, honest = row.get("event"), row.get("deployment") in self.names
            if event in _FAILURES or (event in _LOSSES and honest):
                self.failures.append(f"{event}: {str(row)[:300]}")
        self.lines += len(self.controller.log)
        self.controller.log.clear()
        self.most_bytes = max(self.most_bytes, self.process.memory_info().rss)

    def judge_steps(self, metrics: dict[str, float]) -> None:
        """Note a group whose steps are no longer counted, or were refused."""
        now = time.monotonic()
        for name in self.names:
            steps = metrics.get(f'evenkeel_report_steps_total{{deployment="{name}"}}', 0.0)
            known, at = self._steps.get(name, (-1.0, now))
            if steps > known:
                self._steps[name] = steps, now
            elif now - at > _STEPS_WITHIN_S:
                self.failures.append(f"no step of {name} was counted for {_STEPS_WITHIN_S:g} s")
        for series, value in metrics.items():
            lost = "steps_rejected_total{" in series or "steps_dropped_total{" in series
            if lost and value and any(f'deployment="{name}"' in series for name in self.names):
                self.failures.append(f"{series} {value:g}")

    def counted(self, metrics: dict[str, float]) -> tuple[int, int]:
        """Return the steps that the ranks reported, and those that were counted."""
        names = (f'evenkeel_report_steps_total{{deployment="{name}"}}' for name in self.names)
        told = sum(group.step * len(group.ranks) for group in self.groups)
        return told, int(sum(metrics.get(name, 0.0) for name in names))
