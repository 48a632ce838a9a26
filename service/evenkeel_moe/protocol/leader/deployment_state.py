"""The state of one deployment on one controller replica, as the parts around its machine read it.

Parts that only read get a `DeploymentState`, which takes no events.
"""

from dataclasses import dataclass
from itertools import count

from evenkeel_moe.errors import (
    Conflict,
    InfeasiblePlan,
    NotFound,
    Reason,
    ShapeMismatch,
    Unavailable,
)
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.quantities import duration_text
from evenkeel_moe.protocol.control_messages import PersistDocument
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.liveness import Liveness
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.leader.plan_validation import placement_at
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.leader.query_round import GroupState
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.leader.write_retry import WriteRetry
from evenkeel_moe.protocol.messages import Leader
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.protocol.transitions import ControlState


@dataclass(eq=False, repr=False)
class Leading:
    """The parts of a leader, for one term."""

    executor: PlanExecutor
    recovery: Recovery
    liveness: Liveness
    planning_loop: PlanningLoop


class DeploymentState:
    """One deployment. Only `DeploymentControl` changes it, by the events it handles.

    Args:
        unix_offset_s: Unix seconds minus the monotonic `now` of the events, for the records.
    """

    executor_type = PlanExecutor
    recovery_type = Recovery
    membership_type = Membership
    planning_type = PlanningLoop

    def __init__(
        self,
        deployment: DeploymentId,
        *,
        timing: ControlTiming | None = None,
        policy: DeploymentPolicy | None = None,
        unix_offset_s: float = 0.0,
    ) -> None:
        self.deployment = deployment
        self.timing = timing or ControlTiming()
        self.unix_offset_s = unix_offset_s
        self.policy = policy or DeploymentPolicy()
        """The policy operators set last."""
        self._cycle_numbers = count(1)
        self._become_follower()

    def _become_follower(self) -> None:
        self.state = ControlState.FOLLOWER
        self.leading: Leading | None = None
        """None exactly in FOLLOWER."""
        self.membership = self.membership_type(self.deployment, lease_s=self.timing.rank_lease_s)
        self.records = PlanRecords()
        """The plan records; empty unless this replica leads."""
        self.write_retry = WriteRetry()

    @property
    def as_leader(self) -> Leading:
        """The parts of a leader. Only for use while it leads."""
        assert self.leading is not None
        return self.leading

    @property
    def leader(self) -> Leader | None:
        """This replica with its term; None unless it leads."""
        return self.leading.executor.leader if self.leading is not None else None

    @property
    def group(self) -> GroupState | None:
        """The state on which all ranks agree; None before they reported it."""
        return self.leading.executor.group if self.leading is not None else None

    @property
    def epoch(self) -> Epoch | None:
        """The committed epoch; None before the ranks reported it."""
        return self.group.epoch if self.group is not None else None

    @property
    def placement(self) -> Placement | None:
        """The committed placement; None before the ranks reported it."""
        return self.group.placement if self.group is not None else None

    @property
    def generation(self) -> Generation | None:
        """The registered generation."""
        return self.membership.generation

    @property
    def history(self) -> dict[Epoch, Placement]:
        """The recorded placements by epoch; short after the store was flushed (R15)."""
        return self.leading.executor.history if self.leading is not None else {}

    @property
    def coordinator(self) -> Coordinator | None:
        """The machine of the newest wave, which may have ended."""
        return self.leading.executor.coordinator if self.leading is not None else None

    @property
    def staged(self) -> dict[EpRank, tuple[int, int]]:
        """(bytes done, bytes total) of the running wave, by rank."""
        return self.leading.executor.staged if self.leading is not None else {}

    @property
    def held(self) -> bool:
        """True while automatic plans wait for `resume` (R16)."""
        return self.hold.because is not None

    @property
    def hold(self) -> Hold:
        """The hold on automatic plans, with its reason."""
        return self.leading.planning_loop.hold if self.leading is not None else Hold()

    @property
    def frozen_until(self) -> float:
        """Unix seconds until which no plan begins; 0 if not frozen."""
        return self.leading.planning_loop.frozen_until if self.leading is not None else 0.0

    def document(self) -> PersistDocument:
        """Return the write of the operators' hold and freeze."""
        body = {**self.hold.document(), "frozen_until": self.frozen_until}
        return PersistDocument("control", body)

    @property
    def recovered(self) -> bool:
        """True if this replica leads and all ranks have told their state."""
        return self.state in (ControlState.READY, ControlState.MIGRATING)

    def unavailable(self) -> Unavailable:
        """Return the error for a request that needs a leader whose ranks have all answered."""
        match self.state:
            case ControlState.FOLLOWER:
                return Unavailable("this replica does not lead the deployment", Reason.NOT_LEADER)
            case ControlState.WAITING_FOR_RANKS:
                return Unavailable("the ranks have not all connected", Reason.RANKS_MISSING)
            case _:
                return Unavailable("the ranks are being asked where they stand", Reason.RECOVERING)

    def state_reason(self, now: float) -> tuple[Reason, str]:
        """Return the reason for the state, and a sentence for people."""
        match self.state:
            case ControlState.FOLLOWER:
                return Reason.NOT_LEADER, "another replica leads, or none yet"
            case ControlState.RECOVERING:
                disagreement = self.as_leader.recovery.disagreement
                if disagreement is not None:
                    return disagreement.reason, disagreement.detail
                return Reason.RECOVERING, "asking all ranks where they stand"
            case ControlState.MIGRATING if self.records.active is not None:
                record = self.records.active
                return record.reason, f"plan {record.plan.plan_id} is {record.phase}"
            case _:
                quorum = self.membership.quorum(now)
                stopped = self.membership.all_stopped
                return Reason.GROUP_STOPPED if stopped else quorum.reason, quorum.detail

    def shown_state(self, now: float) -> ControlState:
        """Return the state for people: not READY while ranks are missing."""
        if self.state is ControlState.READY:
            quorum = self.membership.quorum(now)
            if quorum.reason is Reason.RANKS_MISSING:
                return ControlState.WAITING_FOR_RANKS
        return self.state

    # --- plans and rollbacks --------------------------------------------------------------------

    def check_plan(self, plan: Plan) -> None:
        """Check that a plan could be entered now.

        Raises:
            Conflict: GENERATION_CHANGED, STALE_BASE, WEIGHTS_VERSION_CHANGED.
            InfeasiblePlan: the plan breaks an invariant (R17).
            Unavailable: this replica does not lead, or not all ranks have answered.
        """
        if not self.recovered:
            raise self.unavailable()
        executor = self.as_leader.executor
        if executor.is_of_other_generation(plan):
            raise Conflict(f"planned for {plan.generation}", Reason.GENERATION_CHANGED)
        if executor.is_stale(plan, 0):
            raise Conflict(f"planned on epoch {plan.base_epoch}", Reason.STALE_BASE)
        if executor.is_of_other_weights(plan):
            words = f"planned for weights {plan.weights_version}"
            raise Conflict(words, Reason.WEIGHTS_VERSION_CHANGED)
        refusal = executor.plan_problem(plan)
        if refusal is not None:
            raise InfeasiblePlan(refusal[1], refusal[0])

    def require_free(self, kind: PlanKind, now: float) -> None:
        """Refuse a plan under the lock of mode observe, on ranks that observe, or beside another.

        Raises:
            Conflict: OBSERVE_MODE, OBSERVE_ONLY, PLAN_IN_PROGRESS, FROZEN, OUTSIDE_SCHEDULE or
                RESIZING.
        """
        if self.policy.locked:
            raise Conflict(
                "the mode is observe and observe_lock is set, so nothing may move weights; an admin"
                " can set another mode, or observe_lock to false",
                Reason.OBSERVE_MODE,
            )
        observers = self.membership.observers
        if observers:
            raise Conflict(
                f"ranks {observers} only observe and refuse every plan: start all ranks of a group"
                " with EVENKEEL_RANK__MODE=place",
                Reason.OBSERVE_ONLY,
            )
        if (active := self.records.active) is not None:
            name = active.plan.plan_id
            raise Conflict(
                f"plan {name} is {active.phase}: wait for it, or `evenkeel plan cancel {name} -d"
                f" {self.deployment}`",
                Reason.PLAN_IN_PROGRESS,
            )
        unix = now + self.unix_offset_s
        closed = self.as_leader.planning_loop.closed(now, kind)
        ends = f"`evenkeel resume -d {self.deployment}` ends that"
        if closed is Reason.FROZEN:
            wait = duration_text(self.frozen_until - unix)
            raise Conflict(f"paused for another {wait}; {ends}", closed)
        if closed is Reason.RESIZING:
            assert self.hold.retiring is not None
            raise Conflict(f"ranks {list(self.hold.retiring.ranks)} retire; {ends}", closed)
        if closed is not None:
            opens_at = self.policy.schedule.opens_at(unix)
            assert opens_at is not None
            raise Conflict(f"the schedule opens in {duration_text(opens_at - unix)}", closed)

    def rollback_target(self, to_epoch: Epoch | None) -> tuple[Epoch, Placement]:
        """Return the epoch and placement a rollback leads to.

        Without `to_epoch` it is the placement before the plan that led to the current epoch.

        Raises:
            NotFound: the epoch is not recorded, for instance after a flushed store (R15).
            Conflict: it is the current epoch.
            ShapeMismatch: the group had another size.
            Unavailable: this replica does not lead, or not all ranks have answered.
        """
        if not self.recovered:
            raise self.unavailable()
        history, current = self.history, self.epoch
        assert current is not None
        earlier = self._earlier_epochs()
        epoch = self.rollback_epoch() if to_epoch is None else to_epoch
        if epoch is None:
            raise NotFound("no earlier placement is recorded")
        if epoch == current:
            raise Conflict(f"epoch {epoch} is the current one", Reason.NO_CHANGE)
        assert self.placement is not None
        if epoch in history and history[epoch].sizes != self.placement.sizes:
            raise ShapeMismatch(
                f"the placement of epoch {epoch} is (L, S, R, E) = {history[epoch].sizes}, the"
                f" group is {self.placement.sizes}"
            )
        if epoch not in earlier:
            raise NotFound(f"no placement of epoch {epoch} is recorded; there are {earlier}")
        return epoch, history[epoch]

    def rollback_epoch(self) -> Epoch | None:
        """Return the epoch a rollback without a named epoch leads to; None if there is none."""
        earlier = self._earlier_epochs()
        return self._before_last_plan(earlier) if earlier else None

    def _earlier_epochs(self) -> list[Epoch]:
        """Return the recorded epochs before the present one in which the group had its size."""
        current, placement = self.epoch, self.placement
        if current is None or placement is None:
            return []
        return sorted(
            epoch
            for epoch, known in self.history.items()
            if epoch < current and known.sizes == placement.sizes
        )

    def _before_last_plan(self, earlier: list[Epoch]) -> Epoch:
        """Return the recorded base of the plan that led to the current epoch, else the newest.

        The maps are compared, because after a cold start epochs begin at 0 again. After a warm one
        the group is still where a plan of an earlier generation led.
        """
        history, current = self.history, self.epoch
        assert current is not None
        for record in reversed(self.records.by_id.values()):
            plan, waves = record.plan, record.waves_committed
            leads_here = plan.base_epoch + waves == current and plan.base_epoch in earlier
            if (
                leads_here
                and history[plan.base_epoch] == plan.base
                and history.get(current) == placement_at(plan, waves)
            ):
                return plan.base_epoch
        return earlier[-1]
