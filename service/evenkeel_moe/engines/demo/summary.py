"""The results of a run, and whether they are as promised: pure functions of the ranks' lines."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenkeel_moe.engines.demo.controller import THRESHOLDS
from evenkeel_moe.engines.demo.fleet_log import FleetLog, StepRow, mean_balancedness
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.slow_rank import CostSeen, PromiseCheck, slow_rank_checks
from evenkeel_moe.engines.demo.view import ratio
from evenkeel_moe.engines.reference.config import DispatchRule
from evenkeel_moe.model.quantities import bytes_text, counted

COMPARED_STEPS = 40
"""Steps averaged on each side of a plan or of the shift."""
_LAST = 1 << 60
"""A step after every step."""

_VERDICT = {"gain", "gain_lower", "held_out_steps", "copies"}
"""Numbers of a decision that compared a plan with the current placement on later steps."""

NOTICEABLE = 0.005
"""Smallest change of the mean balancedness that counts as a rise or a fall."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The figures of one committed plan; None if the run has no steps for a figure."""

    plan_id: str
    reason: str
    """Reason for the plan."""
    manual: bool
    first_step: int
    """First and last step at which a wave of the plan took effect."""
    last_step: int
    waves: int
    before: float | None
    """Measured balancedness of the steps before the first wave and after the last one."""
    after: float | None
    moves: int
    nbytes: int
    swap_s: float
    """Longest delay of a step by a swap, on any rank."""
    steps_during: int
    p99_during_s: float | None
    """99th percentile of the slowest rank's step times, from the plan's creation to its last wave,
    and of as many steps before."""
    p99_before_s: float | None
    median_step_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run."""

    plans: tuple[PlanResult, ...]
    checks: tuple[PromiseCheck, ...]
    faults_found: tuple[str, ...]
    """Sentences that start with the kind of fault: `byte`, `map`, `epoch`, `output`, `check`,
    `rank`."""

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.held for check in self.checks)


def plan_result(fleet: FleetLog, plan: Mapping[str, Any], shift_at: int) -> PlanResult | None:
    """Return the figures of one committed plan; None if no rank swapped for it.

    Args:
        fleet: the ranks' lines.
        plan: the plan as REST returns it.
        shift_at: step of the domain shift; all compared steps are on the same side of it.
    """
    swaps = [swap for swap in fleet.swaps if swap.plan_id == plan["plan_id"]]
    if not swaps:
        return None
    first, last = min(swap.step for swap in swaps), max(swap.step for swap in swaps)
    others = [swap.step for swap in fleet.swaps if swap.plan_id != plan["plan_id"]]
    before_from = max([step for step in others if step < first], default=-1)
    after_to = min([step for step in others if step > last], default=_LAST)
    if shift_at > last:
        after_to = min(after_to, shift_at)
    if shift_at and shift_at <= first:
        before_from = max(before_from, shift_at)
    before = [row for row in fleet.rows if before_from <= row.step < first][-COMPARED_STEPS:]
    after = [row for row in fleet.rows if last < row.step < after_to][:COMPARED_STEPS]
    created_at = plan["created_at"]
    during = [row for row in fleet.rows if row.unix >= created_at and row.step <= last]
    earlier = [row for row in fleet.rows if row.unix < created_at]
    calm = earlier[-len(during) :] if during else []
    return PlanResult(
        plan_id=plan["plan_id"],
        reason=plan["planned_because"],
        manual=plan["kind"] == "manual",
        first_step=first,
        last_step=last,
        waves=plan["waves_committed"],
        before=mean_balancedness(before),
        after=mean_balancedness(after),
        moves=plan["moves"],
        nbytes=plan["nbytes"],
        swap_s=max(swap.seconds for swap in swaps),
        steps_during=len(during),
        p99_during_s=_quantile_s(during, 0.99),
        p99_before_s=_quantile_s(calm, 0.99),
        median_step_s=_quantile_s(calm, 0.5),
    )


def _quantile_s(rows: Sequence[StepRow], share: float) -> float | None:
    return float(np.quantile([row.seconds for row in rows], share)) if rows else None


def faults_found(fleet: FleetLog) -> tuple[str, ...]:
    """Return what the ranks found wrong, as sentences that start with the kind of fault."""
    checks = sorted(fleet.checks.items())
    found = [
        f"byte: rank {rank} layer {slot['layer']} slot {slot['local_slot']} does not hold"
        f" the weights expert {slot['expert']} was loaded with"
        for rank, check in checks
        for slot in check["wrong_slots"][:3]
    ]
    if not all(check["maps_agree"] for _, check in checks):
        found.append("map: the maps of the ranks differ, or do not match the content of the slots")
    if not all(check["epochs_agree"] for _, check in checks):
        found.append("epoch: the ranks are at different epochs")
    differing = [(rank, check["mismatches"]) for rank, check in checks if check["mismatches"]]
    if differing:
        rows = ", ".join(f"{number} on rank {rank}" for rank, number in differing)
        found.append(f"output: rows that differ from the never-migrated model's: {rows}")
    found += [f"check: {problem}" for _, check in checks for problem in check["problems"][:3]]
    return tuple(dict.fromkeys([*found, *_early_exits(fleet)]))


def _early_exits(fleet: FleetLog) -> list[str]:
    """Return one sentence for all ranks that left early for the same reason.

    Failed checks are left out, because the checks themselves report them.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for line in fleet.exits:
        if line["code"] != 0 and line["reason"] != "check_failed":
            ranks_of.setdefault((line["reason"], line["detail"]), []).append(line["rank"])
    return [
        f"{'epoch' if reason == 'epoch_mismatch' else 'rank'}: left because of {reason}:"
        f" rank {', '.join(str(rank) for rank in sorted(ranks))}; {detail}"
        for (reason, detail), ranks in ranks_of.items()
    ]


def summarise(
    fleet: FleetLog,
    plans: Sequence[Mapping[str, Any]],
    options: DemoOptions,
    costs: Sequence[CostSeen] = (),
) -> Summary:
    """Judge a run.

    Args:
        fleet: the ranks' lines.
        plans: the plans as REST returns them, in any order.
        options: the options of the run. With a fault, only correctness is checked, not balance.
        costs: the cost models that the controller used, oldest first.
    """
    committed = sorted(
        (plan for plan in plans if plan["phase"] == "committed"),
        key=lambda plan: plan["created_at"],
    )
    results = [plan_result(fleet, plan, options.shift_at) for plan in committed]
    figures = tuple(row for row in results if row is not None)
    checks = _correctness_checks(fleet)
    if options.fault is None:
        served = len({row.step for row in fleet.rows})
        detail = f"{served} of {options.steps}"
        every_step = PromiseCheck("every step was served", served == options.steps, detail)
        if options.slow:
            balance = slow_rank_checks(fleet, committed, costs, options)
        elif options.mode == "observe":
            moves = f"{len(fleet.swaps)} swaps on {fleet.num_ranks} ranks"
            balance = [PromiseCheck("observe mode moves nothing", not fleet.swaps, moves)]
        else:
            balance = _balance_checks(fleet, figures, options)
        checks = [every_step, *balance, *checks]
    return Summary(figures, tuple(checks), faults_found(fleet))


def _balance_checks(
    fleet: FleetLog, figures: Sequence[PlanResult], options: DemoOptions
) -> list[PromiseCheck]:
    """Check the plans, and the reaction to the shift of the domain."""
    shift_at = options.shift_at
    later = [row for row in figures if row.first_step >= shift_at]
    must_rise = {id(row) for row in (*figures[:1], *later[:1])}
    gains = [
        _gain_check(row, number, must_rise=id(row) in must_rise)
        for number, row in enumerate(figures, start=1)
    ]
    last_swap = max((swap.step for swap in fleet.swaps if swap.step < shift_at), default=-1)
    next_swap = min((swap.step for swap in fleet.swaps if swap.step >= shift_at), default=_LAST)
    settled = [row for row in fleet.rows if last_swap < row.step < shift_at]
    shifted = [row for row in fleet.rows if shift_at <= row.step < next_swap]
    before = mean_balancedness(settled[-COMPARED_STEPS:])
    after = mean_balancedness(shifted[:COMPARED_STEPS])
    lost = math.nan if before is None or after is None else before - after
    fell = lost > NOTICEABLE
    change = f"{ratio(before)} -> {ratio(after)} at step {shift_at}"
    committed = f"{len(figures)} were"
    any_plan = PromiseCheck("at least one plan was committed", bool(figures), committed)
    if options.dispatch is DispatchRule.FEWEST:
        # It balances active experts, so the balance of tokens says nothing about a plan.
        return [any_plan]
    if options.dispatch is not DispatchRule.EVEN and not later:
        # A rule that splits every batch again may not need another placement. Then the shift must
        # not have cost balance.
        checks = [any_plan, *gains]
        # Load is recorded for slots of the placement. Under Libra, fetched experts carried part
        # of it.
        if not options.dispatch.fetches:
            held = before is not None and after is not None and not fell
            checks.append(PromiseCheck("dispatch absorbed the shift of domain", held, change))
        return checks
    seen = PromiseCheck("balancedness fell when the domain shifted", fell, change)
    if fell and not later and lost < THRESHOLDS["min_gain"]:
        # A placement that lost so little is rightly kept.
        return [
            any_plan,
            *gains,
            seen,
            PromiseCheck("the shift cost less than a plan must save", True, change),
        ]
    return [
        PromiseCheck("at least two plans were committed", len(figures) >= 2, committed),
        *gains,
        seen,
        PromiseCheck(
            "the controller answered the shift by its own decision",
            any(not row.manual for row in later),
            ", ".join(row.reason for row in later) or "no plan after the shift",
        ),
    ]


def _gain_check(row: PlanResult, number: int, *, must_rise: bool) -> PromiseCheck:
    """Check the balance after a plan.

    The first plan and the first one after the shift must raise it. Later plans may gain less than
    so few steps can show.
    """
    change = math.nan if row.before is None or row.after is None else row.after - row.before
    held = change > NOTICEABLE if must_rise else change >= -NOTICEABLE
    promise = "rose" if must_rise else "did not fall"
    detail = f"{ratio(row.before)} -> {ratio(row.after)}"
    return PromiseCheck(f"balancedness {promise} with plan {number}", held, detail)


def _correctness_checks(fleet: FleetLog) -> list[PromiseCheck]:
    checks = fleet.checks.values()
    complete = len(checks) == fleet.num_ranks
    missing = f"only {len(checks)} of {fleet.num_ranks} ranks checked"
    slots = sum(check["slots_checked"] for check in checks)
    wrong = sum(len(check["wrong_slots"]) for check in checks)
    rows = sum(check["rows_checked"] for check in checks)
    differing = max(fleet.mismatches, sum(check["mismatches"] for check in checks))
    agree = all(check["maps_agree"] and check["epochs_agree"] and check["ok"] for check in checks)
    bad_exits = sum(line["code"] != 0 for line in fleet.exits)

    def complete_check(promise: str, held: bool, detail: str) -> PromiseCheck:
        return PromiseCheck(promise, complete and held, detail if complete else missing)

    return [
        complete_check(
            "every slot's weights equal the original expert's",
            slots > 0 and wrong == 0,
            f"{slots} slots, {wrong} wrong",
        ),
        complete_check(
            "every output equals the never-migrated model's",
            rows > 0 and differing == 0,
            f"{rows} rows, {differing} differ",
        ),
        complete_check(
            "all ranks agree on map and epoch", agree, "they do" if agree else "they do not"
        ),
        PromiseCheck("no rank was lost", not bad_exits, f"{bad_exits} left early"),
    ]


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value * 1e3:.1f} ms"


def summary_lines(summary: Summary) -> list[str]:
    """Return the summary in words, one line each."""
    lines: list[str] = []
    for number, row in enumerate(summary.plans, start=1):
        lines += _plan_lines(number, row)
    lines += [
        f"{'ok  ' if check.held else 'FAIL'} {check.promise}: {check.detail}"
        for check in summary.checks
    ]
    lines += [f"found {fault}" for fault in summary.faults_found]
    return lines


def _plan_lines(number: int, row: PlanResult) -> list[str]:
    one = row.first_step == row.last_step
    steps = f"step {row.first_step}" if one else f"steps {row.first_step}-{row.last_step}"
    experts, waves = counted(row.moves, "expert"), counted(row.waves, "wave")
    moved = f"{experts}, {bytes_text(row.nbytes)}, in {waves}"
    pace = f"{_ms(row.p99_before_s)} before, {_ms(row.p99_during_s)} during"
    return [
        f"Plan {number}  {row.plan_id}  because {row.reason}",
        f"  balancedness  {ratio(row.before)} -> {ratio(row.after)} (measured by the ranks)",
        f"  moved         {moved}, {steps}",
        f"  swap          longest {_ms(row.swap_s)}; a median step takes {_ms(row.median_step_s)}",
        f"  step p99      {pace} ({row.steps_during} steps each)",
    ]


def decision_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how often each decision was made, and the expected gain of the last judged plan.

    Args:
        rows: decisions as REST returns them, newest first.
    """
    if not rows:
        return ["Decisions: none was recorded"]
    tally = Counter(str(row["reason"]) for row in rows)
    each = ", ".join(f"{reason} {times}" for reason, times in tally.most_common())
    lines = [f"Decisions: {counted(len(rows), 'cycle')}: {each}"]
    judged = next((row for row in rows if _VERDICT <= (row.get("numbers") or {}).keys()), None)
    if judged is not None:
        numbers = judged["numbers"]
        lines.append(
            f"Last plan judged ({judged['reason']}): predicted to save {numbers['gain']:.1%} of MoE"
            f" time, at least {numbers['gain_lower']:.1%},"
            f" on {numbers['held_out_steps']:.0f} steps it was not planned on,"
            f" for {counted(int(numbers['copies']), 'copy', 'copies')}"
        )
    return lines
