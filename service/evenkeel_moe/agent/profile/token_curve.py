"""Measures the seconds of one MoE layer on this device by the tokens it carries, in minutes.

This is the profile of GEM (its step 2). Latency rises in stairs as wide as a tile of the kernel, so
up to a dense limit it is measured once per tile, at the tile's upper end. Beyond the limit a tile
adds little to the whole: samples become sparse, and the curve is interpolated between them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.agent.profile.timing import Timing
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import CostCurve

_MAX_TILES = 4096


@dataclass(frozen=True, slots=True)
class TokenProfile:
    """Measured times by tokens."""

    tile_tokens: int
    tokens: tuple[int, ...]
    """The counts that were measured, rising."""
    timing: Timing
    """At each count."""


def token_counts(
    tile_tokens: int, dense_tokens: int, max_tokens: int, sparse_factor: float = 1.2
) -> list[int]:
    """Return the token counts to measure: the ends of tiles, dense at first, then sparse.

    Args:
        tile_tokens: tokens of a tile.
        dense_tokens: up to this count every tile is measured.
        max_tokens: the most tokens a rank carries in a layer.
        sparse_factor: each sparse count is at least this many times the previous one.

    Returns:
        Rising counts; the last is the first end of a tile at or beyond `max_tokens`.
    """
    if not 1 <= tile_tokens <= max_tokens or sparse_factor <= 1.0:
        raise InvalidInput(
            f"tile {tile_tokens}, at most {max_tokens} tokens, factor {sparse_factor:g}: needs"
            " 1 <= tile <= most and a factor above 1"
        )
    tiles = -(-max_tokens // tile_tokens)
    if tiles > _MAX_TILES:
        raise InvalidInput(
            f"{max_tokens} tokens are {tiles} tiles of {tile_tokens}, at most {_MAX_TILES}"
        )
    dense = min(tiles, max(1, dense_tokens // tile_tokens))
    chosen = list(range(1, dense + 1))
    while chosen[-1] < tiles:
        chosen.append(min(tiles, max(chosen[-1] + 1, int(chosen[-1] * sparse_factor))))
    return [tile * tile_tokens for tile in chosen]


def curve_of(profile: TokenProfile) -> CostCurve:
    """Return the planner's curve: a value per tile, never falling, linear between samples."""
    tokens = np.array(profile.tokens, np.float64)
    seconds = np.maximum.accumulate(np.array(profile.timing.seconds, np.float64))
    ends = np.arange(1, int(tokens[-1]) // profile.tile_tokens + 1) * float(profile.tile_tokens)
    stairs = np.interp(ends, tokens, seconds)
    return CostCurve(profile.tile_tokens, tuple(stairs.tolist()), _slope(tokens, seconds))


def _slope(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Return the seconds per token at the upper end: the slope of the upper half, at least 0."""
    upper = tokens >= tokens[-1] / 2
    if upper.sum() < 2:
        return float(seconds[-1] / tokens[-1])
    return max(0.0, float(np.polyfit(tokens[upper], seconds[upper], 1)[0]))
