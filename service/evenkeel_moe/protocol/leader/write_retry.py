"""Writes that failed are kept, each record in its newest version, until the store takes them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import ControlAction, PersistAction, SendToRank

_MAX_DECISIONS = 100
"""Decision rows kept while the store is away; more than this nobody reads."""


class WriteRetry:
    """The failed writes in order, and the sends that depend on the newest batch of writes."""

    def __init__(self) -> None:
        self._failed: list[PersistAction] = []
        self._sends: tuple[SendToRank, ...] = ()

    def __bool__(self) -> bool:
        """Return True if some write failed and has not been tried again."""
        return bool(self._failed)

    def order(self, actions: list[ControlAction], *, flush: bool = False) -> list[ControlAction]:
        """Return a batch as the shell needs it: failed writes, then its own writes, then the rest.

        A batch without writes is returned as it is, unless `flush` and there are failed writes.
        """
        persists = [action for action in actions if isinstance(action, PersistAction)]
        if not persists and not (flush and self._failed):
            return actions
        others = [action for action in actions if not isinstance(action, PersistAction)]
        self._sends = tuple(a for a in others if isinstance(a, SendToRank) and a.needs_store)
        writes, self._failed = _newest([*self._failed, *persists]), []
        return [*writes, *others]

    def failed(
        self,
        writes: Iterable[PersistAction],
        current: Callable[[PersistAction], PersistAction | None],
    ) -> Sequence[SendToRank]:
        """Keep failed writes and return the sends that were skipped with them.

        Args:
            current: returns what is to be written now in place of a write; None if it is outdated.
        """
        renewed = [action for write in writes if (action := current(write)) is not None]
        self._failed = _newest([*self._failed, *renewed])
        skipped, self._sends = self._sends, ()
        return skipped


def _newest(persists: list[PersistAction]) -> list[PersistAction]:
    """Return the newest version of each record, in the place of its oldest version.

    If one of the epochs begins a history, the newest one does: the stored ones are not its past.
    """
    kept: dict[object, PersistAction] = {}
    for number, action in enumerate(persists):
        key: object = type(action)
        match action:
            case ctl.PersistPlan(record=record):
                key = record.plan.plan_id
            case ctl.PersistDocument(name=name):
                key = (type(action), name)
            case ctl.PersistDecision():
                key = number
            case ctl.PersistEpoch() if isinstance(older := kept.get(key), ctl.PersistEpoch):
                begins = older.begins_history or action.begins_history
                action = replace(action, begins_history=begins)
        kept[key] = action
    decisions = [key for key, action in kept.items() if isinstance(action, ctl.PersistDecision)]
    for key in decisions[:-_MAX_DECISIONS]:
        del kept[key]
    return list(kept.values())
