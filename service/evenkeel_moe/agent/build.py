"""Builds the parts of an agent from its configuration."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evenkeel_moe.adapters.threads import SYSTEM_THREADS
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent.checksums import checksums_digest
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.network_thread import NetworkThread
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.ports.threads import Threads
from evenkeel_moe.protocol.messages import MIGRATE, Hello
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier

Connect = Callable[[str, torch.device], Communicator]
"""(name, device) -> a communicator over all ranks of the EP group; collective, each name once."""


@dataclass(frozen=True, slots=True)
class AgentParts:
    """The threads and classes that an agent is built from; a simulation passes others."""

    threads: Threads = SYSTEM_THREADS
    participant: type[Participant] = Participant
    gate: type[Gate] = Gate
    barrier: type[SaveBarrier] = SaveBarrier
    worker: type[StagingWorker] = StagingWorker
    transport: type[TorchWeightTransport] = TorchWeightTransport
    network: type[NetworkThread] = NetworkThread


SYSTEM_PARTS = AgentParts()


def own_name(name: str, config: AgentConfig) -> str:
    """Return a communicator's name that two agents of one rank do not share."""
    return f"{name}/{config.identity.deployment}"


def make_participant(
    parts: AgentParts,
    config: AgentConfig,
    placement: Placement,
    epoch: int,
    checksums: tuple[int, ...],
) -> Participant:
    """Return the protocol machine of one deployment."""
    return parts.participant(
        config.identity,
        config.shape,
        placement,
        epoch=Epoch(epoch),
        weights_version=config.weights_version,
        checksums=checksums,
        staging_bytes=config.staging_bytes,
        drop_after_s=config.drop_after_s,
        observe_only=config.observe_only,
    )


def make_hello(
    config: AgentConfig,
    participant: Participant,
    told: tuple[Epoch, str],
    gate_digest: str,
    free_bytes: int,
    moves: bool,
) -> Hello:
    """Return everything the controller must know of this rank, as of now.

    Args:
        told: epoch and placement digest that the controller may know, see `SaveBarrier`.
        moves: the rank takes waves, or will once its fault has ended. Heartbeats tell the fault.
    """
    return Hello(
        identity=participant.identity,
        shape=config.shape,
        node=config.node,
        gpu_uuid=config.gpu_uuid,
        epoch=told[0],
        placement_digest=told[1],
        weights_version=participant.weights_version,
        checksums_digest=checksums_digest(participant.checksums),
        free_bytes=free_bytes,
        staging_bytes=config.staging_bytes,
        gate_digest=gate_digest,
        capabilities=frozenset({MIGRATE}) if moves else frozenset(),
        highest_term=participant.leader.term if participant.leader is not None else 0,
        device=config.device_name,
        weight_format=config.weight_format,
        dispatch=config.dispatch,
        slots_stay_filled=config.slots_stay_filled,
        lineage=config.lineage,
    )
