"""Reads the text of a device's profile, as `evenkeel profile` writes it, into what a rank tells."""

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import CostCurve, ReplicaCost


@dataclass(frozen=True, slots=True)
class ProfileText:
    """The contents of the file of one device."""

    curve: CostCurve
    replica_cost: ReplicaCost | None
    """None in a file of an earlier version."""
    gpu_uuid: Any
    """As it stands in the file."""
    about: Any
    """The layer that was measured, as it stands in the file."""


def parse_profile(text: str) -> ProfileText:
    """Return the profile in a text.

    Raises:
        InvalidInput: the text holds no curve, or numbers that cannot be.
    """
    try:
        content = json.loads(text)
        told, cost = content["curve"], content.get("replica_cost")
        stairs = tuple(float(value) for value in told["tile_seconds"])
        curve = CostCurve(int(told["tile_tokens"]), stairs, float(told["slope_s_per_token"]))
        by_replicas = None if cost is None else ReplicaCost(**{k: float(cost[k]) for k in cost})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidInput(f"{error!r:.200}") from error
    if fault := _fault_of(curve, by_replicas):
        raise InvalidInput(fault)
    return ProfileText(curve, by_replicas, content.get("gpu_uuid"), content.get("about"))


def _fault_of(curve: CostCurve, cost: ReplicaCost | None) -> str:
    """Return what makes the numbers unusable; empty if they can be used."""
    for tile, value in enumerate(curve.tile_seconds, 1):
        if not 0 <= value < math.inf:
            return f"there is a gap at tile {tile}, {value} s"
    if (
        not curve.tile_seconds
        or curve.tile_tokens < 1
        or not 0 <= curve.slope_s_per_token < math.inf
    ):
        return (
            f"{len(curve.tile_seconds)} tiles of {curve.tile_tokens} tokens and a slope of"
            f" {curve.slope_s_per_token}"
        )
    if any(later < earlier for earlier, later in pairwise(curve.tile_seconds)):
        return "it falls with the number of tokens"
    if cost is None:
        return ""
    for name, value in asdict(cost).items():
        if not 0 <= value < math.inf or (name == "s_per_token" and value == 0):
            return f"{name} is {value}"
    return ""
