"""Steps that all ranks of a group take together, on a communicator with nothing else in flight.

If a step failed on one rank only, the others would enter collectives that never complete. So the
ranks compare their results after each.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from evenkeel_moe.errors import Unavailable

_T = TypeVar("_T")


class RankGroup(Protocol):
    """The ranks: a communicator, or a CPU group of an engine."""

    def all_gather(self, value: Tensor) -> Tensor:
        """Return (R, *value.shape), the tensors of all ranks; collective."""
        ...


def gather(group: RankGroup, value: Tensor) -> Tensor:
    """Return (R, *value.shape), the tensors of all ranks; collective.

    Raises:
        Unavailable: not all ranks came before the communicator's deadline.
    """
    try:
        return group.all_gather(value)
    except RuntimeError as error:
        raise Unavailable(f"not all ranks came: {str(error)[:300]}") from error


def together(
    group: RankGroup, what: str, work: Callable[[], _T], undo: Callable[[_T], object] | None = None
) -> _T:
    """Return the result of `work` on this rank, once it has succeeded on all ranks; collective.

    Args:
        group: of the ranks.
        what: the work, in words that follow "cannot".
        work: may fail on any rank, before or after its own collectives.
        undo: reverts the work of this rank if another rank failed.

    Raises:
        Unavailable: `work` failed on another rank, or not all ranks came.
        Exception: the error of `work` on this rank.
    """
    try:
        result = work()
    except Exception:
        # A rank that fails still takes part, so that no other rank waits for it.
        with suppress(Unavailable):
            gather(group, torch.ones(1, dtype=torch.uint8))
        raise
    failed = gather(group, torch.zeros(1, dtype=torch.uint8))[:, 0].nonzero()[:, 0].tolist()
    if failed:
        if undo is not None:
            undo(result)
        raise Unavailable(f"ranks {failed[:8]} cannot {what}: their logs say why")
    return result
