"""The results of a run with a slow rank: what its plans promised, and what was measured."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenkeel_moe.engines.demo.fleet_log import FleetLog, StepRow
from evenkeel_moe.engines.demo.options import SLOW_FACTOR, SLOW_RANK, DemoOptions
from evenkeel_moe.model.quantities import counted

DELIVERED = 0.8
"""Least measured saving, as a share of the promised one."""
_COMPARED_STEPS = 80
"""Most steps averaged on each side of the plans."""
_LEAST_DELAYED = 0.5
"""The MoE time of a layer is its mean over this share of the steps: those with the least delay
beyond their pace. Other processes only ever delay a step, and by far more than 12 %. The fastest
steps say less: in them chance gave the slowest rank few tokens, which it can do less often where
the ranks are balanced. A lower quartile of the times showed 70 to 80 % of what was saved."""
_RESAMPLES = 200
_FACTOR = re.compile(rf"rank {SLOW_RANK} takes ([0-9.]+) times")
_CLEARLY_SLOW = (1.0 + SLOW_FACTOR) / 2


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """A promise of the demo, and whether the run kept it."""

    promise: str
    held: bool
    detail: str


@dataclass(frozen=True, slots=True)
class CostSeen:
    """The cost model that the controller used at a step."""

    step: int
    source: str
    detail: str
    time_balance: float | None
    """None if the model is by tokens."""

    @property
    def shows_slow_rank(self) -> bool:
        """True if it says that the slow rank takes longer than the others."""
        named = _FACTOR.search(self.detail)
        return named is not None and float(named[1]) > _CLEARLY_SLOW


@dataclass(frozen=True, slots=True)
class Saving:
    """The plans of one part of a run, and the steps before and after them."""

    reasons: tuple[str, ...]
    """The reason for each plan; empty if there was none."""
    manual: bool
    """True if an operator asked for one of them."""
    promised: float
    """Share of MoE time that all together were predicted to save; NaN if one promised nothing."""
    before: tuple[StepRow, ...]
    after: tuple[StepRow, ...]
    copies: int
    """Experts moved by all plans."""
    in_force_after: int
    """Steps from the start of the part to the last swap; 0 without a plan."""

    @property
    def measured(self) -> float:
        """Share of MoE time saved; NaN without steps before or after."""
        return 1.0 - moe_s(self.after) / moe_s(self.before)

    @property
    def error(self) -> float:
        """Standard error of `measured` by bootstrap; NaN without steps before or after."""
        if not self.before or not self.after:
            return math.nan
        rng = np.random.default_rng(0)

        def drawn(rows: Sequence[StepRow]) -> float:
            return moe_s([rows[i] for i in rng.integers(len(rows), size=len(rows))])

        return float(np.std([drawn(self.after) / drawn(self.before) for _ in range(_RESAMPLES)]))

    @property
    def words(self) -> str:
        """The figures in words."""
        if not self.reasons:
            return "no plan was committed"
        sides = (self.before, self.after)
        moe = " -> ".join(f"{moe_s(rows) * 1e3:.1f}" for rows in sides)
        steps = " -> ".join(f"{_step_s(rows) * 1e3:.1f}" for rows in sides)
        tokens = " -> ".join(f"{_share(rows):.1%}" for rows in sides)
        plans = f"{counted(len(self.reasons), 'plan')}, {counted(self.copies, 'copy', 'copies')}"
        return (
            f"{moe} ms of MoE time a step, {self.measured:.1%} less, promised {self.promised:.1%}:"
            f" {self.measured / self.promised:.0%} delivered, standard error"
            f" {self.error / self.promised:.0%} ({plans}, in force after"
            f" {counted(self.in_force_after, 'step')}; whole step {steps} ms; tokens of rank"
            f" {SLOW_RANK} {tokens}; because {', '.join(self.reasons)})"
        )


def moe_s(rows: Sequence[StepRow]) -> float:
    """Return the MoE seconds of a step, summed over its layers; NaN without steps."""
    if not rows:
        return math.nan
    layer_s = np.array([row.layer_s for row in rows])
    delay_s = np.array([row.delay_s for row in rows])
    least = np.argsort(delay_s, axis=0, kind="stable")[: math.ceil(_LEAST_DELAYED * len(rows))]
    return float(np.take_along_axis(layer_s, least, axis=0).mean(axis=0).sum())


def _step_s(rows: Sequence[StepRow]) -> float:
    return float(np.median([row.seconds for row in rows])) if rows else math.nan


def _share(rows: Sequence[StepRow]) -> float:
    """Return the slow rank's share of the tokens; NaN without steps."""
    if not rows:
        return math.nan
    total = np.sum([row.rank_load for row in rows], axis=(0, 1))
    return float(total[SLOW_RANK] / total.sum())


def saving(
    fleet: FleetLog, plans: Sequence[Mapping[str, Any]], first_step: int, end_step: int
) -> Saving:
    """Return what the plans made between two steps saved.

    Args:
        fleet: the ranks' lines.
        plans: the committed plans, the oldest first.
        first_step: first step of the part.
        end_step: first step after it.
    """
    rows = [row for row in fleet.rows if first_step <= row.step < end_step]
    began = rows[0].unix if rows else math.inf
    ended = rows[-1].unix if rows else -math.inf
    mine = [plan for plan in plans if began <= plan["created_at"] <= ended]
    ids = {plan["plan_id"] for plan in mine}
    swaps = [swap.step for swap in fleet.swaps if swap.plan_id in ids]
    earlier = [swap.step for swap in fleet.swaps if swap.plan_id not in ids]
    first, last = min(swaps, default=end_step), max(swaps, default=end_step)
    from_step = max([step for step in earlier if step < first], default=-1)
    left = [1.0 - float(plan["numbers"].get("gain") or math.nan) for plan in mine]
    return Saving(
        tuple(plan["planned_because"] for plan in mine),
        any(plan["kind"] == "manual" for plan in mine),
        1.0 - math.prod(left),
        tuple([row for row in rows if from_step < row.step < first][-_COMPARED_STEPS:]),
        tuple([row for row in rows if row.step > last][:_COMPARED_STEPS]),
        copies=sum(plan["moves"] for plan in mine),
        in_force_after=last - first_step if swaps else 0,
    )


def slow_rank_checks(
    fleet: FleetLog,
    plans: Sequence[Mapping[str, Any]],
    costs: Sequence[CostSeen],
    options: DemoOptions,
) -> list[PromiseCheck]:
    """Check that the slow rank was found and planned for, and the rank's recovery too."""
    slow_until = options.slow_until or options.steps
    while_slow = [one for one in costs if options.slow_from <= one.step < slow_until]
    source = "profiled" if options.told else "measured"
    found = next((one for one in while_slow if one.source == source and one.shows_slow_rank), None)
    slow = saving(fleet, plans, options.slow_from, slow_until)
    checks = [
        PromiseCheck(
            f"the cost model is {source} and shows that rank {SLOW_RANK} is slow",
            found is not None,
            f"after {counted(found.step - options.slow_from, 'step')}: {found.detail}"
            if found
            else f"not seen, x{SLOW_FACTOR} it was",
        ),
        *_plan_checks(slow, "the slow rank"),
        PromiseCheck(
            f"MoE time fell by at least {DELIVERED:.0%} of the promise",
            slow.measured >= DELIVERED * slow.promised,
            slow.words,
        ),
    ]
    if not options.slow_until:
        return checks
    later = [one for one in costs if one.step >= slow_until]
    back = saving(fleet, plans, slow_until, options.steps)
    known = [one for one in later if one.source == "measured" and one.time_balance is not None]
    lowest = min((one.time_balance for one in known if one.time_balance), default=math.nan)
    final = known[-1].time_balance if known and known[-1].time_balance else math.nan
    stale = max((one.step for one in known if one.shows_slow_rank), default=slow_until - 1)
    even = next((one for one in known if one.step > stale), None)
    delivered = back.measured + back.error >= DELIVERED * back.promised
    return [
        *checks,
        PromiseCheck(
            "the cost model shows that the rank has recovered",
            even is not None,
            f"after {counted(even.step - slow_until, 'step')}: {even.detail}"
            if even
            else (known[-1].detail if known else "no seconds were measured"),
        ),
        *_plan_checks(back, "the recovered rank"),
        PromiseCheck(
            "the recovered rank got tokens back",
            _share(back.after) > _share(back.before),
            " -> ".join(f"{_share(rows):.1%}" for rows in (back.before, back.after)),
        ),
        PromiseCheck(
            f"MoE time fell by at least {DELIVERED:.0%} of the promise when it recovered, within"
            " the error of the measurement",
            delivered,
            back.words,
        ),
        PromiseCheck("time balance rose again", final > lowest, f"{lowest:.3f} -> {final:.3f}"),
    ]


def _plan_checks(part: Saving, rank: str) -> list[PromiseCheck]:
    reasons = ", ".join(part.reasons) or "no plan was committed"
    planned = bool(part.reasons) and not part.manual
    return [PromiseCheck(f"the controller planned for {rank} by itself", planned, reasons)]
