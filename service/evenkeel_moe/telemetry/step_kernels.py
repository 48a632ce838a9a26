"""The numba kernels of the step buffer: enter the steps of a report, sum the counts of steps."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.model.load import PHASE_CODE, Phase, StepTable

NO_STEP = -1
_MIXED = PHASE_CODE[Phase.MIXED]

ROW = np.dtype(
    [
        ("step", "i8"),
        ("epoch", "i8"),
        ("num_reported", "i8"),
        ("phase", "u4"),
        ("real", "?"),
        ("mixed_epochs", "?"),
    ],
    align=True,
)
"""One step, `NO_STEP` in a free row: the epoch of its first report, the number of ranks that
reported it, whether a rank ran it as no dummy step (real), and whether ranks reported different
epochs."""


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
    """Not sampled."""
    REFUSED = DUPLICATE | LATE | UNKNOWN_EPOCH | SUM_MISMATCH | SKIPPED


_COMPLETE, _OTHER_EPOCH = StepFlag.COMPLETE, StepFlag.OTHER_EPOCH
_DUPLICATE, _LATE, _SKIPPED = StepFlag.DUPLICATE, StepFlag.LATE, StepFlag.SKIPPED
_UNKNOWN_EPOCH, _SUM_MISMATCH = StepFlag.UNKNOWN_EPOCH, StepFlag.SUM_MISMATCH


class Board(NamedTuple):
    """The incomplete steps of a buffer: a row for each, and what ranks reported of them."""

    rows: NDArray[np.void]
    """(capacity,) of `ROW`."""
    tokens: NDArray[np.int64]
    """(capacity, R) 0 for ranks that ran the step as a dummy. Until a rank reports, its values are
    those of an earlier step; so are its seconds and counts."""
    compute_s: NDArray[np.float64]
    """(capacity, R) NaN if not measured."""
    highest: NDArray[np.int64]
    """(R,) highest step that each rank has reported."""


@kernel
def sum_slots(
    counts: NDArray[np.uint32],
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
        rows: (n,) the rows to sum, of complete steps.
        first: of the `EpochMap` of these steps.
        others: of that map.
        total: (n, L, E) [tokens] by expert; meaningless for a step that overflowed.
        sums: (n, L) [tokens] over all experts; empty slots do not count.

    Returns:
        (n,) True if the tokens of an expert exceed 32 bits.

    Mutates: `total` and `sums`.
    """
    overflowed = np.zeros(len(rows), np.bool_)
    num_layers, num_experts = first.shape
    first_of = first.reshape(-1)
    for i in range(len(rows)):
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


@kernel
def sum_counts(counts: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (T, L) tokens of each step over its experts, and (L, E) of each expert over steps.

    In one pass: numpy takes three times as long for either sum, because it converts the counts.
    """
    num_steps, num_layers, num_experts = counts.shape
    by_step = np.zeros((num_steps, num_layers), np.int64)
    by_expert = np.zeros((num_layers, num_experts), np.int64)
    for step in range(num_steps):
        for layer in range(num_layers):
            row, of_experts, total = counts[step, layer], by_expert[layer], np.int64(0)
            for expert in range(num_experts):
                tokens = np.int64(row[expert])
                of_experts[expert] += tokens
                total += tokens
            by_step[step, layer] = total
    return by_step, by_expert


@inlined
def _is_among(epochs: NDArray[np.int64], epoch: int) -> bool:
    """Return True if an epoch is among the known ones."""
    for known in epochs:
        if known == epoch:
            return True
    return False


@inlined
def _find(rows: NDArray[np.void], step: int, begin: int) -> int:
    """Return the first row of a step, searching from a row on and then from the start; else -1."""
    for k in range(len(rows)):
        row = begin + k
        if row >= len(rows):
            row -= len(rows)
        if rows[row].step == step:
            return row
    return -1


@inlined
def _check_steps(
    steps: StepTable,
    wrong: NDArray[np.bool_],
    rank: int,
    closed_to: int,
    stride: int,
    stride_from: int,
    epochs: NDArray[np.int64],
    board: Board,
    flags: NDArray[np.uint8],
    place: NDArray[np.int64],
) -> int:
    """Write the flags of refused steps and the rows of steps that are known.

    Returns:
        The number of rows that are lacking for the others.
    """
    new = 0
    at = 0
    for i in range(len(steps)):
        step = steps[i].step
        flags[i] = 0
        place[i] = -1
        if step <= board.highest[rank]:
            flags[i] = _DUPLICATE
        elif step >= stride_from and step % stride != 0:
            flags[i] = _SKIPPED
        elif not _is_among(epochs, steps[i].epoch):
            flags[i] = _UNKNOWN_EPOCH
        elif wrong[i]:
            flags[i] = _SUM_MISMATCH
        elif step <= closed_to:
            flags[i] = _LATE
        else:
            # Steps in a row are mostly in successive rows.
            place[i] = _find(board.rows, step, at)
            if place[i] < 0:
                new += 1
            else:
                at = place[i]
    return new - (board.rows["step"] == NO_STEP).sum() if new else 0


@inlined
def _enter_step(
    one: Any, rank: int, epochs: NDArray[np.int64], board: Board, at: int
) -> tuple[int, int]:
    """Enter a step of a rank in its row, a free one if `at` is -1; return the row and the flags."""
    flags = 0
    begins = at < 0
    if begins:
        at = _find(board.rows, NO_STEP, 0)
    row = board.rows[at]
    if begins:
        row.step = one.step
        row.epoch = one.epoch
        row.num_reported = 0
        row.phase = one.phase
        row.real = False
        row.mixed_epochs = False
    if row.epoch != one.epoch:
        row.mixed_epochs = True
        flags |= _OTHER_EPOCH
    if row.phase != one.phase:
        row.phase = _MIXED
    if one.dummy == 0:
        row.real = True
    board.tokens[at, rank] = one.tokens if one.dummy == 0 else 0
    board.compute_s[at, rank] = one.compute_s
    row.num_reported += 1
    if row.num_reported == len(board.highest) and _is_among(epochs, row.epoch):
        flags |= _COMPLETE
    return at, flags


@kernel
def enter_steps(
    steps: StepTable,
    wrong: NDArray[np.bool_],
    rank: int,
    closed_to: int,
    stride: int,
    stride_from: int,
    epochs: NDArray[np.int64],
    board: Board,
    flags: NDArray[np.uint8],
    place: NDArray[np.int64],
) -> tuple[int, int, int, int]:
    """Enter the steps of a report that are acceptable; if there is no room for all, enter none.

    Args:
        steps: (n,) rising.
        wrong: (n,) True for steps that do not add up.
        rank: that reported them.
        closed_to: steps up to this one are late.
        stride, stride_from, epochs: see `StepRules`.
        board: where they are entered.
        flags: (n,) receives the bits of `StepFlag`.
        place: (n,) receives the rows, -1 for refused steps.

    Returns:
        The number of steps entered, the union of all flags, the number of rows that are lacking,
        and the step that all ranks have passed.

    Mutates: `board`, `flags` and `place`.
    """
    lacking = _check_steps(
        steps, wrong, rank, closed_to, stride, stride_from, epochs, board, flags, place
    )
    if lacking > 0:
        return 0, 0, lacking, NO_STEP
    entered = 0
    seen = 0
    for i in range(len(steps)):
        if flags[i] == 0:
            entered += 1
            place[i], flags[i] = _enter_step(steps[i], rank, epochs, board, place[i])
        seen |= flags[i]
    if len(steps):
        board.highest[rank] = max(board.highest[rank], steps[len(steps) - 1].step)
    return entered, seen, 0, board.highest.min()
