"""One deployment as operators see it. None always means unknown, never zero."""

import math

import numpy as np

from evenkeel_moe.adapters.prometheus.metric_families import PhaseBalance
from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.ports import DeploymentStatus, RankStatus

__all__ = ["LiveView"]


class LiveView:
    """`ports.DeploymentView` of a deployment on this replica."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def placement(self) -> Placement | None:
        """The committed placement; None before the ranks told it."""
        return self._deployment.control.placement

    def topology(self) -> Topology:
        """Which node each rank is on."""
        return self._deployment.planning.topology()

    def window(self, phase: Phase) -> LoadWindow | None:
        """The window in memory."""
        ring = self._deployment.ingest.rings.get(phase)
        return ring.window() if ring is not None else None

    def balance(self) -> PhaseBalance:
        """Balancedness (mean, worst layer) of each phase's window."""
        self._refresh()
        return {phase: self._deployment.balance.summary(phase) for phase in Phase}

    def _refresh(self) -> None:
        placement = self._deployment.control.placement
        if placement is None:
            return
        layers, experts = placement.num_layers, placement.num_logical_experts
        windows = {
            phase: parts
            for phase, parts in self._deployment.ingest.parts().items()
            if parts[-1].counts.shape[1:] == (layers, experts)
        }
        self._deployment.balance.update(windows, placement)

    def status(self) -> DeploymentStatus:
        """Now.

        Raises:
            Unavailable: no rank ever said what it is made of.
        """
        deployment, control = self._deployment, self._deployment.control
        if deployment.shape is None:
            raise Unavailable(f"no rank of {deployment.deployment} has connected yet")
        self._refresh()
        now = deployment.outside.clock.monotonic()
        mean, worst = deployment.balance.summary()
        staged = control.executor.staged.values() if control.executor is not None else ()
        winner, decisions = deployment.keeper.winner, deployment.hands.decisions
        frozen_until = control.frozen_until
        return DeploymentStatus(
            deployment=deployment.deployment,
            state=control.state,
            reason=control.state_reason(now)[0],
            mode=control.policy.mode,
            policy=control.policy.policy,
            leader=winner.holder if winner is not None and deployment.keeper.leading else "",
            term=control.leader.term if control.leader is not None else 0,
            generation=control.generation or "",
            epoch=control.epoch,
            shape=deployment.shape,
            ranks=self._ranks(now),
            step=deployment.ingest.newest_step,
            window_steps=max((len(ring) for ring in deployment.ingest.rings.values()), default=0),
            balancedness_mean=mean,
            balancedness_worst=worst,
            active_plan=control.active_plan,
            staging_bytes_done=sum(done for done, _ in staged),
            staging_bytes_total=sum(total for _, total in staged),
            last_decision=decisions[-1] if decisions else None,
            frozen_until_unix=frozen_until if frozen_until > now + control.unix_offset_s else None,
            held=control.held,
            leader_address=deployment.options.advertise if deployment.keeper.leading else None,
        )

    def _ranks(self, now: float) -> tuple[RankStatus, ...]:
        deployment = self._deployment
        membership = deployment.control.membership
        shares, speeds = deployment.balance.load_shares(), deployment.balance.seconds_per_token()
        factors = deployment.balance.speed_factors()
        rows = []
        for rank in sorted(membership.members):
            member = membership.members[rank]
            hello, state = member.hello, member.state
            session = deployment.sessions.get(member.stream)
            speed = float(speeds[rank]) if rank < len(speeds) else math.nan
            factor = float(factors[rank]) if rank < len(factors) else math.nan
            rows.append(
                RankStatus(
                    rank=rank,
                    node=hello.node,
                    gpu_uuid=hello.gpu_uuid,
                    fresh=membership.fresh(rank, now),
                    last_seen_unix=member.last_seen + deployment.unix_offset_s,
                    epoch=session.epoch if session is not None else hello.epoch,
                    state=state.state if state is not None else "unknown",
                    load_share=float(shares[rank])
                    if shares is not None and rank < len(shares)
                    else None,
                    seconds_per_token=speed if np.isfinite(speed) else None,
                    free_bytes=session.free_bytes if session is not None else hello.free_bytes,
                    staging_bytes=hello.staging_bytes,
                    slowness=factor if np.isfinite(factor) else None,
                    trouble=session.trouble if session is not None else "",
                )
            )
        return tuple(rows)
