"""Writes that are not known to be stored: kept, newest version only, until the store takes them."""

from collections.abc import Iterable

from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import PersistAction

__all__ = ["WriteRetry"]

_MAX_DECISIONS = 100
"""Decision rows kept for a store that is away; no more than a person would read."""


class WriteRetry:
    """Failed writes in order; of every record only its newest version."""

    def __init__(self) -> None:
        self._actions: list[PersistAction] = []

    def __bool__(self) -> bool:
        return bool(self._actions)

    def keep(self, failed: Iterable[PersistAction]) -> None:
        """Add writes that failed."""
        self._actions = _newest([*self._actions, *failed])

    def release(self, persists: Iterable[PersistAction]) -> list[PersistAction]:
        """Everything to write now: what was kept, then `persists`, without versions they replace."""
        actions, self._actions = _newest([*self._actions, *persists]), []
        return actions


def _newest(persists: list[PersistAction]) -> list[PersistAction]:
    """Of every record the newest version, where its oldest one was.

    A wave's plan is written before its outcome. Were the plan's newest version written where it came about,
    a store that takes only the first writes would have the outcome of a wave that no plan counts.
    """
    kept: dict[object, PersistAction] = {}
    for number, action in enumerate(persists):
        key: object = type(action)
        match action:
            case ctl.PersistPlan(record=record):
                key = record.plan.plan_id
            case ctl.PersistDocument(name=name):
                key = (type(action), name)
            case ctl.PersistIntent(wave=wave) | ctl.PersistOutcome(wave=wave):
                key = (type(action), wave)
            case ctl.PersistDecision():
                key = number
        kept[key] = action
    decisions = [key for key, action in kept.items() if isinstance(action, ctl.PersistDecision)]
    for key in decisions[:-_MAX_DECISIONS]:
        del kept[key]
    return list(kept.values())
