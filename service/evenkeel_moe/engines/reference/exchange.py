"""The exchange of a layer: sends rows to the ranks of their experts, and the results back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.engines.reference.model import expert_forward
from evenkeel_moe.engines.reference.pace import Pace
from evenkeel_moe.errors import PeerViolation, Reason


class EpochMismatch(PeerViolation):
    """Two ranks have different maps. Every rank leaves before it computes (R8)."""

    default_reason = Reason.EPOCH_MISMATCH


def check_epochs(epochs: Sequence[int]) -> None:
    """Refuse a step of ranks with different maps (R8).

    Args:
        epochs: the epoch of each rank.

    Raises:
        EpochMismatch: they are not equal.
    """
    if len(set(epochs)) > 1:
        listed = ", ".join(f"rank {rank} at {epoch}" for rank, epoch in enumerate(epochs))
        raise EpochMismatch(f"epochs differ: {listed}")


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result of one layer's exchange."""

    outputs: Tensor
    """(n * k, D) results of this rank's rows, in the order of the rows."""
    received: Tensor
    """(slots_per_rank,) int64 on the CPU - rows that each local slot of this rank received."""
    compute_s: float
    """Seconds in the routed experts, without the collectives."""
    stop: bool
    """True if some rank asked to stop after this step."""


class Exchange:
    """Moves rows between ranks. The exchange of the counts comes first and carries the epoch."""

    def __init__(
        self,
        communicator: Communicator,
        slots_per_rank: int,
        d_model: int,
        pace: Pace | None = None,
        shared_slots: int = 0,
    ) -> None:
        """Make the exchange of a rank; the last `shared_slots` slots are of shared experts."""
        self._communicator = communicator
        self._pace = pace
        self._slots_per_rank = slots_per_rank
        self._routed_slots = slots_per_rank - shared_slots
        self._d_model = d_model

    def layer(
        self,
        rows: Tensor,
        slots: Tensor,
        epoch: int,
        stop: bool,
        tensors_of: Callable[[int], Sequence[Tensor]],
    ) -> LayerResult:
        """Run every row through the expert in its slot, on whichever rank that is.

        Args:
            rows: (m, D) activations of this rank.
            slots: (m,) int64 global slot of each row.
            epoch: of the map that gave the slots.
            stop: True if this rank wants to stop after the step.
            tensors_of: local slot -> tensors of its expert.

        Raises:
            EpochMismatch: a rank's map has another epoch; nothing was computed.
        """
        order = torch.argsort(slots, stable=True)
        ranks = slots // self._slots_per_rank
        sent = torch.bincount(ranks, minlength=self._communicator.size)
        sent_rows, received_rows, any_stop = self._agree(sent, epoch, stop)

        payload = torch.empty(len(rows), self._d_model + 1, device=rows.device)
        payload[:, :-1] = rows[order]
        payload[:, -1] = slots[order] % self._slots_per_rank
        arrived = torch.empty(sum(received_rows), self._d_model + 1, device=rows.device)
        self._communicator.all_to_all(arrived, payload, received_rows, sent_rows)

        outputs, received, compute_s = self._compute(arrived, tensors_of)
        returned = torch.empty(len(rows), self._d_model, device=rows.device)
        self._communicator.all_to_all(returned, outputs, sent_rows, received_rows)
        result = torch.empty_like(returned)
        result[order] = returned
        return LayerResult(result, received, compute_s, any_stop)

    def _agree(self, sent: Tensor, epoch: int, stop: bool) -> tuple[list[int], list[int], bool]:
        """Exchange the counts; every rank sees all epochs and refuses a mismatch (R8)."""
        size = self._communicator.size
        header = torch.tensor([epoch, int(stop)], dtype=torch.int64, device=sent.device)
        mine = torch.cat([header.expand(size, 2), sent[:, None]], dim=1).contiguous()
        theirs = torch.empty_like(mine)
        ones = [1] * size
        self._communicator.all_to_all(theirs, mine, ones, ones)
        epochs, stops, counts = theirs.t().tolist()
        check_epochs(epochs)
        return sent.tolist(), counts, any(stops)

    def _compute(
        self, arrived: Tensor, tensors_of: Callable[[int], Sequence[Tensor]]
    ) -> tuple[Tensor, Tensor, float]:
        began = time.perf_counter()
        local = arrived[:, -1].long()
        order = torch.argsort(local, stable=True)
        received = torch.bincount(local, minlength=self._slots_per_rank).cpu()
        rows = torch.tensor_split(arrived[order, :-1], received.cumsum(0)[:-1])
        routed = range(self._routed_slots)
        shared = range(self._routed_slots, self._slots_per_rank)
        results = self._run(rows, routed, tensors_of, began)
        compute_s = time.perf_counter() - began
        if shared:
            results += self._run(rows, shared, tensors_of, time.perf_counter())
        outputs = torch.empty(len(arrived), self._d_model, device=arrived.device)
        if results:
            outputs[order] = torch.cat(results)
        return outputs, received, compute_s

    def _run(
        self,
        rows: Sequence[Tensor],
        slots: range,
        tensors_of: Callable[[int], Sequence[Tensor]],
        began: float,
    ) -> list[Tensor]:
        """Return the results of the slots that have rows, once they have taken their time."""
        counts = [len(rows[slot]) for slot in slots]
        results = [
            expert_forward(tensors_of(slot), rows[slot]) for slot in slots if len(rows[slot])
        ]
        if self._pace is not None:
            self._pace.wait(began, counts, shared=slots.start >= self._routed_slots)
        return results
