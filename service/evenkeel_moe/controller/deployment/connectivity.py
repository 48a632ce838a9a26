"""Reacts when this replica and its ranks cannot reach each other."""

from evenkeel_moe.controller.leadership.leases import LeaseKeeper
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.tasks import Spawn
from evenkeel_moe.ports import Clock
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.transitions import ControlState

__all__ = ["Connectivity"]


class Connectivity:
    """Gives the lease up when no rank is heard, and keeps the streams of a follower open.

    Args:
        alone: there is no other replica that could reach the ranks.
    """

    def __init__(
        self,
        control: DeploymentControl,
        keeper: LeaseKeeper,
        ranks: RankSessions,
        clock: Clock,
        spawn: Spawn,
        alone: bool,
    ) -> None:
        self._control = control
        self._keeper = keeper
        self._ranks = ranks
        self._clock = clock
        self._spawn = spawn
        self._alone = alone
        self._heard_at = clock.monotonic()
        self._sent_at = 0.0

    def check(self) -> None:
        """Give the lease up if no rank was heard for a whole lease; call a few times a second."""
        now, membership = self._clock.monotonic(), self._control.membership
        if not self._keeper.leading or any(
            membership.fresh(rank, now) for rank in membership.members
        ):
            self._heard_at = now
        if not self._alone and now - self._heard_at > self._control.timing.rank_lease_s:
            self._heard_at = now
            self._spawn(self._yield_lease(), f"yield-{self._control.deployment}")

    async def _yield_lease(self) -> None:
        await self._keeper.yield_lease(
            "no rank was heard for a whole lease: another replica may reach them"
        )
        self._ranks.close_all()

    def keep_streams(self) -> None:
        """As a follower, send something now and then: ranks leave a controller that is silent."""
        now = self._clock.monotonic()
        if (
            self._control.state is ControlState.FOLLOWER
            and now - self._sent_at >= self._control.timing.heartbeat_s
        ):
            self._sent_at = now
            self._ranks.repeat_flow()
