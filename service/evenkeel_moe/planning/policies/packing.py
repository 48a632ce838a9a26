"""Packs weighted items into packs of equal count: the heaviest item first, into the lightest pack.

Items are expert groups packed into nodes, or replicas packed into ranks.

Source: deepseek-ai/EPLB eplb.py@d52c72d, packing step.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.checks import undivided


def balanced_packing(
    weight: NDArray[np.float32], num_packs: int, kinds: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Put n items into packs of n / num_packs items each, keeping the heaviest pack light.

    Args:
        weight: (X, n) float32 - weight of each item, in X independent rows.
        num_packs: number of packs.
        kinds: (X, n) int32 - items of one kind do not share a pack while another pack has room; -1
            for no kind. None for the rule of the source, which lets them share.

    Returns:
        pack_index: (X, n) int32 - the pack of each item.
        position: (X, n) int32 - its place inside the pack, in the order packed.

    Raises:
        ShapeMismatch: `weight` is not two-dimensional.
        InvalidInput: the items do not divide over the packs.

    Order: equal weights in item order; equal packs lowest index first. Sums are float32, as in the
    source.
    """
    if weight.ndim != 2:
        raise ShapeMismatch(f"weight must be (X, n), got {weight.shape}")
    rows, items = weight.shape
    if words := undivided(items, "items", num_packs, "packs"):
        raise InvalidInput(words)
    if items == num_packs:
        # With one item per pack there is nothing to choose: the source keeps the items in order.
        index = np.broadcast_to(np.arange(items, dtype=np.int32), (rows, items))
        return index.copy(), np.zeros((rows, items), np.int32)
    marks = np.empty((0, 0), np.int32) if kinds is None else np.ascontiguousarray(kinds, np.int32)
    return _pack(np.ascontiguousarray(weight, np.float32), num_packs, marks)


@kernel
def _pack(
    weight: NDArray[np.float32], num_packs: int, kinds: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pack every row; `kinds` is (0, 0) where kinds do not matter."""
    rows, items = weight.shape
    room = items // num_packs
    pack_index = np.empty((rows, items), np.int32)
    position = np.empty((rows, items), np.int32)
    # Packs that still have room, in index order, so that a tie goes to the lowest index.
    open_packs = np.empty(num_packs, np.int64)
    total = np.empty(num_packs, np.float32)
    count = np.empty(num_packs, np.int64)
    apart = kinds.shape[0] > 0
    holds = np.zeros((num_packs, kinds.max() + 1 if apart else 1), np.bool_)
    for row in range(rows):
        holds[:] = False
        total[:] = np.float32(0.0)
        count[:] = 0
        for pack in range(num_packs):
            open_packs[pack] = pack
        num_open = num_packs
        for item in np.argsort(-weight[row], kind="mergesort"):
            at = 0
            least = total[open_packs[0]]
            for i in range(1, num_open):
                candidate = total[open_packs[i]]
                if candidate < least:
                    least = candidate
                    at = i
            if apart and kinds[row, item] >= 0:
                kind = kinds[row, item]
                if holds[open_packs[at], kind]:
                    least = np.float32(np.inf)
                    for i in range(num_open):
                        candidate = total[open_packs[i]]
                        if candidate < least and not holds[open_packs[i], kind]:
                            least = candidate
                            at = i
                holds[open_packs[at], kind] = True
            pack = open_packs[at]
            pack_index[row, item] = pack
            position[row, item] = count[pack]
            total[pack] += weight[row, item]
            count[pack] += 1
            if count[pack] == room:
                num_open -= 1
                for i in range(at, num_open):
                    open_packs[i] = open_packs[i + 1]
    return pack_index, position
