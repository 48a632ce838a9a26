"""The part of Evenkeel inside a rank: recorder, staging, swap, and the stream to the controller.

The names below are the public interface for engine authors, numbered by `API_VERSION`.
docs/engines.md explains it, and examples/qwen3moe uses nothing else. Removing a name or changing
its arguments raises the number.
"""

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.adapters.torch.nvml_clock import NvmlClock
from evenkeel_moe.agent.agent import Agent, SwapRecord
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.guest import GuestAgent, HostEngine, Move
from evenkeel_moe.agent.ports import (
    ClockReader,
    ExpertWeights,
    GateFailed,
    LinkListener,
    MapInstaller,
    RankLink,
    WeightTransport,
)
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import DeviceClock, KvCache

__all__ = [
    "API_VERSION",
    "Agent",
    "AgentConfig",
    "ClockReader",
    "Communicator",
    "CountingSide",
    "DeploymentId",
    "DeviceClock",
    "EpRank",
    "ExpertWeights",
    "GateFailed",
    "Generation",
    "GrpcRankLink",
    "GuestAgent",
    "HostEngine",
    "KvCache",
    "LinkListener",
    "MapInstaller",
    "ModelShape",
    "Move",
    "NvmlClock",
    "Phase",
    "Placement",
    "RankIdentity",
    "RankLink",
    "SwapRecord",
    "WeightTransport",
    "make_communicator",
]

API_VERSION = 1
