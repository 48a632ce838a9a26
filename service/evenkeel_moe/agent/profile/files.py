"""Files of profiles: one for each device, named after it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenkeel_moe.agent.profile.expert_layer import ExpertShape
from evenkeel_moe.agent.profile.replica_cost import ReplicaProfile, compared_curve
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import CostCurve, ReplicaCost
from evenkeel_moe.wire.profile_text import parse_profile


def save_curve(
    folder: Path,
    gpu_uuid: str,
    profile: TokenProfile,
    about: dict[str, Any],
    replica_cost: ReplicaCost | None = None,
    by_replicas: ReplicaProfile | None = None,
) -> Path:
    """Write the numbers of one device to a file named after the device, and return its path.

    Args:
        folder: made if it does not exist.
        gpu_uuid: empty for a CPU.
        profile: by tokens.
        about: the layer that was measured.
        replica_cost: by tokens and active replicas; None if that was not measured.
        by_replicas: what `replica_cost` was fitted to; with it the file says whether the curve or
            the line explains the profile better.
    """
    folder.mkdir(parents=True, exist_ok=True)
    curve = curve_of(profile)
    if replica_cost is not None and by_replicas is not None:
        curve = compared_curve(profile, replica_cost, by_replicas)
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
        saved = parse_profile(path.read_text("utf-8"))
        shape = _shape_of(saved.about)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInput) as error:
        raise InvalidInput(f"{path} is no curve: {error}") from error
    if saved.gpu_uuid != gpu_uuid:
        raise InvalidInput(f"{path} holds the curve of {saved.gpu_uuid!r}, not of {gpu_uuid!r}")
    curve = saved.curve
    most = curve.tile_tokens * len(curve.tile_seconds)
    return SavedProfile(curve, saved.replica_cost, shape, most)


def _shape_of(about: Any) -> ExpertShape | None:
    """Return the layer that a file names; None if it names none."""
    if not isinstance(about, dict) or not {"d_model", "d_ffn", "experts", "dtype"} <= about.keys():
        return None
    sizes = {name: about[name] for name in ("d_model", "d_ffn", "experts")}
    if any(type(size) is not int for size in sizes.values()):
        raise InvalidInput(f"about has {sizes}, not whole numbers")
    return ExpertShape(**sizes, dtype=str(about["dtype"]))


def _path(folder: Path, gpu_uuid: str) -> Path:
    return folder / f"curve-{gpu_uuid or 'cpu'}.json"
