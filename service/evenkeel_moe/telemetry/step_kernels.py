"""The board's compiled code: who may enter, entering, adding up."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.model.load import PHASE_CODE, Phase, StepTable

__all__ = ["ROW", "Fate", "add_up", "close", "enter", "judge", "put"]

_MIXED = PHASE_CODE[Phase.MIXED]

ROW = np.dtype(
    [
        ("step", "i8"),
        ("epoch", "i8"),
        ("num_reported", "i8"),
        ("phase", "u4"),
        ("real", "?"),
        ("torn", "?"),
        ("pending", "?"),
    ],
    align=True,
)
"""One step: its first report's epoch, how many ranks reported it, whether any of them really ran it, whether all under
that epoch, and whether it is waited for."""


class Fate:
    """What became of one step of a report. Plain numbers, for compiled code; a step not refused has 0 or the first two."""

    COMPLETE = 1
    """Taken, and with it all ranks have reported the step."""
    TORN = 2
    """Taken, but it ran under another epoch than on the ranks before."""
    DUPLICATE = 4
    LATE = 8
    UNKNOWN_EPOCH = 16
    SUM_MISMATCH = 32
    PASSED_OVER = 64
    """Not asked for, or by a rank that takes no part."""
    CROWDED = 128
    """There was no room for it beside later ones."""
    REFUSED = DUPLICATE | LATE | UNKNOWN_EPOCH | SUM_MISMATCH | PASSED_OVER | CROWDED


_COMPLETE, _TORN, _DUPLICATE, _LATE = Fate.COMPLETE, Fate.TORN, Fate.DUPLICATE, Fate.LATE
_UNKNOWN_EPOCH, _SUM_MISMATCH, _PASSED_OVER = (
    Fate.UNKNOWN_EPOCH,
    Fate.SUM_MISMATCH,
    Fate.PASSED_OVER,
)


@kernel
def add_up(
    counts: NDArray[np.uint32],
    reported: NDArray[np.bool_],
    rows: NDArray[np.int64],
    first: NDArray[np.int32],
    others: NDArray[np.int32],
    total: NDArray[np.uint32],
    sums: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Sums over the slots of each expert.

    Most experts have one slot: to gather those in the order they are written takes two thirds of the time that to
    add slot by slot does.

    Args:
        counts: (capacity, R, L * slots_per_rank) [tokens] of a DESTINATION board; what ranks that did not report left
            there is cleared.
        reported: (capacity, R) which ranks' counts are of the row's step.
        rows: (n,) its rows to add up.
        first: of the `EpochMap` they ran under.
        others: of that map.
        total: (n, L, E) [tokens], written: by expert. Worthless for a step that overflowed.
        sums: (n, L) [tokens], written: over all experts; counts of empty slots are in none.

    Returns:
        (n,) whether an expert's tokens exceed 32 bits.
    """
    overflowed = np.zeros(len(rows), np.bool_)
    num_layers, num_experts = first.shape
    first_of = first.reshape(-1)
    for i in range(len(rows)):
        for rank in range(counts.shape[1]):
            if not reported[rows[i], rank]:
                counts[rows[i], rank] = 0
        row = counts[rows[i]].reshape(-1)
        by_expert = total[i].reshape(-1)
        # Unsigned: of a signed index numba would ask whether it counts from the end.
        for k in range(len(by_expert)):
            by_expert[k] = row[np.uint32(first_of[k])] if first_of[k] >= 0 else np.uint32(0)
        for layer in range(num_layers):
            in_layer = np.uint64(0)
            for expert in range(num_experts):
                in_layer += np.uint64(total[i, layer, expert])
            sums[i, layer] = np.int64(in_layer)
        for k in range(len(others)):
            more, place = np.uint64(row[np.uint32(others[k, 0])]), np.uint32(others[k, 1])
            tokens = np.uint64(by_expert[place]) + more
            by_expert[place] = np.uint32(tokens)
            sums[i, place // np.uint32(num_experts)] += np.int64(more)
            overflowed[i] |= tokens > np.uint64(0xFFFFFFFF)
    return overflowed


@inlined
def _epoch_at(epochs: NDArray[np.int64], epoch: int) -> int:
    """Where an epoch is among those known, -1 where it is not."""
    for k in range(len(epochs)):
        if epochs[k] == epoch:
            return k
    return -1


@inlined
def _seek(
    rows: NDArray[np.void], order: NDArray[np.int64], num_pending: int, at: int, step: int
) -> int:
    """Where in the order a step is, or would be; `at`: a place at or before that."""
    while at < num_pending and rows[order[at]].step < step:
        at += 1
    return at


@kernel
def judge(
    steps: StepTable,
    wrong: NDArray[np.bool_],
    rank: int,
    highest: int,
    floor: int,
    stride: int,
    stride_from: int,
    epochs: NDArray[np.int64],
    active: NDArray[np.bool_],
    rows: NDArray[np.void],
    order: NDArray[np.int64],
    num_pending: int,
    fate: NDArray[np.uint8],
) -> int:
    """Write each step's fate, as far as it is refused; how many of the others no rank reported yet."""
    new = 0
    at = 0
    for i in range(len(steps)):
        step = steps[i].step
        fate[i] = 0
        if step <= highest:
            fate[i] = _DUPLICATE
            continue
        if step >= stride_from and step % stride != 0:
            fate[i] = _PASSED_OVER
            continue
        if step <= floor:
            fate[i] = _LATE
            continue
        k = _epoch_at(epochs, steps[i].epoch)
        if k < 0:
            fate[i] = _UNKNOWN_EPOCH
            continue
        if not active[k, rank]:
            fate[i] = _PASSED_OVER
            continue
        if wrong[i]:
            fate[i] = _SUM_MISMATCH
            continue
        at = _seek(rows, order, num_pending, at, step)
        if at == num_pending or rows[order[at]].step != step:
            new += 1
    return new


@kernel
def enter(
    steps: StepTable,
    rank: int,
    epochs: NDArray[np.int64],
    needed: NDArray[np.int64],
    rows: NDArray[np.void],
    order: NDArray[np.int64],
    num_pending: int,
    tokens: NDArray[np.int64],
    compute_s: NDArray[np.float64],
    reported: NDArray[np.bool_],
    fate: NDArray[np.uint8],
    place: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Enter the steps not refused, rising, for which there is room; their rows go to `place`, -1 for the others.

    Returns:
        The steps pending now, how many were entered, and all fates together.
    """
    seen = 0
    entered = 0
    at = 0
    for i in range(len(steps)):
        place[i] = -1
        if fate[i]:
            seen |= fate[i]
            continue
        entered += 1
        one = steps[i]
        at = _seek(rows, order, num_pending, at, one.step)
        if at == num_pending or rows[order[at]].step != one.step:
            free = order[num_pending]
            for k in range(num_pending, at, -1):
                order[k] = order[k - 1]
            order[at] = free
            num_pending += 1
            row = rows[free]
            row.step = one.step
            row.epoch = one.epoch
            row.num_reported = 0
            row.phase = one.phase
            row.real = 0
            row.torn = 0
            row.pending = 1
            tokens[free] = 0
            compute_s[free] = np.nan
            reported[free] = False
        place[i] = order[at]
        row = rows[place[i]]
        if row.epoch != one.epoch:
            row.torn = 1
            fate[i] |= _TORN
        if row.phase != one.phase:
            row.phase = _MIXED
        if one.dummy == 0:
            row.real = 1
            tokens[place[i], rank] = one.tokens
        compute_s[place[i], rank] = one.compute_s
        reported[place[i], rank] = True
        row.num_reported += 1
        k = _epoch_at(epochs, row.epoch)
        if k >= 0 and row.num_reported == needed[k]:
            fate[i] |= _COMPLETE
        seen |= fate[i]
    return num_pending, entered, seen


@kernel
def put(
    counts: NDArray[np.int32] | NDArray[np.int64],
    place: NDArray[np.int64],
    rank: int,
    board: NDArray[np.uint32],
) -> None:
    """Write one rank's counts, (n, W), into the rows they belong to."""
    for i in range(len(place)):
        if place[i] >= 0:
            row = board[place[i], rank]
            for k in range(len(row)):
                row[k] = np.uint32(counts[i, k])


@kernel
def close(
    closed: NDArray[np.int64], rows: NDArray[np.void], order: NDArray[np.int64], num_pending: int
) -> int:
    """Wait for some rows no longer; they are the first to be used again. How many are still waited for."""
    for row in closed:
        rows[row].pending = 0
    kept = 0
    for i in range(num_pending):
        if rows[order[i]].pending:
            order[kept] = order[i]
            kept += 1
    for i in range(len(closed)):
        order[kept + i] = closed[i]
    return kept
