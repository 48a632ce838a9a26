"""Shows one deployment to operators. None always means unknown, never zero."""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.controller.deployment.deployment import Deployment
from evenkeel_moe.controller.operations.gauges import losses_in_a_row
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.planning.problem.survival import Coverage, Survive, coverage
from evenkeel_moe.planning.schedule.width_change import holders, stranded
from evenkeel_moe.ports.status import DeploymentStatus, RankStatus, ResizeStatus
from evenkeel_moe.protocol.messages import ParticipantState
from evenkeel_moe.protocol.transitions import ControlState

_kept_coverage = lru_cache(maxsize=256)(coverage)
"""It takes milliseconds, and every status of a placement has the same."""


class LiveView:
    """`ports.DeploymentView` of a deployment on this replica."""

    def __init__(self, deployment: Deployment) -> None:
        self.control, self.loads = deployment.control, deployment.loads
        self.ranks, self.leadership = deployment.ranks, deployment.leadership
        self.clock, self.decisions = deployment.clock, deployment.decisions
        self.cost = deployment.planner.builder.cost
        """The cost model of the newest cycle; None before the first."""

    def placement(self) -> Placement | None:
        """Return the committed placement; None before the ranks told it."""
        return self.control.placement

    def window(self, phase: Phase) -> LoadWindow | None:
        """Return the window of a phase; None while it has no step."""
        ring = self.loads.ingest.rings.get(phase)
        return ring.window() if ring is not None else None

    def _by_phase(self, which: int) -> Mapping[Phase, float | None]:
        """Return the mean balancedness of each phase, or that of the worst layer."""
        return {phase: self.loads.balance.summary(phase)[which] for phase in Phase}

    def _any_rank_heard(self) -> bool:
        return self.control.membership.any_fresh(self.clock.monotonic())

    def status(self) -> DeploymentStatus:
        """Return the present status.

        Raises:
            Unavailable: no rank has declared its shape yet.
        """
        control, loads, leadership = self.control, self.loads, self.leadership
        if loads.shape is None:
            raise Unavailable(f"no rank of {control.deployment} has connected yet")
        self.loads.update_balance()
        now = self.clock.monotonic()
        heard = self._any_rank_heard()
        mean, worst = loads.balance.summary() if heard else (None, None)
        staged = control.staged.values()
        winner, leading = leadership.keeper.winner, leadership.keeper.leading
        frozen_until, choice = control.frozen_until, loads.dispatch_choice()
        aborted, newest_at = control.records.newest(PlanPhase.ABORTED), loads.ingest.newest_at
        return DeploymentStatus(
            deployment=control.deployment,
            at_unix=now + control.unix_offset_s,
            state=control.shown_state(now),
            reason=control.state_reason(now)[0],
            mode=control.policy.mode,
            policy=control.policy.policy,
            rules=control.policy,
            leader=winner.holder if winner is not None and leading else "",
            term=control.leader.term if control.leader is not None else 0,
            generation=control.generation or "",
            epoch=control.epoch,
            rollback_epoch=control.rollback_epoch(),
            shape=loads.shape,
            ranks=self._rank_rows(now),
            step=loads.ingest.newest_step,
            window_steps=max((len(ring) for ring in loads.ingest.rings.values()), default=0),
            balancedness_mean=mean,
            balancedness_worst=worst,
            time_balance=self._of_last_cycle("time_balance") if heard else None,
            time_balance_worst=self._of_last_cycle("time_balance_worst") if heard else None,
            cost_model=None if self.cost is None else self.cost.basis,
            active_plan=control.records.active,
            proposals=control.records.proposals,
            staging_bytes_done=sum(done for done, _ in staged),
            staging_bytes_total=sum(total for _, total in staged),
            last_decision=self.decisions[-1] if self.decisions else None,
            frozen_until_unix=frozen_until if frozen_until > now + control.unix_offset_s else None,
            held=control.held,
            resize=self.resize(),
            held_because=control.hold.because,
            leader_address=leadership.advertise if leading else None,
            dispatch=choice.model.value,
            dispatch_warning=choice.warning,
            balancedness_by_phase=self._by_phase(0) if heard else {},
            balancedness_worst_by_phase=self._by_phase(1) if heard else {},
            newest_step_unix=None if newest_at is None else newest_at + control.unix_offset_s,
            plan_aborted_unix=None if aborted is None else aborted.updated_at,
            plans_lost_time=losses_in_a_row(control.records.by_id.values()),
            findings=loads.findings() if heard else None,
            coverage=self._coverage(),
            start_refused_text=self._start_refused(now),
        )

    def _start_refused(self, now: float) -> str | None:
        """Return the words with which the machine would refuse to start a plan made by hand."""
        if not self.control.recovered:
            return str(self.control.unavailable())
        try:
            self.control.require_free(PlanKind.MANUAL, now)
        except Conflict as refusal:
            return str(refusal)
        return None

    def resize(self) -> ResizeStatus | None:
        """Return which ranks retire, and if they may leave; None if none do."""
        control, retiring = self.control, self.control.hold.retiring
        if retiring is None:
            return None
        placement, alone = control.placement, None
        if placement is not None and placement.num_ranks == retiring.num_ranks:
            alone = stranded(holders(placement), retiring.ranks)
        plans = (record.plan for record in reversed(control.records.by_id.values()))
        return ResizeStatus(
            retire=retiring.ranks,
            num_ranks=retiring.num_ranks,
            to_ranks=retiring.num_ranks - len(retiring.ranks),
            stranded=alone,
            ready=alone == 0 and control.records.active is None,
            plan_id=next((p.plan_id for p in plans if p.kind is PlanKind.EVACUATION), None),
        )

    def _coverage(self) -> tuple[Coverage, ...] | None:
        placement, topology = self.placement(), self.loads.topology()
        if placement is None or placement.num_ranks != topology.num_ranks:
            return None
        kinds = (Survive.RANK, Survive.NODE)[: 2 if topology.num_nodes > 1 else 1]
        return tuple(_kept_coverage(placement, topology, kind) for kind in kinds)

    def _of_last_cycle(self, name: str) -> float | None:
        """Return a number of the newest decision; None if it has none of that name."""
        numbers = self.decisions[-1].get("numbers", {}) if self.decisions else {}
        value = numbers.get(name)
        return None if value is None else float(value)

    def _rank_rows(self, now: float) -> tuple[RankStatus, ...]:
        membership, balance, times = self.control.membership, self.loads.balance, self.loads.times
        shares = speeds = factors = None
        if self._any_rank_heard():
            shares, speeds = balance.load_shares(), times.seconds_per_token()
            factors = times.speed_factors()
        rows = []
        for rank, member in sorted(membership.members.items()):
            hello, state = member.hello, member.state
            session = self.ranks.by_stream.get(member.stream)
            fresh = membership.is_fresh(member, now)
            row = RankStatus(
                rank=rank,
                node=hello.node,
                gpu_uuid=hello.gpu_uuid,
                device=hello.device,
                weight_format=hello.weight_format,
                fresh=fresh,
                last_seen_unix=member.last_seen + self.control.unix_offset_s,
                epoch=None if session is None else session.epoch,
                state=self._state_now(state.state) if fresh and state is not None else "unknown",
                load_share=_known(shares, rank),
                seconds_per_token=_known(speeds, rank),
                free_bytes=None if session is None else session.free_bytes,
                staging_bytes=hello.staging_bytes,
                slowness=_known(factors, rank),
                trouble=session.trouble if session is not None else "",
                stopped=member.stopped,
            )
            rows.append(row)
        return tuple(rows)

    def _state_now(self, told: ParticipantState) -> ParticipantState:
        """Return the state of a rank; ranks tell theirs only when a leader asks.

        The machine is READY only after every rank has answered how its wave ended, so an earlier
        answer from within a wave is over.
        """
        over = self.control.state is ControlState.READY and told is not ParticipantState.ABORTED
        return ParticipantState.IDLE if over else told


def _known(values: NDArray[np.float64] | None, rank: int) -> float | None:
    """Return the value of a rank; None if it was not measured."""
    value = float(values[rank]) if values is not None and rank < len(values) else math.nan
    return value if math.isfinite(value) else None
