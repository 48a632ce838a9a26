"""The production parts of an agent in a run; a mutant is a kit with one class replaced."""

from dataclasses import dataclass

from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.engine_moves import EngineMoves
from evenkeel_moe.agent.staging import StagingWorker
from tests.sim.kit import Kit


@dataclass(frozen=True)
class AgentKit(Kit):
    """The classes of the machines and of the agent's parts."""

    agent: type[Agent] = Agent
    worker: type[StagingWorker] = StagingWorker
    transport: type[TorchWeightTransport] = TorchWeightTransport
    moves: type[EngineMoves] = EngineMoves
