"""NCCL groups of torch that cannot end the engine's process."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed

from evenkeel_moe.errors import Unavailable

_TRANSFER_CTAS = 8
"""Thread blocks NCCL may occupy on a GPU for such copies. The engine's cooperative kernels wait for
all multiprocessors they ask for; copies that occupied them would wait for the engine in turn."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()
"""Held while the environment differs from the engine's."""

# The stubs of torch lack most of what its backends offer.
dist: Any = torch.distributed


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """Let torch make an NCCL group without a watchdog; only operations then raise its errors.

    The watchdog ends the process when a peer fails. With `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` it
    would not, but it would still ask the monitor of the engine's first group to do so some minutes
    later. Torch reads both settings from the environment when it makes a group (ProcessGroupNCCL's
    constructor and `Watchdog::runLoop`). The variable stays afterwards, with torch's default,
    because removing one can disturb other threads that read the environment.
    """
    variables = os.environ  # noqa: TID251 - set for torch, and put back
    with _environment:
        before = variables.get(_BLOCKING_WAIT, "0")
        variables[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            variables[_BLOCKING_WAIT] = before


def await_ranks(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Return once all ranks have called this with stores of one prefix.

    Raises:
        Unavailable: some did not in time; the message names them.
    """
    names = [f"here/{other}" for other in range(size)]
    try:
        store.set(names[rank], "1")
        store.wait(names, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other, name in enumerate(names) if not store.check([name])]
        raise Unavailable(
            f"ranks {missing[:8]} of {size} did not come within {timeout_s:g} s: {str(error)[:200]}"
        ) from error


def make_nccl(store: Any, rank: int, size: int, timeout: timedelta, *, transfers: bool) -> Any:
    """Return an NCCL backend once all ranks are there, because NCCL's own wait never ends.

    Args:
        store: with a prefix of its own.
        rank: this rank.
        size: R.
        timeout: of the wait for the ranks, and of operations.
        transfers: True for a group that copies weights while the engine serves.

    Raises:
        Unavailable: some ranks did not come in time.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    await_ranks(store, rank, size, timeout.total_seconds())
    if not transfers:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options.config.max_ctas = _TRANSFER_CTAS
    # Its stream comes from torch's pool for high priority, which vLLM and SGLang do not use.
    options.is_high_priority_stream = True
    with _no_watchdog():
        return dist.ProcessGroupNCCL(store, rank, size, options)
