"""The final check of a rank, and the faults that prove that the check can fail."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.engines.reference.config import Fault
from evenkeel_moe.engines.reference.slots import PooledWeights, Router
from evenkeel_moe.model.placement import EMPTY


@dataclass(slots=True)
class FinalCheck:
    """The result of one rank's check of itself and of the group."""

    epoch: int
    epochs_agree: bool
    maps_agree: bool
    slots_checked: int = 0
    wrong_slots: list[dict[str, int]] = field(default_factory=list)
    """Slots whose weights are not those of the map's expert: {layer, local_slot, expert}."""
    problems: list[str] = field(default_factory=list)
    """One sentence per problem; empty if there is none."""

    @property
    def ok(self) -> bool:
        """True if there is no problem."""
        return not self.problems


def inspect_rank(
    rank: int,
    router: Router,
    weights: PooledWeights,
    originals: Sequence[Sequence[Sequence[Tensor]]],
) -> tuple[int, list[dict[str, int]], list[str]]:
    """Compare a rank's slots and routing tables with the checkpoint.

    Args:
        rank: this rank.
        router: its routing tables.
        weights: its slots.
        originals: (L, E) tensors of every expert as loaded.

    Returns:
        (slots compared, wrong slots, sentences on wrong slots and table entries).
    """
    problems = []
    for layer, expert, slot in router.misrouted():
        held = int(router.phy2log[layer, slot])
        problems.append(
            f"rank {rank} routes layer {layer} expert {expert} to slot {slot},"
            f" which holds expert {held}"
        )
    wrong_slots = []
    mine = router.phy2log.reshape(len(originals), router.num_ranks, -1)[:, rank]
    filled = np.argwhere(mine != EMPTY).tolist()
    for layer, local in filled:
        expert = int(mine[layer, local])
        if not _same_bits(weights.tensors(layer, local), originals[layer][expert]):
            wrong_slots.append({"layer": layer, "local_slot": local, "expert": expert})
            problems.append(
                f"rank {rank} layer {layer} slot {local}: weights are not those of expert {expert}"
            )
    return len(filled), wrong_slots, problems


def _same_bits(have: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    pairs = zip(have, want, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def compare_maps(router: Router, communicator: Communicator) -> FinalCheck:
    """Compare the group's epochs and maps; collective over the communicator."""
    width = max(table.slots.shape[1] for table in router.tables)
    header = communicator.all_gather(_on(communicator, np.array([router.epoch, width], np.int64)))
    epochs = header[:, 0].tolist()
    widest = int(header[:, 1].max())
    entries = [router.phy2log.astype(np.int64).reshape(-1)]
    for table in router.tables:
        slots = table.slots.cpu().numpy()
        padding = ((0, 0), (0, widest - slots.shape[1]))
        entries.append(np.pad(slots, padding, mode="edge").reshape(-1))
    maps = communicator.all_gather(_on(communicator, np.concatenate(entries))).cpu()
    votes = [tuple(row) for row in maps.tolist()]
    common = max(votes, key=votes.count)
    odd = [rank for rank, row in enumerate(votes) if row != common]
    check = FinalCheck(router.epoch, len(set(epochs)) == 1, not odd)
    if not check.epochs_agree:
        check.problems.append(f"the epochs of the ranks differ: {epochs}")
    if odd:
        check.problems.append(f"ranks {odd} have another map than the other ranks")
    return check


def _on(communicator: Communicator, values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values).to(communicator.device)


def break_something(
    fault: Fault, rank: int, router: Router, weights: PooledWeights, counts: NDArray[np.int64]
) -> str:
    """Damage this rank and return what was damaged.

    Args:
        fault: the kind of damage.
        rank: this rank.
        router: its routing tables.
        weights: its slots.
        counts: (L, slots_per_rank) tokens of the last step, to find a slot in use.
    """
    layer, local = (int(i) for i in np.unravel_index(int(counts.argmax()), counts.shape))
    expert = int(router.phy2log[layer, rank * counts.shape[1] + local])
    if fault is Fault.BYTE:
        w_in = weights.tensors(layer, local)[0]
        row, column = torch.nonzero(w_in)[0].tolist()
        # The highest byte of a float32 holds its sign: the weight changes from 1 to -1 or back.
        w_in.view(torch.uint8)[row, 4 * column + 3] ^= 0x80
        return f"flipped one byte of expert {expert} in layer {layer} slot {local}"
    if fault is Fault.MAP:
        held = router.phy2log[layer]
        other = next(slot for slot, one in enumerate(held) if one not in (EMPTY, expert))
        router.tables[layer].slots[expert] = other
        return f"layer {layer} expert {expert} is now routed to slot {other}"
    router.epoch += 1
    return f"raised the epoch to {router.epoch} on this rank only"
