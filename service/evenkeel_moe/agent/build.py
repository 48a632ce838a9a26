"""Puts an agent's parts together from its configuration."""

import os
from collections.abc import Callable

import numpy as np
import torch

from evenkeel_moe.adapters.torch.groups import TRANSFER, Communicator
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.ports import ExpertWeights
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.rank.participant import Participant

__all__ = ["Connect", "free_bytes", "make_participant", "make_transport"]

Connect = Callable[[str, torch.device], Communicator]
"""(name, device) -> a communicator over all ranks of the EP group; collective, each name once."""


def make_participant(
    config: AgentConfig, placement: Placement, epoch: int, checksums: tuple[int, ...] | None
) -> Participant:
    """The machine of one deployment; without checksums it observes only."""
    return Participant(
        config.identity,
        config.shape,
        placement,
        epoch=Epoch(epoch),
        weights_version=config.weights_version,
        checksums=checksums or (),
        staging_bytes=config.staging_bytes,
        drop_after_s=config.drop_after_s,
        observe_only=checksums is None,
    )


def make_transport(
    config: AgentConfig,
    placement: Placement,
    weights: ExpertWeights,
    connect: Connect,
    device: torch.device,
) -> TorchWeightTransport:
    """Staging memory and a transport that is not connected yet."""
    rank, per_rank = config.identity.rank, placement.slots_per_rank
    held = np.argwhere(placement.phy2log[:, rank * per_rank : (rank + 1) * per_rank] >= 0)
    layer, local = held[0].tolist() if len(held) else (0, 0)
    sample = weights.tensors(layer, local)
    return TorchWeightTransport(
        rank=rank,
        slots_per_rank=per_rank,
        staging_bytes=config.staging_bytes,
        tensors_of=weights.tensors,
        tensors_per_expert=len(sample),
        min_expert_bytes=sum(t.numel() * t.element_size() for t in sample),
        connect=lambda serial: connect(f"{TRANSFER}{serial}", device),
        device=device,
    )


def free_bytes(device: torch.device) -> int:
    """Memory left where the weights lie."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
