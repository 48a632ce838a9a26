"""Chooses the deployments that this replica lets go, because they are idle or make room."""

from collections.abc import Iterable

from evenkeel_moe.controller.deployment.deployment import Deployment

_NEW_S = 60.0
"""A deployment whose ranks were never all here is evicted after this: any client can make up a
name."""
_EVICTABLE_S = 10.0
"""A deployment must be without ranks for this long before it makes room for another. Otherwise
made-up names would take leases as fast as a client can send them."""


def is_expired(deployment: Deployment, after_s: float) -> bool:
    """Return True if a deployment has been without ranks for long enough to be evicted."""
    return deployment.ranks.idle_s() > (min(after_s, _NEW_S) if deployment.is_new else after_s)


def choose_evicted(deployments: Iterable[Deployment]) -> Deployment | None:
    """Return the deployment that makes room; None while all have, or just had, ranks.

    Deployments that never had all of their ranks go first: what a single rank says may be anything.
    """
    idle = [one for one in deployments if one.ranks.idle_s() >= _EVICTABLE_S]
    return min(
        idle,
        key=lambda one: (one.loads.ingest.generation is not None, -one.ranks.idle_s()),
        default=None,
    )
