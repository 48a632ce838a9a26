"""What the run showed, and whether that is what was promised: pure functions over its records."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenkeel_moe.engines.demo.fleet import FleetLog, StepRow, mean_balancedness
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.view import count, si_bytes
from evenkeel_moe.engines.reference.config import DispatchRule

__all__ = ["Check", "PlanFigures", "Summary", "decision_lines", "summarise", "summary_lines"]

COMPARED_STEPS = 40
"""Steps averaged on each side of a plan or of the shift."""

_GAIN = {"gain", "gain_lower", "held_out_steps", "copies"}
"""Numbers of a decision that judged a plan on later steps."""

NOTICEABLE = 0.005
"""Least change of mean balancedness that counts as a rise or a fall."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """One committed plan in numbers; None where the run holds no step to take it from."""

    plan_id: str
    reason: str
    """Why it was planned."""
    manual: bool
    first_step: int
    """First and last step at which one of its waves took effect."""
    last_step: int
    waves: int
    before: float | None
    """Measured balancedness of the steps before its first wave and after its last."""
    after: float | None
    moves: int
    nbytes: int
    swap_s: float
    """Longest time a swap held up a step on any rank."""
    steps_during: int
    p99_during_s: float | None
    """Of the slowest rank's step times, from the plan's making to its last wave, and as many steps before."""
    p99_before_s: float | None
    median_step_s: float | None


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and whether the run kept it."""

    promise: str
    held: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a run."""

    plans: tuple[PlanFigures, ...]
    checks: tuple[Check, ...]
    faults_found: tuple[str, ...]
    """Sentences that start with what was found wrong: `byte`, `map`, `epoch`, `output`, `check`, `rank`."""

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return all(check.held for check in self.checks)


def plan_figures(fleet: FleetLog, plan: Mapping[str, Any], shift_at: int) -> PlanFigures | None:
    """Figures of one committed plan; None when no rank swapped for it.

    Args:
        fleet: what the ranks wrote.
        plan: the plan as REST has it.
        shift_at: step of the domain shift; a comparison never reaches across it.
    """
    swaps = [swap for swap in fleet.swaps if swap.plan_id == plan["plan_id"]]
    if not swaps:
        return None
    first, last = min(swap.step for swap in swaps), max(swap.step for swap in swaps)
    others = [swap.step for swap in fleet.swaps if swap.plan_id != plan["plan_id"]]
    before_from = max([step for step in others if step < first], default=-1)
    after_to = min([step for step in others if step > last], default=1 << 60)
    if shift_at > last:
        after_to = min(after_to, shift_at)
    if shift_at and shift_at <= first:
        before_from = max(before_from, shift_at)
    before = [row for row in fleet.rows if before_from <= row.step < first][-COMPARED_STEPS:]
    after = [row for row in fleet.rows if last < row.step < after_to][:COMPARED_STEPS]
    during = [row for row in fleet.rows if row.unix >= plan["created_at"] and row.step <= last]
    calm = (
        [row for row in fleet.rows if row.unix < plan["created_at"]][-len(during) :]
        if during
        else []
    )
    return PlanFigures(
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
        p99_during_s=_p99(during),
        p99_before_s=_p99(calm),
        median_step_s=float(np.median([row.seconds for row in calm])) if calm else None,
    )


def _p99(rows: Sequence[StepRow]) -> float | None:
    return float(np.quantile([row.seconds for row in rows], 0.99)) if rows else None


def faults_found(fleet: FleetLog) -> tuple[str, ...]:
    """What the ranks found wrong, each sentence led by its kind, then what they say of it."""
    checks = sorted(fleet.checks.items())
    found = [
        f"byte: rank {rank} layer {slot['layer']} slot {slot['local_slot']} does not hold the weights"
        f" expert {slot['expert']} was loaded with"
        for rank, check in checks
        for slot in check["wrong_slots"][:3]
    ]
    if not all(check["maps_agree"] for _, check in checks):
        found.append("map: the maps of the ranks differ, or do not fit what is in the slots")
    if not all(check["epochs_agree"] for _, check in checks):
        found.append("epoch: the ranks are at different epochs")
    differing = [(rank, check["mismatches"]) for rank, check in checks if check["mismatches"]]
    if differing:
        rows = ", ".join(f"{count} on rank {rank}" for rank, count in differing)
        found.append(f"output: rows that differ from the never-migrated model's: {rows}")
    found += [f"check: {problem}" for _, check in checks for problem in check["problems"][:3]]
    return tuple(dict.fromkeys([*found, *_departures(fleet)]))


def _departures(fleet: FleetLog) -> list[str]:
    """Ranks that left early, those with the same reason together; a failed check has told its own."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for line in fleet.exits:
        if line["code"] != 0 and line["reason"] != "check_failed":
            ranks_of.setdefault((line["reason"], line["detail"]), []).append(line["rank"])
    return [
        f"{'epoch' if reason == 'epoch_mismatch' else 'rank'}: left over {reason}:"
        f" rank {', '.join(str(rank) for rank in sorted(ranks))}; {detail}"
        for (reason, detail), ranks in ranks_of.items()
    ]


def summarise(
    fleet: FleetLog, plans: Sequence[Mapping[str, Any]], options: DemoOptions, restarts: int = 0
) -> Summary:
    """Judge a run.

    Args:
        fleet: what the ranks wrote.
        plans: the plans as REST has them, in any order.
        options: what the run was asked to do; one with a fault is judged by what was found, not by balance.
        restarts: how often the group had to be started again.
    """
    committed = sorted(
        (plan for plan in plans if plan["phase"] == "committed"),
        key=lambda plan: plan["created_at"],
    )
    figures = tuple(
        row
        for row in (plan_figures(fleet, plan, options.shift_at) for plan in committed)
        if row is not None
    )
    checks = _correctness_checks(fleet, restarts)
    if options.fault is None:
        moved = options.mode != "observe"
        served = len({row.step for row in fleet.rows})
        checks = [
            Check("every step was served", served == options.steps, f"{served} of {options.steps}"),
            *(_moved_checks(fleet, figures, options) if moved else _observed_checks(fleet)),
            *checks,
        ]
    return Summary(figures, tuple(checks), faults_found(fleet))


def _observed_checks(fleet: FleetLog) -> list[Check]:
    return [
        Check(
            "observe mode moves nothing",
            not fleet.swaps,
            f"{len(fleet.swaps)} swaps on {fleet.num_ranks} ranks",
        )
    ]


def _balance_check(row: PlanFigures, number: int, *, must_rise: bool) -> Check:
    """The first plan and the first after the shift have much to mend; a later one may save less than so few steps show."""
    change = math.nan if row.before is None or row.after is None else row.after - row.before
    held = change > NOTICEABLE if must_rise else change >= -NOTICEABLE
    promise = "rose" if must_rise else "did not fall"
    said = f"{_ratio(row.before)} -> {_ratio(row.after)}"
    return Check(f"balancedness {promise} with plan {number + 1}", held, said)


def _moved_checks(
    fleet: FleetLog, figures: Sequence[PlanFigures], options: DemoOptions
) -> list[Check]:
    shift_at, checks = options.shift_at, []
    after_shift = next(
        (number for number, row in enumerate(figures) if row.first_step >= shift_at), 0
    )
    for number, row in enumerate(figures):
        checks.append(_balance_check(row, number, must_rise=number in (0, after_shift)))
    last_swap = max((swap.step for swap in fleet.swaps if swap.step < shift_at), default=-1)
    next_swap = min((swap.step for swap in fleet.swaps if swap.step >= shift_at), default=1 << 60)
    settled = [row for row in fleet.rows if last_swap < row.step < shift_at]
    shifted = [row for row in fleet.rows if shift_at <= row.step < next_swap]
    before = mean_balancedness(settled[-COMPARED_STEPS:])
    after = mean_balancedness(shifted[:COMPARED_STEPS])
    fell = before is not None and after is not None and after < before - NOTICEABLE
    change = f"{_ratio(before)} -> {_ratio(after)} at step {shift_at}"
    later = [row for row in figures if row.first_step >= shift_at]
    if options.dispatch is not DispatchRule.EVEN and not later:
        # A rule that splits every batch anew may need no other placement: then nothing may have been lost.
        held = before is not None and after is not None and not fell
        checks = [
            Check("at least one plan was committed", len(figures) >= 1, f"{len(figures)} were"),
            *checks,
        ]
        # Load is recorded where the placement has the expert; under Libra, fetched experts carried part of it.
        if options.dispatch is not DispatchRule.LIBRA:
            checks.append(Check("dispatch absorbed the shift of domain", held, change))
        return checks
    checks = [
        Check("at least two plans were committed", len(figures) >= 2, f"{len(figures)} were"),
        *checks,
        Check("balancedness fell when the domain shifted", fell, change),
    ]
    checks.append(
        Check(
            "the controller answered the shift by its own decision",
            any(not row.manual for row in later),
            ", ".join(row.reason for row in later) or "no plan after the shift",
        )
    )
    return checks


def _correctness_checks(fleet: FleetLog, restarts: int) -> list[Check]:
    complete = len(fleet.checks) == fleet.num_ranks
    missing = f"only {len(fleet.checks)} of {fleet.num_ranks} ranks checked"
    slots = sum(check["slots_checked"] for check in fleet.checks.values())
    wrong = sum(len(check["wrong_slots"]) for check in fleet.checks.values())
    rows = sum(check["rows_checked"] for check in fleet.checks.values())
    differing = max(fleet.mismatches, sum(check["mismatches"] for check in fleet.checks.values()))
    agree = all(check["maps_agree"] and check["epochs_agree"] for check in fleet.checks.values())
    sound = all(check["ok"] for check in fleet.checks.values())
    bad_exits = [line for line in fleet.exits if line["code"] != 0]
    return [
        Check(
            "every slot's weights equal the original expert's",
            complete and slots > 0 and wrong == 0,
            f"{slots} slots, {wrong} wrong" if complete else missing,
        ),
        Check(
            "every output equals the never-migrated model's",
            complete and rows > 0 and differing == 0,
            f"{rows} rows, {differing} differ" if complete else missing,
        ),
        Check(
            "all ranks agree on map and epoch",
            complete and agree and sound,
            "they do"
            if complete and agree and sound
            else missing
            if not complete
            else "they do not",
        ),
        Check(
            "no rank was lost",
            not bad_exits and restarts == 0,
            f"{len(bad_exits)} left early, {restarts} restarts",
        ),
    ]


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value * 1e3:.1f} ms"


def summary_lines(summary: Summary) -> list[str]:
    """The summary in words, one line each."""
    lines: list[str] = []
    for number, row in enumerate(summary.plans, start=1):
        lines += _plan_lines(number, row)
    lines += [
        f"{'ok  ' if check.held else 'FAIL'} {check.promise}: {check.detail}"
        for check in summary.checks
    ]
    lines += [f"found {fault}" for fault in summary.faults_found]
    return lines


def _plan_lines(number: int, row: PlanFigures) -> list[str]:
    moved = f"{count(row.moves, 'expert')}, {si_bytes(row.nbytes)}, in {count(row.waves, 'wave')}, {_steps(row)}"
    pace = f"{_ms(row.p99_before_s)} before, {_ms(row.p99_during_s)} during ({row.steps_during} steps each)"
    return [
        f"Plan {number}  {row.plan_id}  because {row.reason}",
        f"  balancedness  {_ratio(row.before)} -> {_ratio(row.after)} (measured by the ranks)",
        f"  moved         {moved}",
        f"  swap          longest {_ms(row.swap_s)}; a median step takes {_ms(row.median_step_s)}",
        f"  step p99      {pace}",
    ]


def decision_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the cycles of the control loop ended with, and what the last plan was expected to save.

    Args:
        rows: decisions as REST has them, newest first.
    """
    if not rows:
        return ["Decisions: none was recorded"]
    tally = Counter(str(row["reason"]) for row in rows)
    counted = ", ".join(f"{reason} {times}" for reason, times in tally.most_common())
    lines = [f"Decisions: {count(len(rows), 'cycle')}: {counted}"]
    judged = next((row for row in rows if _GAIN <= (row.get("numbers") or {}).keys()), None)
    if judged is not None:
        numbers = judged["numbers"]
        lines.append(
            f"Last plan judged ({judged['reason']}): predicted to save {numbers['gain']:.1%} of MoE time, at least"
            f" {numbers['gain_lower']:.1%}, on {numbers['held_out_steps']:.0f} steps it was not planned on,"
            f" for {count(int(numbers['copies']), 'copy', 'copies')}"
        )
    return lines


def _steps(row: PlanFigures) -> str:
    return (
        f"step {row.first_step}"
        if row.first_step == row.last_step
        else f"steps {row.first_step}-{row.last_step}"
    )
