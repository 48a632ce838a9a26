"""Starts no guest unless all ranks run the plugin."""

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import structlog
import torch.distributed

from evenkeel_moe.errors import Unavailable

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed
_MARGIN_S = 10.0
_calls = itertools.count()


class RollCall:
    """Checks over a store that every rank of a group runs the plugin, before the first collective.

    A rank without the plugin would never enter that collective. The first rank that decides writes
    the verdict with one atomic operation of the store; all other ranks read it.

    Args:
        store: of the group.
        name: of the check; a rank calls `require_all` once for each.
        rank: this rank.
        size: ranks of the group.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size

    def announce(self) -> None:
        """Tell the ranks that will call `require_all` that this rank runs the plugin."""
        self._store.set(f"{self._name}/{self._rank}", "here")

    def decline(self) -> None:
        """Let `require_all` fail at once on the other ranks: this one will not call it."""
        self._decide("missing")

    def require_announced(self, first: int) -> None:
        """Check that the ranks from `first` on have told that they run the plugin; else decline.

        Raises:
            Unavailable: one of them has not.
        """
        missing = self._missing(range(first, self._size))
        if missing:
            self.decline()
            raise Unavailable(
                f"ranks {missing[:8]} join without the plugin: it must run on all ranks"
            )

    def require_all(self, timeout_s: float) -> None:
        """Check that every rank runs the plugin.

        Raises:
            Unavailable: a rank is missing. Every rank that called gets the same error.
        """
        store, name, size = self._store, self._name, self._size
        self.announce()
        try:
            if self._rank == 0:
                everyone = [f"{name}/{other}" for other in range(size)]
                store.wait(everyone, timedelta(seconds=timeout_s))
                self._decide("all")
            else:
                margin_s = min(_MARGIN_S, timeout_s / 8)
                store.wait([f"{name}/decided"], timedelta(seconds=timeout_s + margin_s))
        except RuntimeError:
            self._decide("missing")
        if store.get(f"{name}/verdict") != b"all":
            missing = self._missing(range(size)) or [self._rank]
            raise Unavailable(
                f"the plugin did not start on ranks {missing[:8]} of {size} within {timeout_s:g} s:"
                " it must run on all of them"
            )

    def _missing(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"{self._name}/{rank}"])]

    def _decide(self, verdict: str) -> None:
        self._store.compare_set(f"{self._name}/verdict", "", verdict)
        # Not every TCPStore wakes those who wait for a key that `compare_set` wrote.
        self._store.set(f"{self._name}/decided", "")


def require_plugin_in_group(group: Any, timeout_s: float) -> None:
    """Call the roll of a process group, over the store of the default group; see `RollCall`."""
    try:
        store = _distributed.distributed_c10d._get_default_store()
        first = _distributed.get_process_group_ranks(group)[0]
    except (AttributeError, RuntimeError, ValueError, KeyError) as error:
        detail = f"the engine's groups have no store: {error!r:.200}"
        _log.warning("roll_call_left_out", detail=detail)
        return
    name = f"evenkeel/roll-call/{first}/{next(_calls)}"
    RollCall(store, name, group.rank(), group.size()).require_all(timeout_s)
