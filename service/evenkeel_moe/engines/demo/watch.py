"""Joins the ranks' lines and the controller's answers into snapshots of the run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evenkeel_moe.engines.demo.fleet_log import FleetLog, mean_balancedness
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.slow_rank import CostSeen
from evenkeel_moe.engines.demo.view import Snapshot
from evenkeel_moe.model.quantities import bytes_text, counted

_SETTLED_STEPS = 8
"""Steps after a plan's last swap before its effect is reported."""


def _speeds(detail: str) -> tuple[str, ...]:
    """Return the parts of a cost model's detail that name a rank, without the figures."""
    return tuple(re.findall(r"rank \d+ takes", detail))


class Watch:
    """The state of the run as known so far. It opens no socket, file or process."""

    def __init__(self, options: DemoOptions) -> None:
        self.fleet = FleetLog(options.ranks)
        self.plans: dict[str, Mapping[str, Any]] = {}
        """Newest state of every plan, by id."""
        self.costs: list[CostSeen] = []
        """The cost model of each answer of the controller that names one."""
        self.events: list[str] = []
        self.printed_events = 0
        """Number of events that the plain view has printed."""
        self._options = options
        self._status: Mapping[str, Any] | None = None
        self._marks: dict[int, str] = {}
        self._domain = ""
        self._effects: dict[str, tuple[int, float | None]] = {}
        """Plan -> (rows at its last swap, balancedness before its first), until its effect is
        reported."""

    def feed_lines(self, lines: Iterable[Mapping[str, Any]], elapsed_s: float) -> None:
        """Add new lines of the ranks."""
        before = self.fleet.balancedness()
        for swap in self.fleet.feed(lines):
            self._marks[len(self.fleet.rows)] = "▲"
            earlier = self._effects.get(swap.plan_id, (0, before))[1]
            self._effects[swap.plan_id] = (len(self.fleet.rows), earlier)
        row = self.fleet.newest
        if row is not None and row.domain != self._domain:
            if self._domain:
                self._marks[len(self.fleet.rows) - 1] = "◆"
                self._report(
                    elapsed_s,
                    f"step {row.step}: the text changes from {self._domain} to {row.domain}",
                )
            self._domain = row.domain

    def feed_status(self, status: Mapping[str, Any] | None, elapsed_s: float) -> None:
        """Set the deployment as REST returns it; None while the controller does not know it."""
        self._status = status
        row = self.fleet.newest
        cost = None if status is None else status.get("cost_model")
        if status is None or row is None or cost is None:
            return
        seen = CostSeen(row.step, cost["source"], cost["detail"], status["time_balance"])
        told = (seen.source, _speeds(seen.detail))
        if not self.costs or told != (self.costs[-1].source, _speeds(self.costs[-1].detail)):
            balance = "" if seen.time_balance is None else f", time balance {seen.time_balance:.3f}"
            self._report(
                elapsed_s, f"step {row.step}: cost model {seen.source}: {seen.detail}{balance}"
            )
        self.costs.append(seen)

    def feed_plans(self, plans: Sequence[Mapping[str, Any]], elapsed_s: float) -> None:
        """Add the plans as REST lists them, newest first."""
        for plan in reversed(plans):
            known = self.plans.get(plan["plan_id"])
            self.plans[plan["plan_id"]] = plan
            if known is None:
                self._report(
                    elapsed_s,
                    f"plan {plan['plan_id']}: {counted(plan['moves'], 'copy', 'copies')},"
                    f" {bytes_text(plan['nbytes'])}, {counted(plan['waves'], 'wave')},"
                    f" because {plan['planned_because']}",
                )
            if known is None or known["phase"] != plan["phase"]:
                said = plan["phase"] in plan["reason"].split("_")
                because = "" if said else f" ({plan['reason']})"
                detail = f": {plan['error']}" if plan["error"] else because
                self._report(elapsed_s, f"plan {plan['plan_id']} is {plan['phase']}{detail}")
        self._report_effects(elapsed_s)

    def _report_effects(self, elapsed_s: float) -> None:
        for plan_id, (row, before) in list(self._effects.items()):
            plan = self.plans.get(plan_id)
            after = self.fleet.rows[row:]
            if plan is None or plan["phase"] != "committed" or len(after) < _SETTLED_STEPS:
                continue
            del self._effects[plan_id]
            now = mean_balancedness(after)
            if before is not None and now is not None:
                self._report(
                    elapsed_s, f"plan {plan_id} changed balancedness from {before:.3f} to {now:.3f}"
                )

    def _report(self, elapsed_s: float, text: str) -> None:
        self.events.append(f"{elapsed_s:5.1f} s  {text}")

    def proposals(self) -> list[str]:
        """Return the plans that wait for approval."""
        return [name for name, plan in self.plans.items() if plan["phase"] == "proposed"]

    def snapshot(self, elapsed_s: float) -> Snapshot:
        """Return the current state of the run."""
        row = self.fleet.newest
        shares = self.fleet.layer_shares()
        return Snapshot(
            elapsed_s=elapsed_s,
            step=None if row is None else row.step,
            steps=self._options.steps,
            domain=self._domain,
            shares=None if shares is None else shares.T.tolist(),
            balancedness=self.fleet.balancedness(),
            history=[row.balancedness for row in self.fleet.rows],
            marks=dict(self._marks),
            status=self._status,
            events=tuple(self.events),
            step_s=self.fleet.median_step_s(),
            mismatches=self.fleet.mismatches,
        )
