"""Communicators outside the registry of `torch.distributed`, with deadlines, that can be aborted.

The engine, the gate and the weight transport each use a communicator that the others cannot block
(R9, R10). They are created directly from the store, so that any thread can abort one and create it
again.
"""

import atexit
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import structlog
import torch
import torch.distributed
from torch import Tensor

from evenkeel_moe.adapters.torch.nccl_group import make_nccl
from evenkeel_moe.errors import InvalidInput, Unavailable

_log = structlog.get_logger(__name__)

TRANSFER = "transfer-"
"""Prefix of the names of communicators that copy weights while the engine serves."""

# The stubs of torch lack most of what its backends offer.
dist: Any = torch.distributed


class Work(Protocol):
    """An operation in flight."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return once it is done; raise RuntimeError if it failed or the timeout passed."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Gathering:
    """An all-gather in flight."""

    work: Work
    parts: list[Tensor]
    """The tensors of all ranks, once it is done."""

    def wait(self) -> Tensor:
        """Return (R, ...), the tensors of all ranks; blocks."""
        self.work.wait()
        return torch.stack(self.parts)


@dataclass(frozen=True, slots=True)
class Operation:
    """One half of a copy between two ranks."""

    tensor: Tensor
    """The data to send, or the memory to receive into; contiguous."""
    peer: int
    sends: bool


class Communicator:
    """One Gloo or NCCL communicator over all ranks.

    Operations raise RuntimeError when a peer is gone or a deadline passed. The communicator is then
    unusable and should be aborted.
    """

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size
        self.device = device
        """Device of the tensors."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> None:
        """Send rows of `sent` to each rank in turn and receive those of each rank; blocks."""
        work = self._live().alltoall_base(
            received, sent, list(received_rows), list(sent_rows), dist.AllToAllOptions()
        )
        work.wait()

    def all_gather(self, value: Tensor) -> Tensor:
        """Return (R, *value.shape), the tensors of all ranks; blocks."""
        return self.start_all_gather(value).wait()

    def start_all_gather(self, value: Tensor) -> Gathering:
        """Start to gather a tensor of the same shape from every rank."""
        parts = [torch.empty_like(value) for _ in range(self.size)]
        return Gathering(self._live().allgather([parts], [value]), parts)

    def start_all_reduce_min(self, value: Tensor) -> Work:
        """Start to replace `value` by its minimum over the ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        work: Work = self._live().allreduce([value], options)
        return work

    def broadcast(self, value: Tensor, source: int) -> None:
        """Replace `value` by that of the source rank; blocks."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._live().broadcast([value], options).wait()

    def start_exchange(self, operations: Sequence[Operation], tag: int) -> list[Work]:
        """Start a batch of point-to-point operations; peers post their halves in the same order.

        Args:
            operations: sends and receives.
            tag: distinguishes batches on Gloo; NCCL matches by order alone.
        """
        backend = self._live()
        if self.device.type != "cuda":
            return [_start(backend, operation, tag) for operation in operations]
        backend._start_coalescing()
        try:
            for operation in operations:
                _start(backend, operation, tag)
        finally:  # An open group would take in all later NCCL calls of this thread.
            work: Work = backend._end_coalescing()
        return [work]

    def abort(self) -> None:
        """Abort the communicator, from any thread; later operations raise RuntimeError.

        Operations in flight here end soon on NCCL, whose abort may hang and so gets a thread of its
        own. Gloo cannot interrupt them; there they end at their own deadline. The connections close
        with the last of them, which ends the operations of the peers. Do not abort Gloo while a
        collective is in flight: the abort would wait for it.
        """
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self.device.type == "cuda":
            thread = threading.Thread(
                target=_abort, args=(backend,), name="evenkeel-abort", daemon=True
            )
            _aborts.add(thread)
            thread.start()
        else:
            backend.abort()

    def _live(self) -> Any:
        backend = self._backend
        if backend is None:
            raise RuntimeError("the communicator was aborted")
        return backend


def _start(backend: Any, operation: Operation, tag: int) -> Work:
    """Start one half of a copy."""
    start = backend.send if operation.sends else backend.recv
    work: Work = start([operation.tensor], operation.peer, tag)
    return work


_aborts: set[threading.Thread] = set()
"""Threads that abort a communicator now."""


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        _log.warning("abort_failed", detail=str(error)[:300])
    finally:
        _aborts.discard(threading.current_thread())


@atexit.register
def _wait_for_aborts(timeout_s: float = 5.0) -> None:
    """Wait when Python exits: a thread back from C++ after that can end the process by an error."""
    until = time.monotonic() + timeout_s
    for thread in tuple(_aborts):
        thread.join(max(until - time.monotonic(), 0.0))


def make_communicator(
    store: Any,
    name: str,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float,
    interface: str = "lo",
) -> Communicator:
    """Connect all ranks. Every rank calls this with the same name, used once per store.

    Args:
        store: shared by the ranks of one generation.
        name: prefix of the keys in the store.
        rank: this rank.
        size: R.
        device: CPU for Gloo, a GPU for NCCL.
        timeout_s: deadline of operations without one of their own.
        interface: network interface of Gloo; empty selects the one this host's name resolves to.

    Raises:
        InvalidInput: this rank has used the name already.
        Unavailable: not all ranks connected in time.
    """
    scoped = dist.PrefixStore(f"evenkeel/{name}", store)
    timeout = timedelta(seconds=timeout_s)
    try:
        if scoped.add(f"uses by rank {rank}", 1) > 1:
            raise InvalidInput(
                f"rank {rank} has used the name {name} already; does it have two agents?"
            )
        if device.type == "cuda":
            transfers = name.startswith(TRANSFER)
            backend = make_nccl(scoped, rank, size, timeout, transfers=transfers)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout = timeout
            if interface:
                gloo._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
            else:
                gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
            backend = dist.ProcessGroupGloo(scoped, rank, size, gloo)
    except RuntimeError as error:
        raise Unavailable(f"communicator {name} of {size} ranks: {error}") from error
    return Communicator(backend, rank, size, device)
