"""The numba kernels of the step buffer: check steps, add them, sum their counts, release rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.model.load import PHASE_CODE, Phase, StepTable

_MIXED = PHASE_CODE[Phase.MIXED]

ROW = np.dtype(
    [
        ("step", "i8"),
        ("epoch", "i8"),
        ("num_reported", "i8"),
        ("phase", "u4"),
        ("real", "?"),
        ("mixed_epochs", "?"),
        ("pending", "?"),
    ],
    align=True,
)
"""One step: the epoch of its first report, the number of ranks that reported it, whether a rank ran
it as no dummy step (real), whether ranks reported different epochs, and whether the row is in
use."""


class StepFlag:
    """Bits that describe the outcome of one step of a report.

    They are plain numbers for compiled code. A step that is not refused has at most the first two.
    """

    COMPLETE = 1
    """Accepted, and all ranks have now reported the step."""
    OTHER_EPOCH = 2
    """Accepted, but under another epoch than on the ranks before."""
    DUPLICATE = 4
    LATE = 8
    UNKNOWN_EPOCH = 16
    SUM_MISMATCH = 32
    SKIPPED = 64
    """Not sampled, or reported by a rank that takes no part."""
    NO_ROOM = 128
    """Later steps took all rows."""
    REFUSED = DUPLICATE | LATE | UNKNOWN_EPOCH | SUM_MISMATCH | SKIPPED | NO_ROOM


_COMPLETE, _OTHER_EPOCH = StepFlag.COMPLETE, StepFlag.OTHER_EPOCH
_DUPLICATE, _LATE, _SKIPPED = StepFlag.DUPLICATE, StepFlag.LATE, StepFlag.SKIPPED
_UNKNOWN_EPOCH, _SUM_MISMATCH = StepFlag.UNKNOWN_EPOCH, StepFlag.SUM_MISMATCH


@kernel
def sum_slots(
    counts: NDArray[np.uint32],
    reported: NDArray[np.bool_],
    rows: NDArray[np.int64],
    first: NDArray[np.int32],
    others: NDArray[np.int32],
    total: NDArray[np.uint32],
    sums: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Sum the counts over the slots of each expert.

    Most experts have one slot. Gathering these in output order takes two thirds of the time of
    adding slot by slot.

    Args:
        counts: (capacity, R, L * slots_per_rank) [tokens] of a DESTINATION buffer.
        reported: (capacity, R) True for ranks whose counts are of the step in the row.
        rows: (n,) the rows to sum.
        first: of the `EpochMap` of these steps.
        others: of that map.
        total: (n, L, E) [tokens] by expert; meaningless for a step that overflowed.
        sums: (n, L) [tokens] over all experts; empty slots do not count.

    Returns:
        (n,) True if the tokens of an expert exceed 32 bits.

    Mutates: `total` and `sums`, which it writes, and `counts`, in which it clears ranks that did
        not report.
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
        # Unsigned: numba would check whether a signed index counts from the end.
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
    """Return the index of an epoch among the known ones, -1 if it is unknown."""
    for k in range(len(epochs)):
        if epochs[k] == epoch:
            return k
    return -1


@inlined
def _seek(
    rows: NDArray[np.void], order: NDArray[np.int64], num_pending: int, at: int, step: int
) -> int:
    """Return the place of a step in the order, or where it would be, searching from `at` on."""
    while at < num_pending and rows[order[at]].step < step:
        at += 1
    return at


@kernel
def check_steps(
    steps: StepTable,
    wrong: NDArray[np.bool_],
    rank: int,
    highest: int,
    closed_to: int,
    stride: int,
    stride_from: int,
    epochs: NDArray[np.int64],
    active: NDArray[np.bool_],
    rows: NDArray[np.void],
    order: NDArray[np.int64],
    num_pending: int,
    flags: NDArray[np.uint8],
) -> int:
    """Write the flags of refused steps; returns how many of the others no rank has reported yet."""
    new = 0
    at = 0
    for i in range(len(steps)):
        step = steps[i].step
        flags[i] = 0
        if step <= highest:
            flags[i] = _DUPLICATE
            continue
        if step >= stride_from and step % stride != 0:
            flags[i] = _SKIPPED
            continue
        if step <= closed_to:
            flags[i] = _LATE
            continue
        k = _epoch_at(epochs, steps[i].epoch)
        if k < 0:
            flags[i] = _UNKNOWN_EPOCH
            continue
        if not active[k, rank]:
            flags[i] = _SKIPPED
            continue
        if wrong[i]:
            flags[i] = _SUM_MISMATCH
            continue
        at = _seek(rows, order, num_pending, at, step)
        if at == num_pending or rows[order[at]].step != step:
            new += 1
    return new


@inlined
def _begin_step(
    one: Any, rows: NDArray[np.void], order: NDArray[np.int64], num_pending: int, at: int
) -> int:
    """Take the first free row for a step, put it at its place in the order, and return it."""
    free = order[num_pending]
    for k in range(num_pending, at, -1):
        order[k] = order[k - 1]
    order[at] = free
    row = rows[free]
    row.step = one.step
    row.epoch = one.epoch
    row.num_reported = 0
    row.phase = one.phase
    row.real = 0
    row.mixed_epochs = 0
    row.pending = 1
    return int(free)


@kernel
def add_steps(
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
    flags: NDArray[np.uint8],
    place: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Write the accepted steps, in rising order, and their rows to `place`, -1 for refused steps.

    Returns:
        The number of pending steps, the number of steps added, and the union of all flags.
    """
    seen = 0
    added = 0
    at = 0
    for i in range(len(steps)):
        place[i] = -1
        if flags[i]:
            seen |= flags[i]
            continue
        added += 1
        one = steps[i]
        at = _seek(rows, order, num_pending, at, one.step)
        if at == num_pending or rows[order[at]].step != one.step:
            free = _begin_step(one, rows, order, num_pending, at)
            num_pending += 1
            tokens[free] = 0
            compute_s[free] = np.nan
            reported[free] = False
        place[i] = order[at]
        row = rows[place[i]]
        if row.epoch != one.epoch:
            row.mixed_epochs = 1
            flags[i] |= _OTHER_EPOCH
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
            flags[i] |= _COMPLETE
        seen |= flags[i]
    return num_pending, added, seen


@kernel
def write_counts(
    counts: NDArray[np.int32] | NDArray[np.int64],
    place: NDArray[np.int64],
    rank: int,
    buffer: NDArray[np.uint32],
) -> None:
    """Write the (n, W) counts of one rank into the rows of their steps."""
    for i in range(len(place)):
        if place[i] >= 0:
            row = buffer[place[i], rank]
            for k in range(len(row)):
                row[k] = np.uint32(counts[i, k])


@kernel
def release_rows(
    closed: NDArray[np.int64], rows: NDArray[np.void], order: NDArray[np.int64], num_pending: int
) -> int:
    """Free some rows, to be reused first; returns the number of pending steps."""
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
