"""Which deployments are let go of: their ranks have been gone for long, or another needs the room."""

from collections.abc import Iterable

from evenkeel_moe.controller.deployment.deployment import Deployment

__all__ = ["gives_way", "is_over"]

_UNPROVEN_S = 60.0
"""A deployment of which no rank was ever taken is let go of sooner: anyone can say a name."""
_GIVES_WAY_S = 10.0
"""Without ranks for as long, a deployment makes room in a full table: names that come and go at once would each take a lease,
and leave records, as fast as anyone can say them."""


def is_over(member: Deployment, after_s: float) -> bool:
    """Whether a deployment's ranks have been gone for long enough to let go of it."""
    return member.idle_s() > (after_s if member.shape is not None else min(after_s, _UNPROVEN_S))


def gives_way(members: Iterable[Deployment]) -> Deployment | None:
    """The one that makes room, first of those never seen whole; None while all have ranks, or had a moment ago."""
    idle = [member for member in members if member.idle_s() >= _GIVES_WAY_S]
    # What one rank said may be anything; a generation has all of its ranks.
    return min(
        idle, key=lambda one: (one.ingest.generation is not None, -one.idle_s()), default=None
    )
