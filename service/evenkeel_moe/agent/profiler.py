"""Measures the seconds of one MoE layer on this device by the tokens it carries, in minutes.

This is the profile of GEM (its step 2). Latency rises in stairs as wide as a tile of the kernel, so
up to a dense limit it is measured once per tile, at the tile's upper end. Beyond the limit a tile
adds little to the whole: samples become sparse, and the curve is interpolated between them.

Rounds over all points alternate in direction, so that a clock frequency that drops during the
measurement distorts no single point. Each point is the median of its rounds, so that outliers do
not count.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import CostCurve, ReplicaCost

_MAX_TILES = 4096


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The part of a MoE layer that one rank computes."""

    d_model: int
    d_ffn: int
    experts: int
    """Slots of this rank in one layer."""
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ffn", "experts"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be at least 1")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise InvalidInput(f"torch has no number type {self.dtype}")


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of a measurement."""

    tile_tokens: int
    tokens: tuple[int, ...]
    """The counts that were measured, rising."""
    seconds: tuple[float, ...]
    """Median over the rounds at each count."""
    rounds: int
    took_s: float


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


def measure(
    run: Callable[[int], None],
    tokens: Sequence[int],
    tile_tokens: int,
    *,
    budget_s: float,
    rounds: int = 50,
    settle: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time a layer at each count.

    Args:
        run: computes the layer on a number of tokens, or starts the computation.
        tokens: counts, rising.
        tile_tokens: tokens of a tile.
        budget_s: no round begins after this many seconds. A warm-up round and one that counts are
            run in any case.
        rounds: the most rounds that count.
        settle: waits for the computation that `run` started.
        clock: returns seconds.
    """
    began = clock()
    _round(run, tokens, settle, clock)
    found: list[list[float]] = []
    while len(found) < rounds and (not found or clock() - began < budget_s):
        order = list(tokens) if len(found) % 2 == 0 else list(reversed(tokens))
        times = _round(run, order, settle, clock)
        found.append(times if len(found) % 2 == 0 else times[::-1])
    medians = np.median(np.array(found), axis=0)
    return Profile(tile_tokens, tuple(tokens), tuple(medians.tolist()), len(found), clock() - began)


def _round(
    run: Callable[[int], None],
    tokens: Sequence[int],
    settle: Callable[[], None],
    clock: Callable[[], float],
) -> list[float]:
    times = []
    for count in tokens:
        settle()
        began = clock()
        run(count)
        settle()
        times.append(clock() - began)
    return times


def curve_of(profile: Profile) -> CostCurve:
    """Return the planner's curve: a value per tile, never falling, linear between samples."""
    tokens = np.array(profile.tokens, np.float64)
    seconds = np.maximum.accumulate(np.array(profile.seconds, np.float64))
    ends = np.arange(1, int(tokens[-1]) // profile.tile_tokens + 1) * float(profile.tile_tokens)
    stairs = np.interp(ends, tokens, seconds)
    return CostCurve(profile.tile_tokens, tuple(stairs.tolist()), _slope(tokens, seconds))


def _slope(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Return the seconds per token at the upper end: the slope of the upper half, at least 0."""
    upper = tokens >= tokens[-1] / 2
    if upper.sum() < 2:
        return float(seconds[-1] / tokens[-1])
    return max(0.0, float(np.polyfit(tokens[upper], seconds[upper], 1)[0]))


def moe_layer(shape: ExpertShape, device: torch.device) -> Callable[[int], None]:
    """Return a MoE layer in plain torch: a gated FFN per expert, tokens spread evenly.

    The weights are random. An engine's fused kernel has other stairs, so only the comparison of
    this device with others carries over.
    """
    dtype: torch.dtype = getattr(torch, shape.dtype)
    generator = torch.Generator(device="cpu").manual_seed(0)

    def weights(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).to(device=device, dtype=dtype)

    up = weights(shape.experts, shape.d_model, 2 * shape.d_ffn)
    down = weights(shape.experts, shape.d_ffn, shape.d_model)
    inputs: dict[int, Tensor] = {}

    def run(tokens: int) -> None:
        rows = inputs.get(tokens)
        if rows is None:
            rows = inputs[tokens] = weights(tokens, shape.d_model)
        with torch.no_grad():
            for expert, part in enumerate(rows.tensor_split(shape.experts)):
                if len(part):
                    gate, value = (part @ up[expert]).chunk(2, dim=-1)
                    torch.nn.functional.silu(gate).mul_(value) @ down[expert]

    return run


def save_curve(
    folder: Path,
    gpu_uuid: str,
    profile: Profile,
    about: dict[str, Any],
    replica_cost: ReplicaCost | None = None,
) -> Path:
    """Write the numbers of one device to a file named after the device, and return its path.

    Args:
        folder: made if it does not exist.
        gpu_uuid: empty for a CPU.
        profile: by tokens.
        about: the layer that was measured.
        replica_cost: by tokens and active replicas; None if that was not measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    curve = curve_of(profile)
    path = _path(folder, gpu_uuid)
    content = {
        "gpu_uuid": gpu_uuid,
        "about": about,
        "curve": asdict(curve),
        "profile": asdict(profile),
    }
    if replica_cost is not None:
        content["replica_cost"] = asdict(replica_cost)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content) + "\n", "utf-8")
    draft.replace(path)
    return path


@dataclass(frozen=True, slots=True)
class SavedProfile:
    """The contents of the file of one device."""

    curve: CostCurve
    replica_cost: ReplicaCost | None
    """None in a file of an earlier version."""
    shape: ExpertShape | None
    """The layer that was measured; None if the file does not tell it."""
    max_tokens: int
    """The most tokens that were measured."""


def load_profile(folder: Path, gpu_uuid: str) -> SavedProfile | None:
    """Read the file of one device; None when the device was never measured.

    Raises:
        InvalidInput: the file holds no curve, a curve with a gap, or that of another device.
    """
    path = _path(folder, gpu_uuid)
    try:
        content = json.loads(path.read_text("utf-8"))
        curve, told = content["curve"], content.get("replica_cost")
        stairs = tuple(float(value) for value in curve["tile_seconds"])
        found = CostCurve(int(curve["tile_tokens"]), stairs, float(curve["slope_s_per_token"]))
        by_replicas = None if told is None else ReplicaCost(**{k: float(told[k]) for k in told})
        most = found.tile_tokens * len(stairs)
        shape = _shape_of(content.get("about"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InvalidInput(f"{path} is no curve: {error!r:.200}") from error
    if content.get("gpu_uuid") != gpu_uuid:
        raise InvalidInput(
            f"{path} holds the curve of {content.get('gpu_uuid')!r}, not of {gpu_uuid!r}"
        )
    fault = _fault_of(found, by_replicas)
    if fault:
        raise InvalidInput(f"{path} is no curve: {fault}")
    return SavedProfile(found, by_replicas, shape, most)


def _shape_of(about: Any) -> ExpertShape | None:
    """Return the layer that a file names; None if it names none."""
    if not isinstance(about, dict) or not {"d_model", "d_ffn", "experts", "dtype"} <= about.keys():
        return None
    return ExpertShape(
        int(about["d_model"]), int(about["d_ffn"]), int(about["experts"]), str(about["dtype"])
    )


def _fault_of(curve: CostCurve, cost: ReplicaCost | None) -> str:
    """Return what makes the numbers unusable; empty if they can be used."""
    for tile, value in enumerate(curve.tile_seconds, 1):
        if not 0 <= value < math.inf:
            return f"there is a gap at tile {tile}, {value} s"
    if not curve.tile_seconds or not 0 <= curve.slope_s_per_token < math.inf:
        return f"{len(curve.tile_seconds)} tiles and a slope of {curve.slope_s_per_token}"
    if any(later < earlier for earlier, later in pairwise(curve.tile_seconds)):
        return "it falls with the number of tokens"
    if cost is None:
        return ""
    for name, value in asdict(cost).items():
        if not 0 <= value < math.inf or (name == "s_per_token" and value == 0):
            return f"{name} is {value}"
    return ""


def _path(folder: Path, gpu_uuid: str) -> Path:
    return folder / f"curve-{gpu_uuid or 'cpu'}.json"
