"""Gives the parts of a deployment a way to reach its control machine, and nothing else."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from evenkeel_moe.driver import Driver
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.control import DeploymentControl

_T = TypeVar("_T")


class MachineInbox:
    """Passes events and calls to the control machine of one deployment.

    Args:
        driver: returns the driver, which is built last: it needs parts that use this inbox.
    """

    def __init__(
        self,
        control: DeploymentControl,
        clock: Clock,
        driver: Callable[[], Driver[ctl.ControlAction]],
    ) -> None:
        self._control = control
        self._clock = clock
        self._driver = driver

    def post(self, event: object, processed: Callable[[], None] | None = None) -> None:
        """Give the machine an event; see `Driver.post`."""
        self._driver().post(event, processed)

    async def call(self, ask: Callable[[float], tuple[_T, Sequence[ctl.ControlAction]]]) -> _T:
        """Ask the machine something, and wait until its actions are carried out.

        Raises:
            Unavailable: the actions are not known to be stored; see `Driver.call`.
        """
        return await self._driver().call(ask)

    def tell(
        self, event: ctl.RankHeard | ctl.RankTroubled | ctl.RankStopped | ctl.ClockStepped
    ) -> None:
        """Give the machine, at once, an event that leads to no action.

        The driver's queue waits while a batch is being stored. Meanwhile a rank that is heard must
        not count as lost, and the machine must not go by a clock that was set.
        """
        actions = self._control.handle(event, self._clock.monotonic())
        assert not actions
