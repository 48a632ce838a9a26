"""Chooses the experts of a token, by the scores of a gate or by a table indexed by token id."""

import torch
from torch import Tensor

from evenkeel_moe.errors import InvalidInput, ShapeMismatch


def topk_gate(logits: Tensor, top_k: int, *, renormalise: bool = True) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the largest softmax weight.

    Args:
        logits: (n, E) float.
        top_k: k.
        renormalise: if True, scale the kept weights so that they sum to 1.

    Returns:
        (experts (n, k) int64, best first, weights (n, k) of the same type as the logits).

    Order: among equal logits the lower expert id comes first.

    Raises:
        ShapeMismatch: logits are not (n, E).
        InvalidInput: k outside 1..E.
    """
    if logits.ndim != 2:
        raise ShapeMismatch(f"logits must be (n, E), got {tuple(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise InvalidInput(f"top_k {top_k} is outside 1..{logits.shape[1]}")
    weights = torch.softmax(logits, dim=1)
    # The order of ties in topk depends on the device; a stable sort has a fixed order.
    experts = torch.argsort(weights, dim=1, descending=True, stable=True)[:, :top_k]
    kept = weights.gather(1, experts)
    return experts, kept / kept.sum(dim=1, keepdim=True) if renormalise else kept


def hash_topk(token_ids: Tensor, table: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Look up experts by token id, weights from the gate: the hash layers of DeepSeek V4.

    Args:
        token_ids: (n,) int64.
        table: (V, k) int64 experts of each token id.
        logits: (n, E) float gate scores, used for the weights only.

    Returns:
        (experts (n, k) int64, weights (n, k) summing to 1).

    Raises:
        ShapeMismatch: the sizes do not fit together.
    """
    if token_ids.ndim != 1 or table.ndim != 2 or logits.shape[:1] != token_ids.shape:
        raise ShapeMismatch(
            f"want token_ids (n,), table (V, k), logits (n, E); got {tuple(token_ids.shape)},"
            f" {tuple(table.shape)}, {tuple(logits.shape)}"
        )
    experts = table[token_ids].to(torch.int64)
    # Softmax over the chosen experts only: a much higher logit of another expert would round all of
    # them to 0.
    return experts, torch.softmax(logits.gather(1, experts), dim=1)
