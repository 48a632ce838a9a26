"""The production parts of a run: the machines of both sides, and the agent around a rank's.

A mutant is a kit with one class replaced.
"""

from dataclasses import dataclass, replace

from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.engine_moves import EngineMoves
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier


@dataclass(frozen=True)
class Kit:
    """The classes of a run."""

    participant: type[Participant] = Participant
    gate: type[Gate] = Gate
    control: type[DeploymentControl] = DeploymentControl
    coordinator: type[Coordinator] = Coordinator
    executor: type[PlanExecutor] = PlanExecutor
    recovery: type[Recovery] = Recovery
    membership: type[Membership] = Membership
    planning: type[PlanningLoop] = PlanningLoop
    barrier: type[SaveBarrier] = SaveBarrier
    agent: type[Agent] = Agent
    worker: type[StagingWorker] = StagingWorker
    transport: type[TorchWeightTransport] = TorchWeightTransport
    moves: type[EngineMoves] = EngineMoves

    def wired(self) -> "Kit":
        """Return the kit with the controller's classes connected."""
        parts = {
            "executor_type": type(
                "PlanExecutor", (self.executor,), {"coordinator_type": self.coordinator}
            ),
            "recovery_type": self.recovery,
            "membership_type": self.membership,
            "planning_type": self.planning,
        }
        return replace(self, control=type("Control", (self.control,), parts))
