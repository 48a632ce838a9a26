"""LPLB for GPUs: the program of `lplb` for many layers at once, by a primal-dual interior point.

Variables per layer: the load x of every copy of a shared expert, a slack s per rank, the peak M and
one artificial variable a. Constraints, one row per rank and one per shared expert::

    sum of x on the rank + s - M + a * column = -fixed load
    sum of x of the expert     + a * column =  its load

The artificial (Big-M) column is the residual of the all-ones point, which makes this point feasible
for any batch; its cost drives it to zero. The matrix is built once per placement; a batch writes
the right-hand side and that column. The number of iterations is fixed, nothing is read back to the
host, and all layers share one batched Cholesky factorisation, so a call can be captured in a CUDA
graph. Precision is float64, which the last digits of the peak need.

Source: mathematics of deepseek-ai/LPLB and SGLang's dispatch blog; Mehrotra's predictor and
    corrector.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.dispatch.counts import check_counts
from evenkeel_moe.model.placement import Placement

_ITERATIONS = 16
"""Predictor-corrector steps of every call; 12 reached 1e-8 for all shapes tested."""
_STEP_BACK = 0.995
_CONVERGED = 1e-13
"""Mean complementarity below which a layer is not changed any more, because further steps would
only add rounding errors."""


@dataclass(frozen=True, eq=False, slots=True)
class TokenSplit:
    """The split of one batch in every layer."""

    probabilities: Tensor
    """(L, E, X) float64, aligned with log2phy: share of the tokens of an expert for each replica;
    rows sum to 1."""
    peak: Tensor
    """(L,) float64 [tokens]: load of the fullest rank with these shares, the optimum of the
    program."""

    @classmethod
    def even(cls, placement: Placement, device: torch.device | str = "cpu") -> "TokenSplit":
        """Return an even split of no tokens, in arrays of its own."""
        shares = (placement.log2phy >= 0) / placement.logcnt[:, :, None]
        peak = torch.zeros(len(shares), dtype=torch.float64, device=device)
        return cls(torch.tensor(shares, device=device), peak)


def most_shared(placement: Placement) -> int:
    """Return the most experts on several ranks in one layer, at least 1."""
    return max(1, int((placement.only_rank < 0).sum(axis=1).max()))


def shared_copies(placement: Placement) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the experts on several ranks, called shared, and the rank of each of their copies.

    Returns:
        (L, rows) experts, -1 in the last rows of a layer with fewer of them than another, and (L,
        rows, X) ranks, -1 where there is no copy.
    """
    shared = placement.only_rank < 0
    expert = np.argsort(~shared, axis=1, kind="stable")[:, : most_shared(placement)]
    expert = np.where(np.take_along_axis(shared, expert, axis=1), expert, -1)
    slots = np.take_along_axis(placement.log2phy, np.maximum(expert, 0)[:, :, None], axis=1)
    held = (slots >= 0) & (expert >= 0)[:, :, None]
    return expert, np.where(held, slots // placement.slots_per_rank, -1)


class BatchedSplit:
    """The interior-point solver of one placement on one device.

    Only shared experts are in the program: one row each, and a column for each replica. The others
    add a fixed load to their rank.
    """

    def __init__(self, placement: Placement, device: torch.device | str = "cpu") -> None:
        """Prepare a placement, once per epoch.

        Args:
            placement: (L, S) slots; every expert placed.
            device: to solve on.

        Raises:
            InfeasiblePlan: an expert has no replica.
        """
        placement.check_placed()

        def on_device(array: NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(array, dtype=dtype, device=device)

        layers, _, self._ranks, _ = placement.sizes
        shared = placement.only_rank < 0
        expert, rank = shared_copies(placement)
        row_of = np.maximum(shared.cumsum(axis=1) - 1, 0)
        on_rank = rank[..., None] == np.arange(self._ranks)
        self._even = TokenSplit.even(placement, device).probabilities
        self._incidence = on_device(on_rank.reshape(layers, -1, self._ranks), torch.float64)
        self._present = on_device(rank >= 0, torch.float64)
        self._row_present = on_device(expert >= 0, torch.float64)
        self._expert = on_device(np.maximum(expert, 0))
        self._row_of = on_device(np.broadcast_to(row_of[:, :, None], self._even.shape))
        self._is_shared = on_device(shared, torch.bool)
        self._fixed_rank = on_device(np.maximum(placement.only_rank, 0))

    def solve(self, counts: Tensor) -> TokenSplit:
        """Split one batch of every layer.

        Args:
            counts: (L, E) [tokens] on the device of the solver; any integer type, float32 or
                float64.

        Returns:
            Probabilities (each row sums to 1 up to rounding) and the peak they give, which is never
            below the optimum.

        Raises:
            ShapeMismatch: counts of another placement.
            InvalidInput: half precision; on the CPU also counts that `check_counts` refuses.
        """
        load = check_counts(counts, tuple(self._is_shared.shape), "counts")
        unit = load.sum(dim=1, keepdim=True) / self._ranks
        scale = torch.where(unit > 0, unit, 1.0)
        load = load / scale
        fixed = torch.zeros(len(load), self._ranks, dtype=torch.float64, device=load.device)
        fixed.scatter_add_(1, self._fixed_rank, torch.where(self._is_shared, 0.0, load))
        wanted = load.gather(1, self._expert) * self._row_present
        # With an expert without tokens the program has no interior point, so its copies are left
        # out.
        live = self._present * (wanted > 0).unsqueeze(2)
        share = _interior_point(fixed, wanted, live, self._incidence)
        total = share.sum(dim=2, keepdim=True)
        share = torch.where(total > 0, share / total.clamp(min=1e-300), 0.0)
        flow = (share * wanted.unsqueeze(2)).flatten(1)
        used = fixed + torch.bmm(flow.unsqueeze(1), self._incidence).squeeze(1)
        is_split = (self._is_shared & (load > 0)).unsqueeze(2)
        probabilities = torch.where(is_split, share.gather(1, self._row_of), self._even)
        return TokenSplit(probabilities, used.amax(dim=1) * scale.squeeze(1))


def _interior_point(fixed: Tensor, wanted: Tensor, live: Tensor, incidence: Tensor) -> Tensor:
    """Return the (L, rows, X) loads of the copies.

    Args:
        fixed: (L, R) fixed load of the ranks.
        wanted: (L, rows) load of the shared experts.
        live: (L, rows, X) 1 for copies in the program.
        incidence: (L, rows * X, R) 1 if the copy is on the rank.
    """
    program = _Program.of(fixed, wanted, live, incidence)
    mask = program.mask
    v = mask.clone()
    y, z = program.dual_start()
    unknowns = mask.sum(dim=1, keepdim=True)
    for _ in range(_ITERATIONS):
        gap = (v * z).sum(dim=1, keepdim=True) / unknowns
        primal = program.rhs - program.product(v)
        dual = (program.cost - program.transposed(y) - z) * mask
        divisor = torch.where(mask > 0, z, 1.0)
        weight = v / divisor * mask
        factor = program.factorised(weight)

        def direction(
            aim: Tensor,
            primal: Tensor = primal,
            dual: Tensor = dual,
            divisor: Tensor = divisor,
            weight: Tensor = weight,
            factor: Tensor = factor,
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Return the Newton step (dv, dz, dy) that subtracts `aim` from every product v * z."""
            side = primal + program.product(weight * dual + aim / divisor)
            # Not `cholesky_solve`: on a GPU it allocates memory, which a graph cannot capture.
            half = torch.linalg.solve_triangular(factor, side.unsqueeze(2), upper=False)
            dy = torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(2)
            dz = (dual - program.transposed(dy)) * mask
            return (-aim / divisor - weight * dz) * mask, dz, dy

        # The predictor aims directly at the optimum. Its step length determines the centring of the
        # corrector.
        dv, dz, _ = direction(v * z * mask)
        ahead = (v + _reach(v, dv, mask) * dv) * (z + _reach(z, dz, mask) * dz)
        left_over = ahead.sum(dim=1, keepdim=True) / unknowns
        centre = (left_over / gap.clamp(min=1e-300)).clamp(max=1.0) ** 3
        dv, dz, dy = direction((v * z + dv * dz - centre * gap) * mask)
        step_v, step_z = _STEP_BACK * _reach(v, dv, mask), _STEP_BACK * _reach(z, dz, mask)
        moving = (gap > _CONVERGED) & torch.isfinite(dv).all(dim=1, keepdim=True)
        v = torch.where(moving, v + step_v * dv, v)
        z = torch.where(moving, z + step_z * dz, z)
        y = torch.where(moving, y + step_z * dy, y)
    return program.copies(v).reshape(live.shape)


@dataclass(frozen=True, eq=False, slots=True)
class _Program:
    """The programs of one batch in standard form.

    Unknowns are stacked as [x | s | M | a], rows as [ranks | experts].
    """

    rhs: Tensor
    """(L, R + rows)."""
    cost: Tensor
    """(L, unknowns)."""
    column: Tensor
    """(L, R + rows) column of the artificial variable: the residual of the all-ones point."""
    inside: Tensor
    """(L, rows * X, R) 1 if a live copy is on a rank."""
    live: Tensor
    """(L, rows, X)."""
    mask: Tensor
    """(L, unknowns) 0 for copies outside the program, whose load stays 0."""
    filler: Tensor
    """(L, R + rows) 1 for rows without unknowns, to keep the normal matrix regular."""

    @classmethod
    def of(cls, fixed: Tensor, wanted: Tensor, live: Tensor, incidence: Tensor) -> "_Program":
        """Build the programs of a batch."""
        layers, ranks = fixed.shape
        of_copies = live.flatten(1)
        rhs = torch.cat([-fixed, wanted], dim=1)
        mask = torch.cat([of_copies, live.new_ones(layers, ranks + 2)], dim=1)
        alive = live.amax(dim=2)
        zero = torch.zeros_like(rhs)
        inside = incidence * of_copies.unsqueeze(2)
        bare = cls(rhs, mask, zero, inside, live, mask, zero)
        column = (rhs - bare.product(mask)) * torch.cat([torch.ones_like(fixed), alive], dim=1)
        cost = torch.zeros_like(mask)
        cost[:, -2] = 1.0
        # Duals of ranks sum to 1 and those of experts are at most 1, so this cost exceeds any gain.
        cost[:, -1] = 1.0 + 2.0 * (
            column[:, :ranks].abs().amax(dim=1) + column[:, ranks:].clamp(min=0).sum(dim=1)
        )
        filler = torch.cat([torch.zeros_like(fixed), 1.0 - alive], dim=1)
        return cls(rhs, cost, column, inside, live, mask, filler)

    @property
    def ranks(self) -> int:
        """R."""
        return self.inside.shape[2]

    def copies(self, v: Tensor) -> Tensor:
        """Return the (L, rows * X) loads among the unknowns v."""
        return v[:, : self.inside.shape[1]] * self.live.flatten(1)

    def dual_start(self) -> tuple[Tensor, Tensor]:
        """Return a strictly feasible dual point (y, z).

        With all duals at -1 / 2R every reduced cost is positive.
        """
        y = torch.full_like(self.rhs, -0.5 / self.ranks)
        return y, (self.cost - self.transposed(y)) * self.mask

    def product(self, v: Tensor) -> Tensor:
        """Return A v: (L, R + rows)."""
        x = self.copies(v)
        on_rank = torch.bmm(x.unsqueeze(1), self.inside).squeeze(1)
        on_rank = on_rank + v[:, x.shape[1] : -2] - v[:, -2:-1]
        of_expert = x.reshape(self.live.shape).sum(dim=2)
        return torch.cat([on_rank, of_expert], dim=1) + self.column * v[:, -1:]

    def transposed(self, y: Tensor) -> Tensor:
        """Return A^T y: (L, unknowns)."""
        on_rank, of_expert = y[:, : self.ranks], y[:, self.ranks :]
        x = torch.bmm(self.inside, on_rank.unsqueeze(2)).squeeze(2)
        x = x + (of_expert.unsqueeze(2) * self.live).flatten(1)
        peak = -on_rank.sum(dim=1, keepdim=True)
        return torch.cat([x, on_rank, peak, (self.column * y).sum(dim=1, keepdim=True)], dim=1)

    def factorised(self, weight: Tensor) -> Tensor:
        """Return the Cholesky factor of A diag(weight) A^T: (L, R + rows, R + rows)."""
        layers, rows, _ = self.live.shape
        ranks = self.ranks
        of_x = weight[:, : self.inside.shape[1]]
        crossing = (self.inside * of_x.unsqueeze(2)).reshape(layers, rows, -1, ranks).sum(dim=2)
        on_rank = crossing.sum(dim=1) + weight[:, of_x.shape[1] : -2]
        of_expert = of_x.reshape(self.live.shape).sum(dim=2)
        normal = torch.diag_embed(torch.cat([on_rank, of_expert], dim=1) + self.filler)
        normal[:, :ranks, ranks:] += crossing.transpose(1, 2)
        normal[:, ranks:, :ranks] += crossing
        normal[:, :ranks, :ranks] += weight[:, -2].reshape(-1, 1, 1)
        outer = self.column.unsqueeze(2) * self.column.unsqueeze(1)
        normal = normal + weight[:, -1].reshape(-1, 1, 1) * outer
        # Near the end weights span 20 decades; a unit diagonal plus a small number keeps the factor
        # finite.
        size = normal.diagonal(dim1=1, dim2=2).rsqrt()
        scaled = normal * size.unsqueeze(2) * size.unsqueeze(1)
        scaled.diagonal(dim1=1, dim2=2).add_(1e-14)
        # Unlike `cholesky`, this does not synchronise to check for success; a failure gives NaN.
        factor: Tensor = torch.linalg.cholesky_ex(scaled).L
        return factor / size.unsqueeze(2)


def _reach(value: Tensor, step: Tensor, mask: Tensor) -> Tensor:
    """Return the (L, 1) largest step length, at most 1, that keeps every unknown non-negative."""
    ratio = torch.where((step < 0) & (mask > 0), value / -step.clamp(max=-1e-300), torch.inf)
    return ratio.amin(dim=1, keepdim=True).clamp(max=1.0)
