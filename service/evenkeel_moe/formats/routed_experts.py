"""Reads the experts that an engine returned for each token, as RL frameworks keep them for replay.

vLLM and SGLang return them with `--enable-return-routed-experts`; a framework such as veRL pads
them to one array (sequences, positions, layers, top-k). Position t of all sequences together is
read as step t, because the sequences of a rollout run side by side.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import token_counts
from evenkeel_moe.formats.trace import Trace, assumed, drop_idle_steps, moe_rows

KEY = "routed_experts"
MASK = "attention_mask"
EXPERTS = "num_experts"
NAMES = (KEY, MASK, EXPERTS)


def read_routed_experts(
    arrays: Mapping[str, NDArray[Any]], first_moe_layer: int | None, name: str
) -> Trace:
    """Count the tokens of each expert at every position.

    Args:
        arrays: `routed_experts` (B, T, H, K), or (T, H, K) of one sequence, expert ids; optional
            `attention_mask` (B, T), 0 where a position is padding, and `num_experts`.
        first_moe_layer: number of hidden layers before the first MoE layer; None takes every layer
            that ever routed a token.
        name: of the trace.

    Raises:
        InvalidInput, ShapeMismatch: the arrays are malformed or do not fit.
    """
    routes = np.asarray(arrays[KEY])
    if routes.dtype.kind not in "iu":
        raise InvalidInput(f"{KEY} must hold expert ids, holds {routes.dtype}")
    if routes.ndim == 3:
        routes = routes[None]
    if routes.ndim != 4 or 0 in routes.shape:
        raise ShapeMismatch(
            f"{KEY} must be (sequences, positions, layers, top-k), none of them 0,"
            f" got {routes.shape}"
        )
    top_k = routes.shape[3]
    real = _real(routes, arrays.get(MASK))
    experts = _experts(routes, real, arrays.get(EXPERTS))
    if top_k > experts:
        raise InvalidInput(f"{top_k} experts for each token, the ids name only {experts}")
    counts = _count(routes, real, experts)
    rows, layer_ids, shown = moe_rows(counts, first_moe_layer)
    rows, idle = drop_idle_steps(rows)
    steps = assumed("each position of the sequences is taken as a step")
    findings = (*idle, *shown, steps)
    hidden = counts.shape[1]
    return Trace(rows, layer_ids, name, top_k, findings=findings, num_hidden_layers=hidden)


def _real(routes: NDArray[Any], mask: NDArray[Any] | None) -> NDArray[np.bool_]:
    """Return (B, T, H), False where a token was not routed in a layer.

    Padding, the last token of a sequence and dense layers are stored as one id repeated, which no
    router returns for more than one expert.
    """
    if mask is None:
        if routes.shape[3] == 1:
            raise InvalidInput(
                f"with one expert for each token, padding cannot be told apart: add {MASK}"
            )
        return np.asarray((routes != routes[..., :1]).any(axis=3), np.bool_)
    if mask.shape != routes.shape[:2]:
        raise ShapeMismatch(f"{MASK} must be {routes.shape[:2]}, got {mask.shape}")
    real = np.broadcast_to((mask != 0)[:, :, None], routes.shape[:3])
    if routes.shape[3] == 1:
        return np.asarray(real, np.bool_)
    return np.asarray(real & (routes != routes[..., :1]).any(axis=3), np.bool_)


def _experts(routes: NDArray[Any], real: NDArray[np.bool_], told: NDArray[Any] | None) -> int:
    """Return E, after a check of the ids of real tokens."""
    if not real.any():
        raise InvalidInput(f"none of the {real.shape[0]} sequences routed a token")
    least, most = int(routes[real].min()), int(routes[real].max())
    if least < 0:
        raise InvalidInput(f"{KEY} holds the id {least}")
    if told is None:
        return most + 1
    if told.size != 1:
        raise ShapeMismatch(f"{EXPERTS} must be one number, got shape {told.shape}")
    experts = int(token_counts(told, EXPERTS).reshape(-1)[0])
    if most >= experts:
        raise InvalidInput(f"{KEY} holds the id {most}, {EXPERTS} is {experts}")
    return experts


def _count(routes: NDArray[Any], real: NDArray[np.bool_], experts: int) -> NDArray[np.int64]:
    """Return the (T, H, E) tokens of each expert at every position."""
    _, positions, layers, _ = routes.shape
    counts = np.zeros((positions, layers * experts), np.int64)
    offsets = (np.arange(layers, dtype=np.int64) * experts)[None, :, None]
    for position in range(positions):
        ids = routes[:, position].astype(np.int64) + offsets
        chosen = ids[real[:, position]].reshape(-1)
        counts[position] = np.bincount(chosen, minlength=layers * experts)
    return counts.reshape(positions, layers, experts)
