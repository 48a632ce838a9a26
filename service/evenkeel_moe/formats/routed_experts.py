"""Reads the experts that an engine returned for each token, as RL frameworks keep them for replay.

vLLM and SGLang return them with `--enable-return-routed-experts`; a framework such as veRL pads
them to one array (sequences, positions, layers, top-k). Position t of all sequences together is
read as step t, because the sequences of a rollout run side by side.

Not every row of such an array is load. Frameworks fill the end of short sequences with rows that
look like routes, captures lose tokens, and the prompt of several samples was computed once although
its routes come with each of them. `token_routes` recognises these.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.array_files import one_number
from evenkeel_moe.formats.reading import check_counts, check_dimensions, token_counts
from evenkeel_moe.formats.token_routes import (
    TokenRoutes,
    count_prompts_once,
    find_missing_routes,
    leave_out_padding,
)
from evenkeel_moe.formats.trace import Trace, assumed, drop_idle_steps, moe_rows
from evenkeel_moe.model.finding import Finding

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
    ids = np.asarray(arrays[KEY])
    if ids.dtype.kind not in "iu":
        raise InvalidInput(f"{KEY} must hold expert ids, holds {ids.dtype}")
    if ids.ndim == 3:
        ids = ids[None]
    check_dimensions(ids, KEY, "sequences, positions, layers, top-k")
    top_k, mask = ids.shape[3], arrays.get(MASK)
    if mask is None and top_k == 1:
        raise InvalidInput(
            f"with one expert for each token, padding cannot be told apart: add {MASK}"
        )
    if mask is not None:
        if mask.shape != ids.shape[:2]:
            raise ShapeMismatch(f"{MASK} must be {ids.shape[:2]}, got {mask.shape}")
        # A mask that is added to scores has 0 where a token is real, and below 0 or -inf elsewhere.
        mask = token_counts(mask.astype(np.uint8) if mask.dtype == np.bool_ else mask, MASK) != 0
    routes = TokenRoutes.of(ids, mask)
    findings = (
        *leave_out_padding(routes),
        *find_missing_routes(routes),
        *count_prompts_once(routes),
    )
    experts, taken = _experts(ids, routes.routed, arrays)
    check_counts(ids.shape[1], ids.shape[2], experts)
    if top_k > experts:
        raise InvalidInput(f"{top_k} experts for each token, the ids name only {experts}")
    counts = _count(ids, routes.routed, experts)
    rows, layer_ids, shown = moe_rows(counts, first_moe_layer)
    rows, idle = drop_idle_steps(rows)
    steps = assumed("each position of the sequences is taken as a step")
    findings += (*idle, *shown, steps, *taken)
    hidden = counts.shape[1]
    return Trace(rows, layer_ids, name, top_k, findings=findings, num_hidden_layers=hidden)


def _experts(
    ids: NDArray[Any], routed: NDArray[np.bool_], arrays: Mapping[str, NDArray[Any]]
) -> tuple[int, tuple[Finding, ...]]:
    """Return E, and a note if it is guessed, after a check of the ids of the tokens that count."""
    if not routed.any():
        raise InvalidInput(f"none of the {routed.shape[0]} sequences routed a token")
    most = int(ids[routed].max())
    experts = one_number(arrays, EXPERTS)
    if experts is not None and most >= experts:
        raise InvalidInput(f"{KEY} holds the id {most}, {EXPERTS} is {experts}")
    if experts is not None:
        return experts, ()
    what = "the largest id is taken to be the last expert, because no num_experts says how many"
    return most + 1, (assumed(what, amount=f"{most + 1} experts"),)


def _count(ids: NDArray[Any], routed: NDArray[np.bool_], experts: int) -> NDArray[np.int64]:
    """Return the (T, H, E) tokens of each expert at every position."""
    _, positions, layers, _ = ids.shape
    counts = np.zeros((positions, layers * experts), np.int64)
    offsets = (np.arange(layers, dtype=np.int64) * experts)[None, :, None]
    for position in range(positions):
        numbered = ids[:, position].astype(np.int64) + offsets
        chosen = numbered[routed[:, position]].reshape(-1)
        counts[position] = np.bincount(chosen, minlength=layers * experts)
    return counts.reshape(positions, layers, experts)
