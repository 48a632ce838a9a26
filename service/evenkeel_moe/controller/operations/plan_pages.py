"""Cuts the list of a deployment's plans into pages."""

from collections.abc import Mapping, Sequence

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import PlanId


def page_of_plans(
    order: Mapping[PlanId, float], limit: int, after: PlanId | None
) -> tuple[Sequence[PlanId], bool]:
    """Return the page after a plan, newest plan first, and True if more plans follow.

    Args:
        order: creation time of each plan.
        limit: most plans on the page.
        after: last plan of the page before; None for the first page.

    Raises:
        InvalidInput: the plan `after` is not known any more.
    """
    names = sorted(order, key=lambda name: (order[name], name), reverse=True)
    if after is not None and after not in order:
        raise InvalidInput(
            f"plan {after}, after which to go on, is not known here; start again at the first page"
        )
    start = 0 if after is None else names.index(after) + 1
    return names[start : start + limit], start + limit < len(names)
