"""What the ranks of an engine do alike or not at all, and what an error of ours must never do: end the engine.

A start that fails on one rank and not on the others would leave them in collectives that never meet: the others would
hold their balancer back, or wait for a rank that knows nothing of it. So after each part of it the ranks compare.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog
import torch.distributed

from evenkeel_moe.agent.guest import GuestAgent
from evenkeel_moe.agent.ports import GateFailed
from evenkeel_moe.engines.guest.plan_agreement import Gather
from evenkeel_moe.errors import Unavailable

__all__ = ["all_or_none", "engine_spared", "roll_call", "roll_call_of"]

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_distributed: Any = torch.distributed
_MARGIN_S = 10.0
_calls = itertools.count()


class _Guest(Protocol):
    @property
    def agent(self) -> GuestAgent | None: ...


def roll_call_of(group: Any, timeout_s: float) -> None:
    """See `roll_call`: the ranks of one of the engine's groups, over the store of the engine's default group."""
    try:
        store = _distributed.distributed_c10d._get_default_store()
        first = _distributed.get_process_group_ranks(group)[0]
    except (AttributeError, RuntimeError, ValueError, KeyError) as error:
        _log.warning(
            "roll_call_left_out", detail=f"the engine's groups have no store: {error!r:.200}"
        )
        return
    name = f"evenkeel/roll-call/{first}/{next(_calls)}"
    roll_call(store, name, group.rank(), group.size(), timeout_s)


def roll_call(store: Any, name: str, rank: int, size: int, timeout_s: float) -> None:
    """Find out whether the plugin is on every rank, before the first collective: one that has none never comes to it.

    The first rank that decides writes the verdict, in one step of the store; all others read it.

    Raises:
        Unavailable: somebody is missing; the same on every rank that asked.
    """
    mine, verdict = f"{name}/{rank}", f"{name}/verdict"
    store.set(mine, "here")
    try:
        if rank == 0:
            store.wait([f"{name}/{other}" for other in range(size)], timedelta(seconds=timeout_s))
            store.compare_set(verdict, "", "all")
        else:
            store.wait([verdict], timedelta(seconds=timeout_s + _MARGIN_S))
    except RuntimeError:
        store.compare_set(verdict, "", "missing")
    if store.get(verdict) != b"all":
        here = [other for other in range(size) if store.check([f"{name}/{other}"])]
        missing = [other for other in range(size) if other not in here] or [rank]
        raise Unavailable(
            f"no plugin came on ranks {missing[:8]} of {size} within {timeout_s:g} s: it must be on all of them"
        )


def all_or_none(
    what: str, work: Callable[[], _T], gather: Gather, undo: Callable[[_T], None] | None = None
) -> _T:
    """Do a part of the start on every rank; collective, also where it fails.

    Args:
        what: the part, in words.
        work: may fail, on any rank, before or after its own collectives.
        gather: see `Orders.answer`.
        undo: takes back what was done here when another rank failed.

    Raises:
        Unavailable: another rank failed; its log says why.
        Exception: what `work` raised here.
    """
    answer: _T | None = None
    failure: Exception | None = None
    try:
        answer = work()
    except Exception as error:
        failure = error
    failed = np.flatnonzero(gather(np.array([int(failure is not None)], np.int64))[:, 0]).tolist()
    if failure is not None:
        raise failure
    if failed:
        if undo is not None:
            undo(answer)  # type: ignore[arg-type]
        raise Unavailable(f"ranks {failed[:8]} could not {what}: their logs say why")
    return answer  # type: ignore[return-value]


@contextmanager
def engine_spared(guest: _Guest, hook: str) -> Iterator[None]:
    """Around what a plugin does inside an engine's call: an error costs this rank's further plans, not the engine.

    Raises:
        GateFailed: the one error that must end it; see `GuestAgent.step_boundary`.
    """
    try:
        yield
    except GateFailed:
        raise
    except Exception as error:
        agent = guest.agent
        if agent is None or not agent.trouble:
            _log.exception("hook_failed", hook=hook)
        if agent is not None:
            agent.disable_migration(f"the plugin failed in {hook}: {error!r:.200}")
