"""LPLB: splits tokens over replicas so that the fullest rank has the least load.

This is one linear program per layer and batch: minimise M such that for every rank the load of its
shared copies + its fixed load + a slack = M, and for every expert on several ranks the loads of its
copies sum to the tokens routed to it. The matrix depends on the placement alone; a batch changes
only the right-hand side. `ExactSplit` solves it exactly on a CPU thread, by the flow of
`batch_split`; `lplb_kernel.KernelSplit` is the interior-point form for GPUs in one kernel, and
`interior.BatchedSplit` the same in torch alone.

The peak is the best that a dispatcher can reach on this placement: all tokens of an expert with one
replica go to that replica, however hot it is.
"""

from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.batch_split import list_layers, split_tokens
from evenkeel_moe.dispatch.choice import assign_quotas, check_demand
from evenkeel_moe.dispatch.counts import MOST_TOKENS, check_counts, check_type
from evenkeel_moe.dispatch.interior import BatchedSplit, TokenSplit
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement


class ExactSplit:
    """The exact split of one placement on one CPU thread.

    It is not safe for concurrent use: its buffers, and its results, are reused from batch to batch.

    Attributes:
        rank_load: (L, R) float64 [tokens] load of the ranks after the split of the last batch.
    """

    def __init__(self, placement: Placement) -> None:
        """Prepare a placement, once per epoch.

        Raises:
            InfeasiblePlan: an expert has no replica.
        """
        placement.check_placed()
        layers, slots, ranks, experts = placement.sizes
        # Copies: numba would compile another version for read-only arrays.
        rows, log2phy, logcnt = (
            array.copy() for array in (placement.phy2log, placement.log2phy, placement.logcnt)
        )
        self._lists = (rows, *list_layers(rows, experts, ranks), log2phy, logcnt)
        self._flow = np.zeros((layers, slots))
        self.rank_load: NDArray[np.float64] = np.zeros((layers, ranks))
        self._split = TokenSplit.even(placement)
        self._shares, self._peak = self._split.probabilities.numpy(), self._split.peak.numpy()

    def solve(self, counts: Tensor) -> TokenSplit:
        """Split one batch of every layer.

        Args:
            counts: (L, E) [tokens] - integers or float32/float64 on the CPU, summed over all ranks;
                idle ranks add nothing.

        Returns:
            Probabilities and peaks; the next call overwrites them.

        Raises:
            ShapeMismatch: counts of another placement.
            InvalidInput: half precision, or counts that `check_counts` refuses.
        """
        self._run(counts, slice(None), whole=False)
        return self._split

    def quotas(self, counts: Tensor, layer: int | None = None) -> tuple[Tensor, Tensor]:
        """Split one batch of every layer, or of one, into whole tokens.

        Args:
            counts: (L, E) [tokens], whole numbers; (1, E) for one layer.
            layer: index of the layer; None for all.

        Returns:
            (quotas (L, E, X) int64 [tokens] summing to the counts, peak (L,) float64: the optimum
            of the program rounded up, which is the least possible in whole tokens).

        Raises:
            ShapeMismatch: counts of another placement, or a layer that it does not have.
            InvalidInput: as `solve`; also for counts that are not whole.
        """
        which = slice(None) if layer is None else slice(layer, layer + 1)
        self._run(counts, which, whole=True)
        quotas = whole_quotas(self._split.probabilities[which], counts.to(torch.int64))
        return quotas, self._split.peak[which].clone()

    def _run(self, counts: Tensor, which: slice, *, whole: bool) -> None:
        """Solve one batch of all layers, or of one, into the buffers."""
        shape = self._shares[which].shape[:2]
        check_type(counts, shape, "counts")
        load = counts.to(torch.float64).contiguous().numpy()
        out = self._flow, self.rank_load, self._peak, self._shares
        if not _split_layers(load, which.start or 0, *self._lists, whole, *out):
            check_counts(counts, shape, "counts", whole=whole)


@kernel
def _split_layers(
    load: NDArray[np.float64],
    first_layer: int,
    phy2log: NDArray[np.int32],
    first: NDArray[np.int64],
    following: NDArray[np.int64],
    order: NDArray[np.int64],
    log2phy: NDArray[np.int32],
    logcnt: NDArray[np.int32],
    whole: bool,
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
    peak: NDArray[np.float64],
    shares: NDArray[np.float64],
) -> bool:
    """Run `split_tokens` on an (n, E) load of the layers from `first_layer` on.

    Writes flow (L, S), used (L, R), peak (L,), and (L, E, X) the shares of the replicas of experts
    on several ranks.

    Returns:
        False, with nothing solved, if `check_counts` refuses the load.
    """
    for tokens in load.ravel():
        # NaN fails both comparisons.
        if not 0.0 <= tokens <= MOST_TOKENS or (whole and tokens != np.floor(tokens)):
            return False
    for n in range(load.shape[0]):
        layer = first_layer + n
        used[layer] = 0.0
        peak[layer] = split_tokens(
            load[n], phy2log[layer], first[layer], following[layer], order[layer], whole,
            flow[layer], used[layer],
        )  # fmt: skip
        # Experts on one rank come first in the order: their shares are even in every batch.
        for expert in order[layer][::-1]:
            slot, copies, at = first[layer, expert], logcnt[layer, expert], 0
            if following[layer, slot] < 0:
                break
            while slot >= 0:
                # Copies on one rank, which come before the next slot listed, share evenly.
                after, begin = following[layer, slot], at
                while at < copies and (after < 0 or log2phy[layer, expert, at] < after):
                    at += 1
                share = 1.0 / copies
                if load[n, expert] > 0.0:
                    share = flow[layer, slot] / load[n, expert] / (at - begin)
                for replica in range(begin, at):
                    shares[layer, expert, replica] = share
                slot = after
    return True


class _QuotaChoice(ABC):
    """Gives every replica its quota of whole tokens."""

    needs_demand = True

    def __init__(self, tables: DispatchTables) -> None:
        self._tables = tables

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`."""
        tables = self._tables
        wanted = check_demand(tables, experts, demand)
        quotas = self._quotas(layer, wanted.sum(dim=0))
        slots = tables.log2phy[layer]
        holder = torch.div(slots, tables.placement.slots_per_rank, rounding_mode="floor")
        return assign_quotas(experts, slots, holder, quotas, wanted.to(torch.int64), tables.ep_rank)

    @abstractmethod
    def _quotas(self, layer: int, counts: Tensor) -> Tensor:
        """Return (E, X) int64 [tokens] for each replica, from (E,) counts over all ranks."""


class LplbChoice(_QuotaChoice):
    """LPLB as a replica choice: whole-token quotas from the exact split of the demand of the batch.

    The peak is exactly the optimum of the program rounded up; sampling would add noise. On a GPU a
    choice copies counts to the CPU, which is a sync; `DeviceLplbChoice` does not.
    """

    def __init__(self, tables: DispatchTables) -> None:
        """Prepare the tables' placement."""
        super().__init__(tables)
        self._split = ExactSplit(tables.placement)

    def _quotas(self, layer: int, counts: Tensor) -> Tensor:
        found, _ = self._split.quotas(counts.cpu().unsqueeze(0), layer)
        return found[0].to(counts.device)


class DeviceSplit(Protocol):
    """A solver that stays on the device of the counts."""

    def solve(self, counts: Tensor) -> TokenSplit:
        """Split one batch of every layer, by (L, E) [tokens]."""
        ...


def device_split(placement: Placement, device: torch.device) -> DeviceSplit:
    """Return the solver of a placement for a device: one kernel where Triton has a GPU.

    Without Triton, on a CPU and for placements too large for one block of a GPU it is
    `BatchedSplit`, which takes many launches.

    Raises:
        InfeasiblePlan: an expert has no replica.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from evenkeel_moe.dispatch.lplb_kernel import KernelSplit, kernel_fits

        if kernel_fits(placement):
            return KernelSplit(placement, device)
    return BatchedSplit(placement, device)


class DeviceLplbChoice(_QuotaChoice):
    """LPLB by `device_split`: it can be captured in a CUDA graph, unlike `LplbChoice`.

    The peak is that of the program plus at most one token for each replica of a shared expert on
    the rank. All ranks compute the same quotas from the same demand on devices of one kind; on
    devices that round differently a quota can be missed by a token, and no token is lost.
    """

    def __init__(self, tables: DispatchTables) -> None:
        """Prepare the tables' placement for one layer at a time, on the tables' device."""
        super().__init__(tables)
        _, _, ranks, experts = tables.placement.sizes
        self._solvers = [
            device_split(Placement(row[None], ranks, experts), tables.log2phy.device)
            for row in tables.placement.phy2log
        ]

    def _quotas(self, layer: int, counts: Tensor) -> Tensor:
        tokens = counts.to(torch.int64).unsqueeze(0)
        found = whole_quotas(self._solvers[layer].solve(tokens).probabilities, tokens)[0]
        width = self._tables.log2phy.shape[2]
        return torch.nn.functional.pad(found, (0, width - found.shape[1]))


def whole_quotas(shares: Tensor, counts: Tensor) -> Tensor:
    """Round the tokens of each replica so that those of an expert sum to its count.

    Each quota is within one token of its share, because the sums over the first replicas are
    rounded, not the quotas. Nothing is read back to the host.

    Args:
        shares: (L, E, X) float64 - share of each replica; rows sum to 1 up to rounding.
        counts: (L, E) int64 [tokens], below 2**52.

    Returns:
        (L, E, X) int64 [tokens], not negative; rows sum to `counts`.
    """
    tokens = counts.unsqueeze(-1)
    reached = torch.minimum((shares.cumsum(dim=-1) * tokens).round().to(torch.int64), tokens)
    reached[..., -1:] = tokens
    return reached.diff(dim=-1, prepend=torch.zeros_like(tokens))
