"""Carries the active plan over the group, wave after wave, and ends waves found on it.

Not a machine of its own: `control` feeds it and reads back what it left behind. One coordinator at
a time; it is kept when it has ended, so that late answers find it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.plan import Plan, PlanPhase, PlanRecord, WaveKey
from evenkeel_moe.protocol.control_messages import (
    ControlAction,
    CoordinatorAction,
    PersistEpoch,
    PersistPlan,
    WaveHealth,
)
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.leader.plan_validation import (
    Refusal,
    placement_at,
    plan_refusal,
    pool_refusal,
    wave_refusal,
)
from evenkeel_moe.protocol.leader.query_round import GroupState
from evenkeel_moe.protocol.messages import Leader, Prepare, StagingProgress
from evenkeel_moe.protocol.timing import WaveTiming
from evenkeel_moe.protocol.transitions import CoordinatorState

if TYPE_CHECKING:
    from evenkeel_moe.model.placement import Placement

__all__ = ["PlanExecutor"]

_EPOCHS_KEPT = 64
"""Placements of earlier epochs in memory, as many as the store keeps."""


class PlanExecutor:
    """The active plan's progress.

    Args:
        leader: this controller with its term.
        unix_offset_s: Unix seconds less monotonic ones.
    """

    coordinator_type = Coordinator

    def __init__(
        self,
        leader: Leader,
        membership: Membership,
        records: PlanRecords,
        timing: WaveTiming,
        *,
        batch_deadline_s: float,
        max_bytes_per_s: float,
        unix_offset_s: float,
    ) -> None:
        self.leader = leader
        self.membership = membership
        self.records = records
        self.timing = timing
        self.batch_deadline_s = batch_deadline_s
        self.max_bytes_per_s = max_bytes_per_s
        self.unix_offset_s = unix_offset_s
        self.group: GroupState | None = None
        """Where the group is; None until all ranks said so."""
        self.history: dict[Epoch, Placement] = {}
        """Placements by epoch up to the group's, as many as are known (R15)."""
        self.coordinator: Coordinator | None = None
        self.staged: dict[EpRank, tuple[int, int]] = {}
        """(bytes done, bytes total) of the running wave, by rank."""
        self.weights_moved = False
        """Some rank reports other weights than the group's: nothing may begin before a round (R4)."""
        self.found_gone: set[WaveKey] = set()
        """Waves a recovery aborted: their plan cannot go on."""
        self._after: Placement | None = None
        self._ended = True
        self._waiting: tuple[PlanId, float] | None = None
        """The plan that cannot go on, and since when."""

    @property
    def running(self) -> bool:
        """Whether a wave is under way on the ranks."""
        return self.coordinator is not None and not self.coordinator.done

    def runs(self, record: PlanRecord) -> bool:
        """Whether a wave of this plan is under way on the ranks."""
        return self.running and self._record() is record

    # --- predicates: one rule each ----------------------------------------------------------------

    def is_stale(self, plan: Plan, waves_committed: int) -> bool:
        """R16: the group is not where the plan's next wave begins."""
        group = self.group
        return (
            group is None
            or group.epoch != plan.base_epoch + waves_committed
            or group.placement != placement_at(plan, waves_committed)
        )

    def is_of_other_generation(self, plan: Plan) -> bool:
        """R1: the plan was made for an earlier life of the group."""
        return plan.generation != self.membership.generation

    def plan_problem(self, plan: Plan) -> Refusal | None:
        """R17: the plan breaks an invariant as a whole."""
        shape = self.membership.shape
        assert shape is not None
        return plan_refusal(plan, shape)

    def wave_problem(self, plan: Plan, index: int) -> Refusal | None:
        """R17: the wave breaks an invariant on the placement before it."""
        shape = self.membership.shape
        assert shape is not None
        return wave_refusal(
            plan.waves[index],
            placement_at(plan, index),
            shape,
            self.membership.staging_bytes(),
            allow_duplicates=plan.allow_duplicates,
        )

    def pool_problem(self, plan: Plan, index: int) -> Refusal | None:
        """R11: the wave would fill a buffer that it frees itself."""
        shape = self.membership.shape
        assert shape is not None
        return pool_refusal(plan.waves[index], placement_at(plan, index), shape)

    # --- waves ------------------------------------------------------------------------------------

    def begin_wave(
        self, record: PlanRecord, now: float, *, may_persist: bool
    ) -> list[ControlAction]:
        """Send the plan's next wave out, or say why it waits or ends."""
        plan, index, unix = record.plan, record.waves_committed, now + self.unix_offset_s
        quorum = self.membership.quorum(now)
        if not quorum.ok:
            return self.wait(record, quorum.reason, quorum.detail, now)
        if not may_persist:
            return self.wait(
                record, Reason.STORE_UNAVAILABLE, "earlier records are not stored yet", now
            )
        if self.is_stale(plan, index):
            detail = f"based on epoch {plan.base_epoch} + {index}, the group is elsewhere"
            return [self.records.end(record, Reason.STALE_BASE, unix, detail)]
        refusal = self.wave_problem(plan, index) or self.pool_problem(plan, index)
        if refusal is not None:
            return [self.records.end(record, refusal[0], unix, f"wave {index}: {refusal[1]}")]
        assert self.group is not None
        body, group = plan.waves[index], self.group
        experts = group.placement.num_logical_experts
        if len(group.checksums) != group.placement.num_layers * experts:
            detail = "the ranks registered no checksums to copy by: after a reload their replicas differed"
            return [self.records.end(record, Reason.OBSERVE_ONLY, unix, detail)]
        sums = tuple(group.checksums[t.layer * experts + t.logical_expert] for t in body.transfers)
        prepare = Prepare(
            self.leader,
            plan.key(index),
            group.epoch,
            body,
            sums,
            self.batch_deadline_s,
            self.max_bytes_per_s,
        )
        self._after = group.placement.with_rows(body.layers, body.rows)
        self._waiting = None
        self.staged = {}
        row = f"wave {index} of {len(plan.waves)}: {len(body.transfers)} transfers"
        change = self.records.change(
            record,
            "wave_started",
            unix,
            phase=PlanPhase.MIGRATING,
            reason=Reason.PLAN_STARTED,
            detail=row,
        )
        return [change, *self._start(prepare.wave, now, prepare=prepare)]

    def recover(self, wave: WaveKey, query: int, now: float) -> list[ControlAction]:
        """End a wave that some rank was found holding (R12)."""
        self._after = self._waiting = None
        actions = self._start(wave, now, query=query)
        return [*self._note_health(WaveHealth(wave, False, None), now), *actions]

    def _start(
        self, wave: WaveKey, now: float, *, prepare: Prepare | None = None, query: int = 0
    ) -> Sequence[CoordinatorAction]:
        peers = {
            rank: (member.hello.identity.incarnation, member.stream)
            for rank, member in self.membership.members.items()
        }
        self._ended = False
        self.coordinator = self.coordinator_type(
            wave, self.leader, peers, self.timing, prepare=prepare, query=query
        )
        return self.coordinator.start(now, self.membership.step())

    def take(self, event: object, now: float) -> list[ControlAction]:
        """Give the coordinator an event and draw the plan's consequences."""
        coordinator = self.coordinator
        if coordinator is None:
            return []
        before = coordinator.state
        answers = coordinator.handle(event, now)
        actions: list[ControlAction] = []
        if (
            coordinator.state is CoordinatorState.COMMITTED
            and before is not CoordinatorState.COMMITTED
        ):
            # Before the outcome: a wave whose outcome is stored is counted by its plan's stored record.
            actions += self._learned_commit(now)
        actions += answers
        for action in answers:
            if isinstance(action, WaveHealth):
                actions += self._note_health(action, now)
        if coordinator.done and not self._ended:
            self._ended = True
            actions += self._wave_ended(coordinator, now)
        return actions

    def progress(self, rank: EpRank, message: StagingProgress) -> None:
        """Note staged bytes, for progress bars."""
        if self.coordinator is not None and message.wave == self.coordinator.wave:
            self.staged[rank] = (message.bytes_done, message.bytes_total)

    def _record(self) -> PlanRecord | None:
        """The record of the plan the coordinator's wave belongs to; None for a found wave."""
        if self._after is None or self.coordinator is None:
            return None
        return self.records.by_id.get(self.coordinator.wave.plan_id)

    def _learned_commit(self, now: float) -> list[ControlAction]:
        """One rank is at the new epoch: all are, or will be when they reach the same boundary (R3)."""
        if self._after is None:
            return self._count_found(now)
        record, group, after = self._record(), self.group, self._after
        if record is None or group is None:
            return []
        self.group = GroupState(
            Epoch(group.epoch + 1), after, group.weights_version, group.checksums
        )
        self.history[self.group.epoch] = after
        for epoch in sorted(self.history)[:-_EPOCHS_KEPT]:
            del self.history[epoch]
        change = self.records.change(
            record,
            "wave_committed",
            now + self.unix_offset_s,
            waves_committed=record.waves_committed + 1,
            detail=f"epoch {self.group.epoch}",
        )
        return [PersistEpoch(record.plan.generation, self.group.epoch, after), change]

    def _count_found(self, now: float) -> list[ControlAction]:
        """A wave found on the ranks is committed: its plan says so at once, whatever becomes of the ranks.

        Epoch and map follow from the next round; if the group restarts before it, this is the last that is
        heard of the wave.
        """
        assert self.coordinator is not None
        wave = self.coordinator.wave
        record = self._plan_of(wave)
        if record is None or record.phase.terminal or wave.wave_index < record.waves_committed:
            return []
        unix, committed = now + self.unix_offset_s, wave.wave_index + 1
        detail = "found on the ranks"
        return [
            self.records.change(
                record, "wave_committed", unix, waves_committed=committed, detail=detail
            )
        ]

    def _plan_of(self, wave: WaveKey) -> PlanRecord | None:
        """The record of this very plan; None where its id has another life."""
        record, index = self.records.by_id.get(wave.plan_id), wave.wave_index
        known = (
            record is not None and index < len(record.plan.waves) and record.plan.key(index) == wave
        )
        return record if known else None

    def _wave_ended(self, coordinator: Coordinator, now: float) -> list[ControlAction]:
        """All ranks are through with the wave: end the plan if this ends it."""
        record, unix = self._record(), now + self.unix_offset_s
        if record is None:
            if coordinator.state is CoordinatorState.ABORTED:
                self.found_gone.add(coordinator.wave)
            return []
        if coordinator.state is CoordinatorState.ABORTED:
            return [self.records.end(record, coordinator.reason, unix, coordinator.detail)]
        return self.settle(record, unix)

    def settle(self, record: PlanRecord, unix: float) -> list[ControlAction]:
        """Between waves: end the plan if it is complete, cancelled or its weights are gone."""
        completed = self.records.complete(record, unix)
        if completed is not None:
            return [completed]
        if self.records.cancel_requested(record):
            return [self.records.end(record, Reason.CANCELLED, unix, "between two waves")]
        if self.weights_moved:
            return [self.records.end(record, Reason.WEIGHTS_VERSION_CHANGED, unix)]
        return []

    # --- waiting ------------------------------------------------------------------------------------

    def _note_health(self, health: WaveHealth, now: float) -> list[PersistPlan]:
        """A plan says what its wave waits for, also a wave that was found on the ranks (R14)."""
        record = self._plan_of(health.wave) if health.wave is not None else None
        if record is None or record is not self.records.active:
            return []
        unix = now + self.unix_offset_s
        if health.reason is None:
            if record.phase is PlanPhase.MIGRATING:
                return []
            phase, reason = PlanPhase.MIGRATING, Reason.PLAN_STARTED
            return [self.records.change(record, "resumed", unix, phase=phase, reason=reason)]
        event, phase = (
            ("stalled", PlanPhase.STALLED) if health.stalled else ("paused", PlanPhase.PAUSED)
        )
        return [
            self.records.change(
                record, event, unix, phase=phase, reason=health.reason, detail=health.detail
            )
        ]

    def wait(
        self, record: PlanRecord, reason: Reason, detail: str, now: float
    ) -> list[ControlAction]:
        """The plan cannot go on yet; after a while a person should know."""
        if self._waiting is None or self._waiting[0] != record.plan.plan_id:
            self._waiting = record.plan.plan_id, now
        if now - self._waiting[1] < self.timing.stall_after_s:
            return []
        if record.phase is PlanPhase.STALLED and record.reason is reason:
            return []
        unix = now + self.unix_offset_s
        change = self.records.change(
            record, "stalled", unix, phase=PlanPhase.STALLED, reason=reason, detail=detail
        )
        return [change, WaveHealth(record.plan.key(record.waves_committed), True, reason, detail)]
