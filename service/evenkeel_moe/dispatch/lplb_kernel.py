"""LPLB in one kernel: the program of `lplb` for every layer, each in one block of a GPU.

One program instance solves one layer and keeps all that it computes with on the chip; it reads the
counts and writes probabilities. So a call is one launch, and can be captured in a CUDA graph.

Variables of a layer: the load x of an expert on a rank, a slack s for each rank and the peak M.
With y the duals and z the reduced costs, a primal-dual interior point with Mehrotra's corrector
starts from the even split, which is feasible. Each step solves two systems with one matrix::

    [ D_r  X ]                D_r = sum of X over experts + w_s, of each rank
    [ X^T D_e ] + w_M u u^T   D_e = sum of X over ranks, of each expert; u is 1 for ranks

where the weights w = v / z span twenty decades near the end. With the signs of the experts' duals
turned it is a graph's Laplacian plus w_s. The larger side is eliminated. What is left is again a
Laplacian, which is factorised without a subtraction (`_eliminate`), so float64 keeps its digits
however far the weights are apart. The term in w_M is added by the formula of Sherman and Morrison.

It needs Triton, which torch for GPUs brings with it; TRITON_INTERPRET=1 runs the kernel on a CPU.

Source: mathematics of deepseek-ai/LPLB and SGLang's dispatch blog; subtraction-free elimination of
    Grassmann, Taksar and Heyman.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.dispatch.counts import check_counts, check_type
from evenkeel_moe.dispatch.interior import TokenSplit, most_shared, shared_copies
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.placement import Placement

_CHUNK = 64
"""Experts whose counts are read at a time."""
_LEAST_SIDE = 16
"""Least side of a product of matrices in Triton."""
_MOST_CELLS = 128 * 64
"""Ranks times shared experts, both rounded up, for which the variables stay on the chip."""
_MOST_ITERATIONS = 40
_GAP = tl.constexpr(1e-7)
"""Duality gap, as a share of the peak, at which the search ends. Far below it weights amplify
rounding errors of the duals."""
_NEAR = tl.constexpr(1e-3)
_STEP_BACK = tl.constexpr(0.995)


class KernelSplit:
    """The solver of one placement in one kernel launch a call.

    It is not safe for concurrent use: results are reused from call to call.
    """

    def __init__(self, placement: Placement, device: torch.device | str = "cuda") -> None:
        """Prepare a placement, once per epoch.

        Args:
            placement: (L, S) slots; every expert placed.
            device: a GPU; the CPU under Triton's interpreter.

        Raises:
            InfeasiblePlan: an expert has no replica.
            InvalidInput: the placement is too large for one block of a GPU (`kernel_fits`).
        """
        placement.check_placed()
        self._sides = _sides(placement)
        if not kernel_fits(placement):
            raise InvalidInput(
                f"{placement.num_ranks} ranks and {most_shared(placement)} shared experts of a"
                " layer are too many for one block of a GPU"
            )

        def on_device(array: NDArray[np.generic]) -> Tensor:
            return torch.tensor(np.ascontiguousarray(array), dtype=torch.int32, device=device)

        _, _, self._ranks, self._experts = placement.sizes
        expert, rank = shared_copies(placement)
        _, self._rows, self._width = rank.shape
        self._expert, self._rank = on_device(expert), on_device(rank)
        self._only_rank = on_device(placement.only_rank)
        self._split = TokenSplit.even(placement, device)

    def solve(self, counts: Tensor) -> TokenSplit:
        """Split one batch of every layer.

        Args:
            counts: (L, E) [tokens] on the device of the solver; any integer type, float32 or
                float64.

        Returns:
            Probabilities (each row sums to 1 up to rounding) and the peak they give, which is never
            below the optimum. The next call overwrites them.

        Raises:
            ShapeMismatch: counts of another placement.
            InvalidInput: half precision; on the CPU also counts that `check_counts` refuses.
        """
        split = self._split
        layers = len(split.peak)
        check = check_counts if counts.device.type == "cpu" else check_type
        check(counts, (layers, self._experts), "counts")
        ranks, rows = self._sides
        kernel: Any = _split_layer
        kernel[(layers,)](
            counts.contiguous(),
            self._expert,
            self._rank,
            self._only_rank,
            split.probabilities,
            split.peak,
            self._experts,
            self._rows,
            self._ranks,
            WIDTH=self._width,
            RANKS=ranks,
            ROWS=rows,
            CHUNK=_CHUNK,
            KEEP_RANKS=ranks <= rows,
            MOST=_MOST_ITERATIONS,
            num_warps=4 if ranks * rows <= 1024 else 8,
        )
        return split


def kernel_fits(placement: Placement) -> bool:
    """Return whether the program of every layer fits on the chip: 72 ranks with 64 replicas do."""
    ranks, rows = _sides(placement)
    return ranks * rows <= _MOST_CELLS


def _sides(placement: Placement) -> tuple[int, int]:
    """Return the ranks and the most shared experts of a layer, as sides of a matrix in Triton."""
    wanted = (placement.num_ranks, most_shared(placement))
    ranks, rows = (max(_LEAST_SIDE, 1 << (side - 1).bit_length()) for side in wanted)
    return ranks, rows


@triton.jit  # type: ignore[untyped-decorator]
def _split_layer(  # type: ignore[no-untyped-def]
    counts,  # (L, E) tokens
    expert_of_row,  # (L, rows) int32 shared experts, -1 beyond
    rank_of_copy,  # (L, rows, X) int32, -1 beyond
    only_rank,  # (L, E) int32, -1 for shared experts
    probabilities,  # (L, E, X) float64; those of experts on one rank are never written
    peak,  # (L,) float64
    experts,
    rows,
    ranks,
    WIDTH: tl.constexpr,  # X
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP_RANKS: tl.constexpr,
    MOST: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    row = tl.arange(0, ROWS)
    is_rank = rank < ranks

    # The right-hand side: loads that cannot move, and those of the shared experts, in mean ranks.
    each = tl.zeros([CHUNK], tl.float64)
    fixed = tl.zeros([RANKS], tl.float64)
    for first in range(0, experts, CHUNK):
        e = first + tl.arange(0, CHUNK)
        load = tl.load(counts + layer * experts + e, mask=e < experts, other=0).to(tl.float64)
        home = tl.load(only_rank + layer * experts + e, mask=e < experts, other=-1)
        each += load
        fixed += tl.sum(tl.where(home[None, :] == rank[:, None], load[None, :], 0.0), axis=1)
    total = tl.sum(each)
    unit = tl.where(total > 0, total / ranks, 1.0)
    fixed = fixed / unit
    expert = tl.load(expert_of_row + layer * rows + row, mask=row < rows, other=-1)
    wanted = tl.load(counts + layer * experts + expert, mask=expert >= 0, other=0)
    wanted = wanted.to(tl.float64) / unit

    # x is kept by rank, so copies on one rank are one variable, and get equal parts of it.
    copies = tl.zeros([RANKS, ROWS], tl.float64)
    copies_of = rank_of_copy + (layer * rows + row) * WIDTH
    for copy in range(WIDTH):
        at = tl.load(copies_of + copy, mask=row < rows, other=-1)
        copies += tl.where(at[None, :] == rank[:, None], 1.0, 0.0)
    x = _interior_point(
        fixed, wanted, (copies > 0) & (wanted > 0)[None, :], is_rank, ranks, rows, KEEP_RANKS, MOST
    )

    of_expert = tl.sum(x, axis=0)
    share = x / tl.where(of_expert > 0, of_expert, 1.0)[None, :]
    used = fixed + tl.sum(share * wanted[None, :], axis=1)
    tl.store(peak + layer, tl.max(tl.where(is_rank, used, 0.0)) * unit)
    each_copy = share / tl.maximum(copies, 1.0)
    even = 1.0 / tl.maximum(tl.sum(copies, axis=0), 1.0)
    for copy in range(WIDTH):
        at = tl.load(copies_of + copy, mask=row < rows, other=-1)
        found = tl.sum(tl.where(at[None, :] == rank[:, None], each_copy, 0.0), axis=0)
        found = tl.where(wanted > 0, found, even)
        target = probabilities + (layer * experts + expert) * WIDTH + copy
        tl.store(target, found, mask=(expert >= 0) & (at >= 0))


@triton.jit  # type: ignore[untyped-decorator]
def _interior_point(  # type: ignore[no-untyped-def]
    fixed, wanted, live, is_rank, ranks, rows, KEEP_RANKS: tl.constexpr, MOST: tl.constexpr
):
    """Return x (RANKS, ROWS): the loads that minimise the peak.

    fixed (RANKS,), wanted (ROWS,), live (RANKS, ROWS) where x may be above 0.
    """
    number = tl.sum(tl.where(live, 1.0, 0.0), axis=0)
    x = tl.where(live, (wanted / tl.maximum(number, 1.0))[None, :], 0.0).to(tl.float64)
    load = fixed + tl.sum(x, axis=1)
    top = tl.max(tl.where(is_rank, load, 0.0)) + 1.0
    s = tl.where(is_rank, top - load, 1.0)
    # Duals of -1/2R leave every reduced cost positive.
    start = 0.5 / ranks
    y_rank = tl.where(is_rank, -start, 0.0).to(tl.float64)
    y_row = tl.where(number > 0, -start, 0.0).to(tl.float64)
    zx = tl.where(live, 2.0 * start, 1.0).to(tl.float64)
    zs = tl.where(is_rank, start, 1.0).to(tl.float64)
    z_top = 1.0 + tl.sum(y_rank)
    gap = _gap(x, zx, tl.where(is_rank, s, 0.0), zs, top, z_top)
    done = 0
    # With tokens the peak is at least 1, the mean rank.
    while (done < MOST) & (gap > tl.maximum(top, 1.0) * _GAP):
        new_x, s, top, zx, zs, z_top, y_rank, y_row = _step(
            x, s, top, zx, zs, z_top, y_rank, y_row,
            fixed, wanted, number, gap, live, is_rank, ranks, rows, KEEP_RANKS,
        )  # fmt: skip
        new_gap = _gap(new_x, zx, tl.where(is_rank, s, 0.0), zs, top, z_top)
        # Near the end, a step that rounding has spoilt ends the search at the point before. At the
        # start the gap may rise, because both step lengths differ.
        better = (new_gap < gap) | (gap > top * _NEAR)
        x = tl.where(better, new_x, x)
        gap = tl.where(better, new_gap, 0.0)
        done += 1
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    x, s, top, zx, zs, z_top, y_rank, y_row,
    fixed, wanted, number, gap, live, is_rank, ranks, rows, KEEP_RANKS: tl.constexpr,
):  # fmt: skip
    """Return the point after one step of predictor and corrector."""
    wx = tl.where(live, x / zx, 0.0)
    ws = tl.where(is_rank, s / zs, 1.0)
    w_top = top / z_top
    lower, pivots, d_far = _factor(wx, ws, live, ranks, rows, KEEP_RANKS)
    # What rounding has left of the residuals is taken along.
    p_rank = tl.where(is_rank, top - fixed - tl.sum(x, axis=1) - s, 0.0)
    p_row = tl.where(number > 0, wanted - tl.sum(x, axis=0), 0.0)
    rx = tl.where(live, -(y_rank[:, None] + y_row[None, :]) - zx, 0.0)
    rs = tl.where(is_rank, -y_rank - zs, 0.0)
    r_top = 1.0 + tl.sum(y_rank) - z_top
    t_rank, t_row = _solve(
        wx, lower, pivots, d_far, tl.where(is_rank, 1.0, 0.0), tl.zeros_like(wanted), KEEP_RANKS
    )
    whole = 1.0 + w_top * tl.sum(tl.where(is_rank, t_rank, 0.0))

    # The predictor aims at the optimum; its reach says how far the corrector should centre.
    ax = tl.where(live, x * zx, 0.0)
    as_ = tl.where(is_rank, s * zs, 0.0)
    a_top = top * z_top
    dx, ds, d_top, dzx, dzs, dz_top, dy_rank, dy_row = _direction(
        ax, as_, a_top, zx, zs, z_top, wx, ws, w_top, rx, rs, r_top, p_rank, p_row,
        lower, pivots, d_far, t_rank, t_row, whole, live, is_rank, KEEP_RANKS,
    )  # fmt: skip
    reach = _reach(x, dx, s, ds, top, d_top, live, is_rank)
    reach_z = _reach(zx, dzx, zs, dzs, z_top, dz_top, live, is_rank)
    left = _gap(
        x + reach * dx, zx + reach_z * dzx,
        tl.where(is_rank, s + reach * ds, 0.0), zs + reach_z * dzs,
        top + reach * d_top, z_top + reach_z * dz_top,
    )  # fmt: skip
    ratio = tl.minimum(tl.maximum(left / gap, 0.0), 1.0)
    centre = ratio * ratio * ratio * gap / (tl.sum(number) + ranks + 1.0)
    dx, ds, d_top, dzx, dzs, dz_top, dy_rank, dy_row = _direction(
        tl.where(live, ax + dx * dzx - centre, 0.0),
        tl.where(is_rank, as_ + ds * dzs - centre, 0.0),
        a_top + d_top * dz_top - centre,
        zx, zs, z_top, wx, ws, w_top, rx, rs, r_top, p_rank, p_row,
        lower, pivots, d_far, t_rank, t_row, whole, live, is_rank, KEEP_RANKS,
    )  # fmt: skip
    reach = _reach(x, dx, s, ds, top, d_top, live, is_rank)
    reach_z = _reach(zx, dzx, zs, dzs, z_top, dz_top, live, is_rank)
    return (
        x + reach * dx, s + reach * ds, top + reach * d_top,
        zx + reach_z * dzx, zs + reach_z * dzs, z_top + reach_z * dz_top,
        y_rank + reach_z * dy_rank, y_row + reach_z * dy_row,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gap(x, zx, s, zs, top, z_top):  # type: ignore[no-untyped-def]
    """Return the sum of the products of variables and reduced costs."""
    return tl.sum(x * zx) + tl.sum(s * zs) + top * z_top


@triton.jit  # type: ignore[untyped-decorator]
def _reach(v, dv, s, ds, top, d_top, live, is_rank):  # type: ignore[no-untyped-def]
    """Return the largest step, at most 1, that keeps everything positive."""
    fastest = tl.max(tl.where(live, -dv / tl.where(live, v, 1.0), 0.0))
    fastest = tl.maximum(fastest, tl.max(tl.where(is_rank, -ds / s, 0.0)))
    fastest = tl.maximum(fastest, -d_top / top)
    return 1.0 / tl.maximum(fastest / _STEP_BACK, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _direction(  # type: ignore[no-untyped-def]
    ax, as_, a_top, zx, zs, z_top, wx, ws, w_top, rx, rs, r_top, p_rank, p_row,
    lower, pivots, d_far, t_rank, t_row, whole, live, is_rank, KEEP_RANKS: tl.constexpr,
):  # fmt: skip
    """Return the Newton step that subtracts a from every product of a variable and its cost.

    w are the weights, r the dual residuals and p the primal ones.
    """
    qx = tl.where(live, wx * rx + ax / zx, 0.0)
    qs = tl.where(is_rank, ws * rs + as_ / zs, 0.0)
    q_top = w_top * r_top + a_top / z_top
    b_rank = tl.where(is_rank, p_rank + tl.sum(qx, axis=1) + qs, 0.0)
    b_row = p_row + tl.sum(qx, axis=0)
    y_rank, y_row = _solve(wx, lower, pivots, d_far, b_rank, b_row, KEEP_RANKS)
    # The part of the peak, -q_top u, is solved with the term in w_M: alone it is many times larger.
    back = (q_top + w_top * tl.sum(tl.where(is_rank, y_rank, 0.0))) / whole
    y_rank = tl.where(is_rank, y_rank - back * t_rank, 0.0)
    y_row = y_row - back * t_row
    dzx = tl.where(live, rx - y_rank[:, None] - y_row[None, :], 0.0)
    dzs = tl.where(is_rank, rs - y_rank, 0.0)
    dz_top = r_top + tl.sum(y_rank)
    dx = tl.where(live, -ax / zx - wx * dzx, 0.0)
    ds = tl.where(is_rank, -as_ / zs - ws * dzs, 0.0)
    d_top = -a_top / z_top - w_top * dz_top
    return dx, ds, d_top, dzx, dzs, dz_top, y_rank, y_row


@triton.jit  # type: ignore[untyped-decorator]
def _factor(wx, ws, live, ranks, rows, KEEP_RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factors of the side that is kept, and the diagonal of the side eliminated."""
    d_rank = tl.sum(wx, axis=1) + ws
    d_row = tl.sum(wx, axis=0)
    d_row = tl.where(d_row > 0, d_row, 1.0)
    if KEEP_RANKS:
        joined = tl.dot(wx / d_row[None, :], tl.trans(wx))
        excess, d_far, kept = ws, d_row, ranks
    else:
        by_rank = wx / d_rank[:, None]
        joined = tl.dot(tl.trans(by_rank), wx)
        used = tl.sum(tl.where(live, 1.0, 0.0), axis=0) > 0
        excess = tl.where(used, tl.sum(by_rank * ws[:, None], axis=0), 1.0)
        d_far, kept = d_rank, rows
    lower, pivots = _eliminate(joined, excess, kept)
    return lower, pivots, d_far


@triton.jit  # type: ignore[untyped-decorator]
def _eliminate(joined, excess, kept):  # type: ignore[no-untyped-def]
    """Return T (n, n) and d (n,) such that T^T diag(1 / d) T is the inverse of a Laplacian.

    The matrix is diag(excess + row sums of `joined`) - joined. `joined` (n, n) is symmetric, not
    negative, and 0 from `kept` on; its diagonal does not count. `excess` (n,) is above 0. Nothing
    is subtracted, because of what is left to eliminate the excess is kept and not the diagonal. T
    is lower triangular with entries in [0, 1], and grows in the columns already eliminated.
    """
    index = tl.arange(0, joined.shape[0])
    pivots = excess
    for k in range(kept):
        here = index == k
        of_k = tl.sum(tl.where(here[:, None], joined, 0.0), axis=0)
        own = tl.sum(tl.where(here, excess, 0.0))
        later = tl.where(index > k, of_k, 0.0)
        pivot = own + tl.sum(later)
        pivots = tl.where(here, pivot, pivots)
        share = later / pivot
        of_k = tl.where(here, 1.0, of_k)
        joined = tl.where(here[None, :] & (index > k)[:, None], 0.0, joined)
        joined += share[:, None] * of_k[None, :]
        excess += share * own
    below = index[:, None] > index[None, :]
    lower = tl.where(below, joined, tl.where(index[:, None] == index[None, :], 1.0, 0.0))
    return lower, pivots


@triton.jit  # type: ignore[untyped-decorator]
def _solve(wx, lower, pivots, d_far, b_rank, b_row, KEEP_RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return y of the ranks and of the rows, without the term in w_M."""
    # The duals of rows with turned signs make the matrix a Laplacian.
    if KEEP_RANKS:
        near = b_rank - tl.sum(wx * (b_row / d_far)[None, :], axis=1)
        y_rank = _near_side(lower, pivots, near)
        y_row = (b_row - tl.sum(wx * y_rank[:, None], axis=0)) / d_far
    else:
        near = b_row - tl.sum(wx * (b_rank / d_far)[:, None], axis=0)
        y_row = _near_side(lower, pivots, near)
        y_rank = (b_rank - tl.sum(wx * y_row[None, :], axis=1)) / d_far
    return y_rank, y_row


@triton.jit  # type: ignore[untyped-decorator]
def _near_side(lower, pivots, b):  # type: ignore[no-untyped-def]
    """Return T^T diag(1 / d) T b."""
    down = tl.sum(lower * b[None, :], axis=1) / pivots
    return tl.sum(lower * down[:, None], axis=0)
