"""Starts the guests of all ranks or of none, and keeps plugin errors away from the engine.

If a start failed on one rank only, the other ranks would enter collectives that never complete:
they would hold their balancer back, or wait for a rank that has no guest. So the ranks compare
their results after each part of the start.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog
import torch.distributed

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.ports import GateFailed
from evenkeel_moe.engines.guest.plan_agreement import Gather
from evenkeel_moe.errors import Unavailable

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_distributed: Any = torch.distributed
_MARGIN_S = 10.0
_calls = itertools.count()


class _Guest(Protocol):
    @property
    def agent(self) -> Agent | None: ...


def require_plugin_in_group(group: Any, timeout_s: float) -> None:
    """Call `require_plugin_on_all` for a process group, over the store of the default group."""
    try:
        store = _distributed.distributed_c10d._get_default_store()
        first = _distributed.get_process_group_ranks(group)[0]
    except (AttributeError, RuntimeError, ValueError, KeyError) as error:
        detail = f"the engine's groups have no store: {error!r:.200}"
        _log.warning("roll_call_left_out", detail=detail)
        return
    name = f"evenkeel/roll-call/{first}/{next(_calls)}"
    require_plugin_on_all(store, name, group.rank(), group.size(), timeout_s)


def require_plugin_on_all(store: Any, name: str, rank: int, size: int, timeout_s: float) -> None:
    """Check that every rank runs the plugin, before the first collective.

    A rank without the plugin would never enter that collective. The first rank that decides writes
    the verdict with one atomic operation of the store; all other ranks read it.

    Raises:
        Unavailable: a rank is missing. Every rank that called gets the same error.
    """
    announce_plugin(store, name, rank)
    try:
        if rank == 0:
            store.wait([f"{name}/{other}" for other in range(size)], timedelta(seconds=timeout_s))
            _decide(store, name, "all")
        else:
            store.wait([f"{name}/decided"], timedelta(seconds=timeout_s + _MARGIN_S))
    except RuntimeError:
        _decide(store, name, "missing")
    if store.get(f"{name}/verdict") != b"all":
        missing = [other for other in range(size) if not store.check([f"{name}/{other}"])] or [rank]
        raise Unavailable(
            f"the plugin did not start on ranks {missing[:8]} of {size} within {timeout_s:g} s:"
            " it must run on all of them"
        )


def all_or_none(
    what: str, work: Callable[[], _T], gather: Gather, undo: Callable[[_T], object] | None = None
) -> _T:
    """Run one part of the start on every rank; collective, also if it fails.

    Args:
        what: the part, in words.
        work: may fail on any rank, before or after its own collectives.
        gather: see `plan_agreement.Gather`.
        undo: reverts the work of this rank if another rank failed.

    Raises:
        Unavailable: another rank failed; its log has the reason.
        Exception: the error of `work` on this rank.
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
        raise Unavailable(f"ranks {failed[:8]} could not {what}: see their logs")
    return answer  # type: ignore[return-value]


def announce_plugin(store: Any, name: str, rank: int) -> None:
    """Tell the ranks that will call `require_plugin_on_all` that this rank runs the plugin."""
    store.set(f"{name}/{rank}", "here")


def decline_start(store: Any, name: str) -> None:
    """Let `require_plugin_on_all` fail at once on the other ranks: this one will not call it."""
    _decide(store, name, "missing")


def _decide(store: Any, name: str, verdict: str) -> None:
    store.compare_set(f"{name}/verdict", "", verdict)
    # Not every TCPStore wakes those who wait for a key that `compare_set` wrote.
    store.set(f"{name}/decided", "")


def require_announced(store: Any, name: str, ranks: Sequence[int]) -> None:
    """Check that other ranks have told that they run the plugin; else decline the start.

    Raises:
        Unavailable: one of them has not.
    """
    missing = [rank for rank in ranks if not store.check([f"{name}/{rank}"])]
    if missing:
        decline_start(store, name)
        raise Unavailable(f"ranks {missing[:8]} join without the plugin: it must run on all ranks")


@contextmanager
def protect_engine(guest: _Guest, hook: str) -> Iterator[None]:
    """Keep errors of plugin code inside an engine function away from the engine.

    After an error this rank takes no more plans; the engine goes on.

    Raises:
        GateFailed: the one error that must end the engine; see `Agent.step_boundary`.
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
