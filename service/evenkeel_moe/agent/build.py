"""The parts that an agent is built from."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evenkeel_moe.adapters.threads import SYSTEM_THREADS
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.network_thread import NetworkThread
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.ports.threads import Threads
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
