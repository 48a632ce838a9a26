"""Reacts when this replica and its ranks cannot reach each other."""

from dataclasses import dataclass, field

from evenkeel_moe.controller.leadership.leases import LeaseKeeper
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.tasks import Spawn
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.transitions import ControlState


@dataclass(eq=False, repr=False)
class Connectivity:
    """Gives the lease up when no rank is heard, and keeps the streams of a follower open.

    Args:
        alone: there is no other replica that could reach the ranks.
    """

    control: DeploymentState
    keeper: LeaseKeeper
    ranks: RankSessions
    clock: Clock
    spawn: Spawn
    alone: bool
    _sent_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._heard_at = self.clock.monotonic()

    def check(self) -> None:
        """Give the lease up if no rank was heard for a whole lease; call a few times a second."""
        now, membership = self.clock.monotonic(), self.control.membership
        if not self.keeper.leading or any(
            membership.fresh(rank, now) for rank in membership.members
        ):
            self._heard_at = now
        if not self.alone and now - self._heard_at > self.control.timing.rank_lease_s:
            self._heard_at = now
            self.spawn(self._yield_lease(), f"yield-{self.control.deployment}")

    async def _yield_lease(self) -> None:
        await self.keeper.yield_lease(
            "no rank was heard for a whole lease: another replica may reach them"
        )
        self.ranks.close_all()

    def keep_streams(self) -> None:
        """As a follower, send something now and then: ranks leave a controller that is silent."""
        now = self.clock.monotonic()
        if (
            self.control.state is ControlState.FOLLOWER
            and now - self._sent_at >= self.control.timing.heartbeat_s
        ):
            self._sent_at = now
            self.ranks.repeat_flow()
