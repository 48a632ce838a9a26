"""Gives the parts of a deployment a way to reach its control machine, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from evenkeel_moe.driver import Driver
from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.control import DeploymentControl

_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class MachineInbox:
    """Passes events and calls to the control machine of one deployment.

    Args:
        driver: returns the driver, which is built last: it needs parts that use this inbox.
    """

    control: DeploymentControl
    clock: Clock
    driver: Callable[[], Driver]

    def post(self, event: object, processed: Callable[[], None] | None = None) -> None:
        """Give the machine an event; see `Driver.post`."""
        self.driver().post(event, processed)

    async def call(self, ask: Callable[[float], tuple[_T, Sequence[ctl.ControlAction]]]) -> _T:
        """Ask the machine something, and wait until its actions are carried out.

        Raises:
            Unavailable: the actions are not known to be stored; see `Driver.call`.
        """
        return await self.driver().call(ask)

    async def request(self, request: ctl.OperatorRequest) -> None:
        """Make an operator's request, and wait until its actions are carried out.

        Raises:
            EvenkeelError: the machine refuses the request, and nothing has changed.
            Unavailable: the actions are not known to be stored; see `Driver.call`.
        """
        await self.call(lambda now: (None, self.control.handle(request, now)))

    async def request_plan(
        self, request: ctl.PlanSubmitted | ctl.PlanApproved | ctl.PlanCancelled
    ) -> PlanRecord:
        """Make a request about a plan; return its record as the request left it.

        Raises:
            EvenkeelError, Unavailable: as `request`.
        """

        def ask(now: float) -> tuple[PlanRecord, Sequence[ctl.ControlAction]]:
            actions = self.control.handle(request, now)
            return self.control.records.get(request.plan_id), actions

        return await self.call(ask)

    def tell(
        self, event: ctl.RankHeard | ctl.RankTroubled | ctl.RankStopped | ctl.ClockStepped
    ) -> None:
        """Give the machine, at once, an event that leads to no action.

        The driver's queue waits while a batch is being stored. Meanwhile a rank that is heard must
        not count as lost, and the machine must not go by a clock that was set.
        """
        actions = self.control.handle(event, self.clock.monotonic())
        assert not actions
