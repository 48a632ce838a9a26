"""What the ranks of an engine do alike or not at all, and what an error of ours must never do: end the engine.

A start that fails on one rank and not on the others would leave them in collectives that never meet: the others would
hold their balancer back, or wait for a rank that knows nothing of it. So after each part of it the ranks compare.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
import structlog

from evenkeel.agent.guest import GuestAgent
from evenkeel.agent.ports import GateFailed
from evenkeel.engines.guest.orders import Gather
from evenkeel.errors import Unavailable

__all__ = ["all_or_none", "engine_spared"]

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class _Guest(Protocol):
    @property
    def agent(self) -> GuestAgent | None: ...


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
            agent.take_no_more(f"the plugin failed in {hook}: {error!r:.200}")
