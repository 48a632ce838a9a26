"""Pages of a deployment's plans."""

from collections.abc import Mapping, Sequence

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import PlanId

__all__ = ["page_of_plans"]


def page_of_plans(
    order: Mapping[PlanId, float], limit: int, after: PlanId | None
) -> tuple[Sequence[PlanId], bool]:
    """The plans that come after one, or the first ones, newest first; and whether there are more.

    Args:
        order: when each plan was made.

    Raises:
        InvalidInput: no plan `after` is known any more.
    """
    names = sorted(order, key=lambda name: (order[name], name), reverse=True)
    if after is not None and after not in order:
        raise InvalidInput(
            f"plan {after}, after which to go on, is not known here; start again at the first page"
        )
    start = 0 if after is None else names.index(after) + 1
    return names[start : start + limit], start + limit < len(names)
