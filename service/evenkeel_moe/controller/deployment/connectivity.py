"""Whether this replica and its ranks reach each other, and what follows where they do not."""

from typing import TYPE_CHECKING

from evenkeel_moe.wire.link import NotLeader

if TYPE_CHECKING:
    from evenkeel_moe.controller.deployment.deployment import Deployment

__all__ = ["Reach"]


class Reach:
    """One deployment's: a leader no rank can reach gives its lease up; a follower keeps the streams it has."""

    def __init__(self, deployment: "Deployment") -> None:
        self._deployment = deployment
        self._heard_at = deployment.outside.clock.monotonic()
        self._told_at = 0.0

    def check(self) -> None:
        """Look whether ranks are heard; called a few times a second."""
        if self._unheard():
            deployment = self._deployment
            self._heard_at = deployment.outside.clock.monotonic()
            deployment.outside.spawn(self._yield_lease(), f"yield-{deployment.deployment}")

    def keep_streams(self) -> None:
        """While it does not lead, say something: ranks leave a controller that is silent."""
        deployment, now = self._deployment, self._deployment.outside.clock.monotonic()
        if now - self._told_at < deployment.options.timing.heartbeat_s:
            return
        self._told_at = now
        for session in deployment.sessions.values():
            if session.registered:
                session.stream.send(deployment.flow)

    def _unheard(self) -> bool:
        """Whether this replica leads ranks that cannot reach it, and another might."""
        deployment = self._deployment
        now, lease_s = deployment.outside.clock.monotonic(), deployment.options.timing.rank_lease_s
        membership = deployment.control.membership
        if not deployment.keeper.leading or any(
            membership.fresh(rank, now) for rank in membership.members
        ):
            self._heard_at = now
        return not deployment.options.alone and now - self._heard_at > lease_s

    async def _yield_lease(self) -> None:
        deployment = self._deployment
        await deployment.keeper.yield_lease(
            "no rank was heard for a whole lease: another replica may reach them"
        )
        for session in list(deployment.sessions.values()):
            session.stream.close(NotLeader("", "", deployment.options.renew_s))
