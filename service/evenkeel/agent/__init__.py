"""What runs inside an inference rank: recorder, staging, swap, and the stream to the controller."""

from evenkeel.agent.agent import Agent, SwapRecord
from evenkeel.agent.config import AgentConfig
from evenkeel.agent.ports import (
    ExpertWeights,
    GateFailed,
    LinkListener,
    MapInstaller,
    RankLink,
    WeightTransport,
)

__all__ = [
    "Agent",
    "AgentConfig",
    "ExpertWeights",
    "GateFailed",
    "LinkListener",
    "MapInstaller",
    "RankLink",
    "SwapRecord",
    "WeightTransport",
]
