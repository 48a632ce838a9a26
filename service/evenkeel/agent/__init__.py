"""What runs inside an inference rank: recorder, staging, swap, and the stream to the controller.

The names below are the public interface for engine authors, numbered by `API_VERSION`; docs/engines.md explains it and
examples/qwen3moe uses nothing else. A name that goes or takes other arguments raises the number.
"""

from evenkeel.adapters.grpc_link import GrpcRankLink
from evenkeel.adapters.torch_groups import Communicator, make_communicator
from evenkeel.agent.agent import Agent, SwapRecord
from evenkeel.agent.config import AgentConfig
from evenkeel.agent.guest import GuestAgent, HostEngine, Move
from evenkeel.agent.ports import (
    ExpertWeights,
    GateFailed,
    LinkListener,
    MapInstaller,
    RankLink,
    WeightTransport,
)
from evenkeel.model.ids import DeploymentId, EpRank, Generation
from evenkeel.model.load import CountingSide, Phase
from evenkeel.model.placement import Placement
from evenkeel.model.topology import ModelShape
from evenkeel.protocol.messages import RankIdentity

__all__ = [
    "API_VERSION",
    "Agent",
    "AgentConfig",
    "Communicator",
    "CountingSide",
    "DeploymentId",
    "EpRank",
    "ExpertWeights",
    "GateFailed",
    "Generation",
    "GrpcRankLink",
    "GuestAgent",
    "HostEngine",
    "LinkListener",
    "MapInstaller",
    "ModelShape",
    "Move",
    "Phase",
    "Placement",
    "RankIdentity",
    "RankLink",
    "SwapRecord",
    "WeightTransport",
    "make_communicator",
]

API_VERSION = 1
