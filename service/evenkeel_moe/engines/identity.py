"""The identity a rank registers with, made the same way by every engine."""

import torch

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.protocol.messages import RankIdentity


def rank_identity(deployment: str, rank: int, generation: str) -> RankIdentity:
    """Return the identity of a rank that starts now."""
    incarnation = int(SystemClock().unix() * 1e9)
    return RankIdentity(DeploymentId(deployment), EpRank(rank), Generation(generation), incarnation)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU as torch gives it; empty for a CPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
