"""Process groups of their own: made from a store, waited for with a deadline, aborted, never global.

The engine, the gate and the weight transport each use a communicator that the others cannot block
(R9, R10). They are made directly from the store, outside the registry of `torch.distributed`, so that
one can be aborted and made again from any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from evenkeel_moe.errors import Unavailable

__all__ = ["TRANSFER", "Communicator", "Operation", "Work", "make_communicator"]

TRANSFER = "transfer-"
"""Names of communicators that copy weights beside serving begin with it."""
_TRANSFER_CTAS = 8
"""Blocks NCCL may hold on a GPU for such copies: the engine's cooperative kernels wait for all multiprocessors they ask
for, and copies that held them would wait for the engine in turn."""

# The stubs of torch lack most of what its backends offer.
dist: Any = torch.distributed


class Work(Protocol):
    """An operation in flight."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return once it is done; raises RuntimeError when it failed or the time is over."""
        ...

    def is_completed(self) -> bool:
        """Whether it is done or failed."""
        ...


@dataclass(frozen=True, slots=True)
class Operation:
    """One half of a copy between two ranks."""

    tensor: Tensor
    """What is sent, or where what arrives goes; contiguous."""
    peer: int
    sends: bool


class Communicator:
    """One Gloo or NCCL communicator over all ranks.

    Operations raise RuntimeError when a peer is gone or a deadline passed; the communicator is then
    of no more use and should be aborted.
    """

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size
        self.device = device
        """Where tensors must lie."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> None:
        """Rows of `sent` to each rank in turn, rows of each rank in turn into `received`; waits."""
        work = self._live().alltoall_base(
            received, sent, list(received_rows), list(sent_rows), dist.AllToAllOptions()
        )
        work.wait()

    def all_gather(self, value: Tensor) -> Tensor:
        """(R, *value.shape) - the tensor of every rank; waits."""
        gathered = [torch.empty_like(value) for _ in range(self.size)]
        self._live().allgather([gathered], [value]).wait()
        return torch.stack(gathered)

    def start_all_reduce_min(self, value: Tensor) -> Work:
        """Begin replacing `value` by its minimum over the ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        work: Work = self._live().allreduce([value], options)
        return work

    def broadcast(self, value: Tensor, source: int) -> None:
        """Replace `value` by that of the source rank; waits."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._live().broadcast([value], options).wait()

    def start_exchange(self, operations: Sequence[Operation], tag: int) -> list[Work]:
        """Begin a batch of point-to-point operations; the peers post their halves in the same order.

        Args:
            operations: sends and receives.
            tag: keeps batches apart on Gloo; NCCL goes by order alone.
        """
        backend = self._live()
        coalesce = self.device.type == "cuda"
        if coalesce:
            backend._start_coalescing()
        works = [
            backend.send([op.tensor], op.peer, tag)
            if op.sends
            else backend.recv([op.tensor], op.peer, tag)
            for op in operations
        ]
        return [backend._end_coalescing()] if coalesce else works

    def abort(self) -> None:
        """Break the communicator, from any thread; later operations raise RuntimeError.

        Operations in flight here end at once on NCCL, and on Gloo, which cannot interrupt them, at
        their own deadline; with the last of them the connections close, which ends those of the peers.
        Not for a communicator with a collective in flight: giving it up would wait for that.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _live(self) -> Any:
        backend = self._backend
        if backend is None:
            raise RuntimeError("the communicator was aborted")
        return backend


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
    """Connect all ranks; every rank calls this with the same name, which is used once per store.

    Args:
        store: shared by the ranks of one generation.
        name: prefix of the keys in the store.
        rank: this rank.
        size: R.
        device: CPU for Gloo, a GPU for NCCL.
        timeout_s: deadline of an operation that is given none.
        interface: network interface of Gloo; empty takes the one this host's name leads to.

    Raises:
        Unavailable: not all ranks came in time.
    """
    scoped = dist.PrefixStore(f"evenkeel/{name}", store)
    timeout = timedelta(seconds=timeout_s)
    try:
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            if name.startswith(TRANSFER):
                nccl.config.max_ctas = _TRANSFER_CTAS
            return Communicator(dist.ProcessGroupNCCL(scoped, rank, size, nccl), rank, size, device)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        if interface:
            gloo._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        else:
            gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
        return Communicator(dist.ProcessGroupGloo(scoped, rank, size, gloo), rank, size, device)
    except RuntimeError as error:
        raise Unavailable(f"communicator {name} of {size} ranks: {error}") from error
