"""The part of Evenkeel inside a rank: recorder, staging, swap, and the stream to the controller.

The names below are the public interface for engine authors, numbered by `API_VERSION`.
docs/agent.md explains it, docs/join.md leads through it, and the examples use nothing else.
Removing a name or changing its arguments raises the number; a new name or a new optional argument
does not.
"""

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkListener
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.adapters.torch.nvml_clock import NvmlClock
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.canary_runs import Probe, canary_token
from evenkeel_moe.agent.config import AgentConfig, LoraOnExperts
from evenkeel_moe.agent.device_recorder import DeviceRecorder
from evenkeel_moe.agent.engine_moves import EngineMoves, HostEngine, Move
from evenkeel_moe.agent.moves import SlotsWritten, SwapRecord
from evenkeel_moe.agent.ports import (
    ClockReader,
    ExpertWeights,
    GateFailed,
    MapInstaller,
    RankLink,
    WeightTransport,
)
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Lineage, RankIdentity
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
    "DeviceRecorder",
    "EngineMoves",
    "EpRank",
    "ExpertWeights",
    "GateFailed",
    "Generation",
    "GrpcRankLink",
    "HostEngine",
    "KvCache",
    "Lineage",
    "LinkListener",
    "LoraOnExperts",
    "MapInstaller",
    "ModelShape",
    "Move",
    "NvmlClock",
    "Phase",
    "Placement",
    "Probe",
    "RankIdentity",
    "RankLink",
    "SlotsWritten",
    "SwapRecord",
    "WeightTransport",
    "canary_token",
    "make_communicator",
]

API_VERSION = 1
