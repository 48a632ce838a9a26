"""A plan in words: its phase, its story, and what it delivered."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.api.words.stored import words_or_row
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord, phase_text
from evenkeel_moe.model.quantities import (
    copies_text,
    counted,
    duration_text,
    saving,
    saving_range,
    share,
)

_EVENTS = {
    "created": "Created",
    "approved": "Approved",
    "paused": "Paused",
    "stalled": "Stalled",
    "resumed": "Continued",
    "recovered": "Taken over by a new leader",
    "cancel_requested": "Cancellation requested",
    "ended": "Ended",
}
_CAUSED = ("created", "paused", "stalled", "ended")
"""Events whose reason says why they happened."""
_SIDES = ("before", "after")
"""Ends of the names of figures of a story row."""
MAY_COST = {
    PlanKind.ROLLBACK: "A rollback returns to an earlier placement, so MoE time may rise.",
    PlanKind.EVACUATION: "An evacuation moves experts off ranks that retire, so MoE time may rise.",
}
"""Each sentence says why a plan that seeks no gain may cost time."""


def plan_text(record: PlanRecord) -> str:
    """Return where a plan stands, and why, in sentences; its error is told beside it."""
    phase, words = record.phase, sentence(record.reason)
    if phase is PlanPhase.PROPOSED:
        return "It waits for approval. Nothing has moved."
    if phase is PlanPhase.APPROVED:
        return "It begins once all ranks are connected and its record is stored."
    if record.phase_text == "superseded":
        return f"It never began, and nothing is wrong with it. {words}"
    if phase is PlanPhase.CANCELLED and any(map(_rejects, record.story)):
        return "An operator rejected it. Nothing has moved."
    return words


def _rejects(row: Mapping[str, Any]) -> bool:
    """Return True if an operator cancelled the plan while it waited for approval."""
    return row["event"] == "cancel_requested" and row.get("phase") == PlanPhase.PROPOSED


def plan_between(records: Sequence[PlanRecord], first: float, last: float) -> PlanRecord | None:
    """Return the one plan that led from an epoch to a later one; None if there are several.

    Args:
        records: newest first. One before a cold start may have the same epochs as a later one.
        first: the epoch before the plan.
        last: the epoch after its waves.
    """
    for record in records:
        if record.waves_committed and record.plan.base_epoch + record.waves_committed == last:
            return record if record.plan.base_epoch == first else None
    return None


def story_rows(record: PlanRecord) -> list[dict[str, Any]]:
    """Return the rows of a story, each with `text` and `phase_text`."""
    rows, committed = [], 0
    for row in record.story:
        shown = phase_text(row.get("phase", ""), row.get("reason", ""))
        text = words_or_row(json.dumps(row, default=str), _event, row, record.plan, committed)
        rows.append({**row, "text": text, "phase_text": shown})
        committed = row.get("waves_committed", committed)
    return rows


def _event(row: Mapping[str, Any], plan: Plan, committed: int) -> str:
    """Return an event in words.

    Args:
        row: of the story.
        plan: whose story it is.
        committed: waves that were committed before it.
    """
    event, detail = row["event"], row.get("detail") or ""
    match event:
        case "answered":
            return _answered(row)
        case "measured":
            return f"MoE time measured{_measured(row, plan.kind)}"
        case "wave_started":
            return _wave_began(plan, committed)
        case "wave_agreed":
            words = f"All ranks agreed on wave {committed + 1} of {len(plan.waves)}"
        case "wave_committed":
            words = _waves_committed(plan, committed + 1, row.get("waves_committed"))
        case _:
            words = _plain_event(row)
    # The words about a wave say which epoch it led to.
    said = event == "wave_committed" and re.fullmatch(r"epoch \d+", detail)
    return words if said or not detail else f"{words} ({detail})"


def _answered(row: Mapping[str, Any]) -> str:
    """Return how the moved experts answered the canary's token."""
    moved, same, different, blind = (row[name] for name in ("moved", "same", "different", "blind"))
    experts = counted(moved, "moved expert answers", "moved experts answer")
    parts = [f"{same} of {experts} as before"]
    if different:
        parts.append(f"{counted(different, 'does', 'do')} not")
    if gone := moved - same - different:
        parts.append(f"{counted(gone, 'was', 'were')} moved again before being asked")
    if blind:
        parts.append(
            f"{counted(blind, 'answers', 'answer')} as another expert does, so that an exchange of"
            " the two would not show"
        )
    return "; ".join(parts)


def _plain_event(row: Mapping[str, Any]) -> str:
    event, by = row["event"], row.get("by")
    words = "Rejected" if _rejects(row) else _EVENTS.get(event, event.replace("_", " "))
    if by:
        words += " in mode auto" if by == "auto" else f" by {by}"
    return f"{words}: {sentence(row.get('reason'))}" if event in _CAUSED else words


def _wave_began(plan: Plan, index: int) -> str:
    words = f"Wave {index + 1} of {len(plan.waves)} began"
    if index >= len(plan.waves):
        return words
    per_rank, wave = plan.target.slots_per_rank, plan.waves[index]
    copies = counted(wave.moves(per_rank), "copy", "copies")
    return f"{words}: {copies_text(copies, wave.nbytes(per_rank))}"


def _waves_committed(plan: Plan, first: int, last: int | None) -> str:
    last = first if last is None else last
    waves = f"Waves {first} to {last}" if last > first else f"Wave {last}"
    were = "were" if last > first else "was"
    at = f"the ranks are at epoch {plan.base_epoch + last}"
    return f"{waves} of {len(plan.waves)} {were} committed: {at}"


def _measured(row: Mapping[str, Any], kind: PlanKind) -> str:
    """Return what a plan delivered beside its promise, or why that is unknown."""
    gain, steps = row.get("delivered_gain"), row.get("steps")
    on = f" on {counted(steps, 'step')}" if steps else ""
    promised, least = row.get("promised_gain"), row.get("promised_lower")
    floor = "" if least is None else f" (at least {share(least)})"
    promise = "" if promised is None else f"promised {share(promised)}{floor}, "
    steps_took = _served(row)
    if gain is None:
        because = row.get("detail")
        unknown = f"{on}: {promise}delivered unknown" + (f", because {because}" if because else "")
        return unknown + steps_took
    interval = saving_range(row.get("delivered_lower"), row.get("delivered_upper"))
    words = f"{on}: {promise}delivered {saving(gain)} (95 % interval {interval}){steps_took}"
    return f"{words}. {MAY_COST[kind]}" if not kind.seeks_gain and gain < 0 else words


def _served(row: Mapping[str, Any]) -> str:
    """Return how fast the engine served before and after a plan; empty if neither is known."""
    sides = [(row.get(f"step_s_{side}"), row.get(f"tokens_per_s_{side}")) for side in _SIDES]
    if all(step_s is None for step_s, _ in sides):
        return ""
    texts = [speed_texts(*side) for side in sides]
    took, served = (" and ".join(pair) for pair in zip(*texts, strict=True))
    return f"; a step took {took} before and after, at {served} tokens/s"


def speed_texts(step_s: float | None, tokens_per_s: float | None) -> tuple[str, str]:
    """Return the time of a step, and tokens a second without their unit; `-` if unknown."""
    tokens = "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
    return duration_text(step_s), tokens
