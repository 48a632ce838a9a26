"""Waterfill: runs the shared expert of a token on a rank that has room, not always on its own.

Every rank holds the shared expert, in a slot reserved after its routed slots, and the top-k of a
token gets one more column that names the rank to use. Shared work fills up the routed load of the
ranks like water: with L_r the load score of rank r and N shared slots to place, the waterline is H
= ceil((sum of L + N) / R), and a rank below it has slack max(H - L_r, 0). A token draws one of its
candidate ranks in proportion to slack, with some preference for its own. If no candidate has slack
it stays, unless another candidate has a clearly smaller load. Candidates are the source of the
token and the ranks it visits anyway, so there is no new transfer; with `all_ranks` every rank is a
candidate, for better balance and more traffic.

Waterfill works on slots after replica choice, so the top-k may come from a gate or a table.

Source: SGLang's dispatch blog, "Waterfill Dispatch Strategy"; sgl-project/sglang pull request
    19290.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from evenkeel_moe.dispatch.choice import check_experts, place_hash
from evenkeel_moe.dispatch.counts import check_counts, count_choices
from evenkeel_moe.errors import InvalidInput, ShapeMismatch


def waterline(score: Tensor, num_shared: int | Tensor, shared_cost: int = 1) -> Tensor:
    """Return H = ceil((sum of L + N) / R), the level of all ranks if shared work could go anywhere.

    Args:
        score: (R,) int64 [tokens] load score of each rank.
        num_shared: N, shared slots to place; a tensor is not read back to the host.
        shared_cost: routed choices one shared slot costs (2 for a shared expert twice as wide).

    Returns:
        () int64 [tokens].
    """
    ranks = score.shape[0]
    total = score.to(torch.int64).sum() + num_shared * shared_cost
    return torch.div(total + ranks - 1, ranks, rounding_mode="floor")


def count_by_rank(slots: Tensor, num_ranks: int, slots_per_rank: int) -> Tensor:
    """Count routed choices by rank: (n, k) slots, -1 for padding -> (R,) int64 [tokens]."""
    ranks = torch.where(slots >= 0, torch.div(slots, slots_per_rank, rounding_mode="floor"), -1)
    return count_choices(ranks, num_ranks)


def count_tokens(slots: Tensor) -> Tensor:
    """Return N of the tokens of one rank: () int64, the rows of (n, k) slots but padding."""
    return (slots >= 0).any(dim=1).sum()


def expand_topk(
    slots: Tensor,
    weights: Tensor,
    shared_rank: Tensor,
    slots_per_rank: int,
    *,
    shared_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add the shared column and renumber slots to include the reserved ones.

    In the extended layout rank r owns slots r * (P + 1) .. r * (P + 1) + P with P = slots_per_rank;
    the last one holds the shared expert. Slot rank * P + local becomes rank * (P + 1) + local.

    Args:
        slots: (n, k) int64, -1 for padding.
        weights: (n, k) combination weights.
        shared_rank: (n,) int64 rank that runs the shared expert of the token, -1 for a padding row.
        slots_per_rank: P.
        shared_weight: combination weight of the shared expert; the inverse of the routed scaling
            factor if the engine applies that factor to the whole sum.

    Returns:
        (slots (n, k + 1) int64, weights (n, k + 1)); padded entries have slot -1 and weight 0.

    Raises:
        ShapeMismatch: the arguments do not describe the same tokens.
    """
    if slots.shape != weights.shape or shared_rank.shape != slots.shape[:1]:
        raise ShapeMismatch(
            f"slots {tuple(slots.shape)}, weights {tuple(weights.shape)} and shared ranks"
            f" {tuple(shared_rank.shape)} do not describe the same tokens"
        )
    valid = slots >= 0
    rank = torch.div(slots, slots_per_rank, rounding_mode="floor")
    routed = torch.where(valid, slots + rank, -1)
    runs = shared_rank >= 0
    extra = torch.where(runs, shared_rank * (slots_per_rank + 1) + slots_per_rank, -1)
    share = torch.where(runs, shared_weight, 0.0).to(weights.dtype)
    return (
        torch.cat([routed, extra.unsqueeze(1)], dim=1),
        torch.cat([torch.where(valid, weights, 0), share.unsqueeze(1)], dim=1),
    )


@dataclass(frozen=True, slots=True)
class Waterfill:
    """Chooses the ranks that run the shared expert for the tokens of one rank."""

    num_ranks: int
    slots_per_rank: int
    ep_rank: int
    """Source rank of the tokens."""
    all_ranks: bool = False
    """True if every rank is a candidate, not only those a token visits."""
    local_preference: float = 0.25
    """The source counts as if it had this share more slack; 0 gives no preference."""
    lighter_by: float = 0.05
    """If no candidate has slack, a token leaves its source only for a rank whose load is lower by
    this share of the waterline."""
    shared_cost: int = 1
    """Routed choices one shared slot costs."""

    def __post_init__(self) -> None:
        if not 0 <= self.ep_rank < self.num_ranks:
            raise InvalidInput(f"rank {self.ep_rank} is outside 0..{self.num_ranks - 1}")
        if self.slots_per_rank < 1 or self.shared_cost < 1:
            raise InvalidInput("slots_per_rank and shared_cost must be at least 1")
        if self.local_preference < 0 or self.lighter_by < 0:
            raise InvalidInput("local_preference and lighter_by must not be negative")

    def static_score(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate the score without communication, from the choices of this rank only.

        Returns:
            ((R,) int64 [tokens] that this rank sends to each rank, N: `count_tokens` of this rank).
        """
        return count_by_rank(slots, self.num_ranks, self.slots_per_rank), count_tokens(slots)

    def dynamic_score(self, landed: Tensor) -> Tensor:
        """Compute the score after one collective: the global routed load.

        Args:
            landed: (R, R) int64 [tokens] - row s is `count_by_rank` of source s, all-gathered.

        Returns:
            (R,) int64 [tokens].

        Raises:
            ShapeMismatch, InvalidInput: the counts are not of R ranks.
        """
        check_counts(landed, (self.num_ranks, self.num_ranks), "landed counts")
        return landed.to(torch.int64).sum(dim=0)

    def choose(
        self, slots: Tensor, score: Tensor, num_shared: int | Tensor, *, salt: int = 0
    ) -> Tensor:
        """Choose the rank that runs the shared expert of each token of this rank.

        Every token gets exactly one rank, so none is lost or computed twice.

        Args:
            slots: (n, k) int64 slots of the routed choices, -1 for padding; a row of -1 is padding.
            score: (R,) [tokens] load score of each rank.
            num_shared: N, the shared slots that are placed together: `count_tokens` of this rank
                with a static score, its sum over all ranks with a dynamic one.
            salt: differs by layer or step, so that draws differ.

        Returns:
            (n,) int64 rank, -1 if the whole row is padding.

        Raises:
            ShapeMismatch, InvalidInput: slots or score of another deployment.
        """
        check_experts(slots)
        check_counts(score, (self.num_ranks,), "score")
        valid = slots >= 0
        visited = torch.where(
            valid, torch.div(slots, self.slots_per_rank, rounding_mode="floor"), self.ep_rank
        )
        rows = slots.shape[0]
        candidate = torch.zeros((rows, self.num_ranks), dtype=torch.bool, device=slots.device)
        candidate.scatter_(1, visited.to(torch.int64), True)
        # Filled, not assigned: an assignment copies from the host, which no CUDA graph may do.
        candidate[:, self.ep_rank].fill_(True)
        if self.all_ranks:
            candidate.fill_(True)

        level = waterline(score, num_shared, self.shared_cost)
        pull = (level - score.to(torch.int64)).clamp(min=0).to(torch.float64)
        pull[self.ep_rank].mul_(1.0 + self.local_preference)
        bounds = torch.where(candidate, pull, 0.0).cumsum(dim=1)
        total = bounds[:, -1]
        at = (
            place_hash(slots[:, :1], self.ep_rank * 8191 + salt).squeeze(1).to(torch.float64) + 0.5
        ) / 2.0**31
        drawn = (bounds <= (at * total).unsqueeze(1)).sum(dim=1)

        load = score.to(torch.float64)
        lightest = torch.where(candidate, load, torch.inf).argmin(dim=1)
        leaves = load[lightest] < load[self.ep_rank] - self.lighter_by * level
        stuck = torch.where(leaves, lightest, self.ep_rank)
        chosen = torch.where(total > 0, drawn.clamp(max=self.num_ranks - 1), stuck)
        return torch.where(valid.any(dim=1), chosen, -1)
