"""The rule that stops automatic plans which do not deliver what their verdicts promised."""

from collections.abc import Iterable

from evenkeel_moe.model.plan import PlanKind, PlanRecord

IN_A_ROW = 3
"""Plans in a row that stop `auto`."""
_LEAST_SHARE = 0.5
"""Least share of the lower bound of its gain that a plan must deliver."""


def has_delivered(record: PlanRecord) -> bool | None:
    """Return False if a plan delivered less than half of the lower bound of its promised gain.

    Returns:
        None if that is not known: the plan is not automatic, promised or measured nothing, or was
        measured so roughly that the lower bound of the promise lies inside the interval.
    """
    delivered, promised = record.delivered, record.plan.numbers.get("gain_lower")
    if record.plan.kind is not PlanKind.AUTOMATIC or promised is None or not promised > 0:
        return None
    if delivered is None or delivered.gain is None:
        return None
    assert delivered.upper is not None  # `DeliveredGain` has both or neither.
    if delivered.gain >= _LEAST_SHARE * promised:
        return True
    return False if delivered.upper < promised else None


def undelivered_in_a_row(records: Iterable[PlanRecord], judged_from: float) -> list[PlanRecord]:
    """Return the newest measured plans, back to the last that delivered, newest first.

    Args:
        records: in any order.
        judged_from: Unix seconds; plans measured earlier do not count.
    """
    measured = [
        (record.delivered.at, record)
        for record in records
        if record.delivered is not None and record.delivered.at > judged_from
    ]
    found: list[PlanRecord] = []
    for _, record in sorted(measured, key=lambda one: one[0], reverse=True):
        delivered = has_delivered(record)
        if delivered:
            break
        if delivered is False:
            found.append(record)
    return found
