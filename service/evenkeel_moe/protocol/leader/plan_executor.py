"""Carries out the active plan, wave after wave, and ends waves that ranks still hold.

It is part of `control`, which passes events in and reads the result. There is one coordinator at a
time. An ended one is kept, so that late answers still reach it.
"""

from collections.abc import Sequence

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanPhase, PlanRecord, WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.control_messages import (
    ControlAction,
    CoordinatorAction,
    FromRank,
    PersistEpoch,
    PersistPlan,
    WaveBegins,
    WaveEnded,
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
from evenkeel_moe.protocol.leader.wave_durations import WaveDurations
from evenkeel_moe.protocol.messages import Leader, MovedAnswers, Prepare, StagingProgress
from evenkeel_moe.protocol.timing import ControlTiming
from evenkeel_moe.protocol.transitions import CoordinatorState

_EPOCHS_KEPT = 64
"""Placements of earlier epochs in memory, as many as the store keeps."""


class PlanExecutor:
    """The progress of the active plan under one term.

    Args:
        leader: this controller with its term.
        unix_offset_s: Unix seconds minus monotonic seconds.
    """

    coordinator_type = Coordinator

    def __init__(
        self,
        leader: Leader,
        membership: Membership,
        records: PlanRecords,
        timing: ControlTiming,
        *,
        unix_offset_s: float,
    ) -> None:
        self.leader = leader
        self.membership = membership
        self.records = records
        self.timing = timing
        self.unix_offset_s = unix_offset_s
        self.group: GroupState | None = None
        """The state of the group; None until all ranks have reported it."""
        self.history: dict[Epoch, Placement] = {}
        """The known placements by epoch, up to the group's (R15)."""
        self.coordinator: Coordinator | None = None
        self.staged: dict[EpRank, tuple[int, int]] = {}
        """(bytes done, bytes total) of the running wave, by rank."""
        self._answers: dict[WaveKey, dict[EpRank, MovedAnswers]] = {}
        """What ranks told of the experts that waves moved, until all ranks have told it."""
        self.weights_changed = False
        """True if a rank reports other weights; no wave begins until all ranks were asked (R4)."""
        self.aborted_found: set[WaveKey] = set()
        """Waves that a recovery aborted; their plans cannot go on."""
        self._next_placement: Placement | None = None
        """The placement after the running wave; None for a found wave."""
        self._durations: WaveDurations | None = None
        self._wave_over = True
        self._waiting: tuple[PlanId, float] | None = None
        """The plan that cannot go on, and since when."""

    @property
    def running(self) -> bool:
        """True while a wave is under way on the ranks."""
        return self.coordinator is not None and not self.coordinator.done

    @property
    def found_stale(self) -> bool:
        """True if the ended wave showed that a rank is at another epoch or map than the group."""
        assert self.coordinator is not None
        return self.coordinator.reason in (Reason.STALE_BASE, Reason.EPOCH_DISAGREES)

    def runs(self, record: PlanRecord) -> bool:
        """Return True while a wave of this plan is under way on the ranks."""
        return self.running and self._record() is record

    # --- rules ------------------------------------------------------------------------------------

    def is_stale(self, plan: Plan, waves_committed: int) -> bool:
        """R16: the group is not in the state in which the plan's next wave begins."""
        group = self.group
        assert group is not None
        return group.epoch != plan.base_epoch + waves_committed or group.placement != placement_at(
            plan, waves_committed
        )

    def is_of_other_generation(self, plan: Plan) -> bool:
        """R1: the plan was made for another generation of the group."""
        return plan.generation != self.membership.generation

    def is_of_other_weights(self, plan: Plan) -> bool:
        """R4: the plan was made for another version of the weights."""
        assert self.group is not None
        return plan.weights_version != self.group.weights_version

    @property
    def _shape(self) -> ModelShape:
        shape = self.membership.shape
        assert shape is not None
        return shape

    def plan_problem(self, plan: Plan) -> Refusal | None:
        """R17: return the invariant that the plan as a whole breaks."""
        return plan_refusal(plan, self._shape)

    def wave_problem(self, plan: Plan, index: int) -> Refusal | None:
        """R17: return the invariant that the wave breaks on the placement before it."""
        return wave_refusal(
            plan.waves[index],
            placement_at(plan, index),
            self._shape,
            self.membership.staging_bytes(),
            allow_duplicates=plan.allow_duplicates,
        )

    def pool_problem(self, plan: Plan, index: int) -> Refusal | None:
        """R11: return the refusal of a wave that would fill a buffer which it frees itself."""
        return pool_refusal(plan.waves[index], placement_at(plan, index), self._shape)

    # --- waves ------------------------------------------------------------------------------------

    def begin_wave(
        self, record: PlanRecord, now: float, *, may_persist: bool
    ) -> list[ControlAction]:
        """Send the plan's next wave out, let it wait, or end the plan."""
        plan, index, unix = record.plan, record.waves_committed, now + self.unix_offset_s
        quorum = self.membership.quorum(now)
        if not quorum.ok:
            return self.wait(record, quorum.reason, quorum.detail, now)
        if not may_persist:
            detail = "earlier records are not stored yet"
            return self.wait(record, Reason.STORE_UNAVAILABLE, detail, now)
        if self.is_stale(plan, index):
            detail = f"based on epoch {plan.base_epoch} + {index}, which is not the group's"
            return [self.records.end(record, Reason.STALE_BASE, unix, detail)]
        refusal = self.wave_problem(plan, index) or self.pool_problem(plan, index)
        if refusal is not None:
            return [self.records.end(record, refusal[0], unix, f"wave {index + 1}: {refusal[1]}")]
        group, body = self.group, plan.waves[index]
        assert group is not None
        experts = group.placement.num_logical_experts
        if len(group.checksums) != group.placement.num_layers * experts:
            detail = "the ranks registered no checksums: after a reload their replicas differed"
            return [self.records.end(record, Reason.OBSERVE_ONLY, unix, detail)]
        prepare = Prepare(
            self.leader,
            plan.key(index),
            group.epoch,
            body,
            tuple(group.checksums[t.layer * experts + t.logical_expert] for t in body.transfers),
            self.timing.batch_deadline_s,
            self.timing.max_bytes_per_s,
        )
        self._next_placement = group.placement.with_rows(body.layers, body.rows)
        self._waiting = None
        change = self.records.change(
            record,
            "wave_started",
            unix,
            phase=PlanPhase.MIGRATING,
            reason=Reason.PLAN_STARTED,
            detail=f"wave {index + 1} of {len(plan.waves)}: {len(body.transfers)} transfers",
            wave_sent=True,
        )
        digest = self._next_placement.digest
        sends = self._start(prepare.wave, now, digest, prepare=prepare)
        return [change, WaveBegins(prepare), *sends]

    def recover(self, wave: WaveKey, query: int, now: float) -> list[ControlAction]:
        """End a wave that some rank was found holding (R12)."""
        self._next_placement = self._waiting = None
        record = self._plan_of(wave)
        after = None if record is None else placement_at(record.plan, wave.wave_index + 1)
        actions = self._start(wave, now, None if after is None else after.digest, query=query)
        return [*self._note_health(WaveHealth(wave, False, None), now), *actions]

    def _start(
        self,
        wave: WaveKey,
        now: float,
        placement_digest: str | None,
        *,
        prepare: Prepare | None = None,
        query: int = 0,
    ) -> Sequence[CoordinatorAction]:
        peers = {
            rank: (member.hello.identity.incarnation, member.stream)
            for rank, member in self.membership.members.items()
        }
        self._wave_over = False
        self._durations = WaveDurations(peers, now)
        self.coordinator = self.coordinator_type(
            wave,
            self.leader,
            peers,
            self.timing.wave,
            prepare=prepare,
            placement_digest=placement_digest,
            query=query,
        )
        return self.coordinator.start(now, self.membership.step())

    def take(self, event: object, now: float) -> list[ControlAction]:
        """Give the coordinator an event, and change the plan's record accordingly."""
        coordinator = self.coordinator
        if coordinator is None:
            return []
        before = coordinator.state
        if self._durations and isinstance(event, FromRank) and coordinator.peers.counts(event):
            self._durations.note(event, now)
        answers = coordinator.handle(event, now)
        actions = self._entered(coordinator, now) if coordinator.state is not before else []
        actions += answers
        for action in answers:
            # The plan of an aborted wave ends with it and is not recorded as resumed.
            if isinstance(action, WaveHealth) and coordinator.state is not CoordinatorState.ABORTED:
                actions += self._note_health(action, now)
        if coordinator.done and not self._wave_over:
            self._wave_over = True
            actions += self._wave_ended(coordinator, now)
        return actions

    def progress(self, rank: EpRank, message: StagingProgress) -> None:
        """Note the staged bytes, for display."""
        coordinator = self.coordinator
        if coordinator and not coordinator.done and message.wave == coordinator.wave:
            self.staged[rank] = (message.bytes_done, message.bytes_total)

    def answered(self, rank: EpRank, message: MovedAnswers, now: float) -> list[ControlAction]:
        """Note how the experts that a wave moved to a rank answer; the last rank completes it."""
        wave = message.wave
        record, members = self._plan_of(wave), self.membership.members
        self._answers = {key: told for key, told in self._answers.items() if self._plan_of(key)}
        if record is None or self.records.has_answers(record, wave.wave_index):
            return []
        told = self._answers.setdefault(wave, {})
        told[rank] = message
        if set(members) - set(told):
            return []
        del self._answers[wave]
        return [self.records.answered(record, list(told.values()), now + self.unix_offset_s)]

    def _record(self) -> PlanRecord | None:
        """Return the record of the coordinator's plan; None for a found wave."""
        assert self.coordinator is not None
        if self._next_placement is None:
            return None
        return self.records.get(self.coordinator.wave.plan_id)

    def _entered(self, coordinator: Coordinator, now: float) -> list[ControlAction]:
        """Note what the new state of the wave means for its plan and for the group."""
        match coordinator.state:
            case CoordinatorState.COMMITTING:
                return self._record_agreement(coordinator.wave, now)
            case CoordinatorState.COMMITTED:
                changes = self._record_commit(now)
                ended = WaveEnded(coordinator.wave, True, coordinator.reason, bool(changes))
                return [*changes, ended]
            case CoordinatorState.ABORTED:
                return [WaveEnded(coordinator.wave, False, coordinator.reason)]
            case _:
                return []

    def _record_agreement(self, wave: WaveKey, now: float) -> list[ControlAction]:
        """All ranks agreed on the wave: Commit waits until the plan's record says so.

        Without it nobody could tell later if a wave that no rank acknowledged can have swapped.
        """
        record, unix = self._plan_of(wave), now + self.unix_offset_s
        if record is None or record.phase.terminal or record.waves_committed != wave.wave_index:
            return []
        return [self.records.change(record, "wave_agreed", unix, wave_agreed=True)]

    def _record_commit(self, now: float) -> list[ControlAction]:
        """One rank is at the new epoch: all ranks reach it at the same boundary (R3)."""
        if self._next_placement is None:
            return self._record_found_commit(now)
        record, group, placement = self._record(), self.group, self._next_placement
        assert record is not None and group is not None
        epoch = Epoch(group.epoch + 1)
        self.group = GroupState(epoch, placement, group.weights_version, group.checksums)
        self.history[epoch] = placement
        for old in sorted(self.history)[:-_EPOCHS_KEPT]:
            del self.history[old]
        committed, unix = record.waves_committed + 1, now + self.unix_offset_s
        change = self._count_wave(record, committed, f"epoch {epoch}", unix)
        return [PersistEpoch(record.plan.generation, epoch, placement), change]

    def _record_found_commit(self, now: float) -> list[ControlAction]:
        """Count a committed wave that was found on the ranks.

        Epoch and placement follow from the next round of questions. If the group restarts before
        it, nothing more is learned of the wave.
        """
        assert self.coordinator is not None
        wave = self.coordinator.wave
        record = self._plan_of(wave)
        if record is None or record.phase.terminal or wave.wave_index < record.waves_committed:
            return []
        unix = now + self.unix_offset_s
        return [self._count_wave(record, wave.wave_index + 1, "found on the ranks", unix)]

    def _count_wave(
        self, record: PlanRecord, committed: int, detail: str, unix: float
    ) -> PersistPlan:
        event = "wave_committed"
        return self.records.change(record, event, unix, waves_committed=committed, detail=detail)

    def _plan_of(self, wave: WaveKey) -> PlanRecord | None:
        """Return the record of the wave's plan; None if another plan has its id."""
        record, index = self.records.by_id.get(wave.plan_id), wave.wave_index
        known = (
            record is not None and index < len(record.plan.waves) and record.plan.key(index) == wave
        )
        return record if known else None

    def _wave_ended(self, coordinator: Coordinator, now: float) -> list[ControlAction]:
        """No rank holds the wave any more: end the plan if it ends with this wave."""
        self.staged = {}
        record, unix = self._record(), now + self.unix_offset_s
        aborted = coordinator.state is CoordinatorState.ABORTED
        if record is None:
            if aborted:
                self.aborted_found.add(coordinator.wave)
            return []
        if self._durations is not None:
            record = self.records.note_wave(record, self._durations.row())
        if aborted:
            return [self.records.end(record, coordinator.reason, unix, coordinator.detail)]
        return self.settle(record, unix)

    def settle(self, record: PlanRecord, unix: float) -> list[ControlAction]:
        """Between waves: end the plan if it is complete or cancelled, or its weights are gone."""
        completed = self.records.complete(record, unix)
        if completed is not None:
            return [completed]
        if record.cancel_requested:
            return [self.records.end(record, Reason.CANCELLED, unix, "between two waves")]
        if self.weights_changed:
            return [self.records.end(record, Reason.WEIGHTS_VERSION_CHANGED, unix)]
        return []

    # --- waiting ----------------------------------------------------------------------------------

    def _note_health(self, health: WaveHealth, now: float) -> list[PersistPlan]:
        """Write into the plan's record that its wave waits, or that it goes on (R14)."""
        record = self._plan_of(health.wave) if health.wave is not None else None
        if record is None or record is not self.records.active:
            return []
        unix = now + self.unix_offset_s
        if health.reason is None:
            if record.phase is PlanPhase.MIGRATING:
                return []
            # A store that lost writes may not know of the wave that was found on the ranks.
            return [
                self.records.change(
                    record,
                    "resumed",
                    unix,
                    phase=PlanPhase.MIGRATING,
                    reason=Reason.PLAN_STARTED,
                    wave_sent=True,
                )
            ]
        phase = PlanPhase.STALLED if health.stalled else PlanPhase.PAUSED
        reason, detail = health.reason, health.detail
        return [
            self.records.change(
                record, phase.value, unix, phase=phase, reason=reason, detail=detail
            )
        ]

    def wait(
        self, record: PlanRecord, reason: Reason, detail: str, now: float
    ) -> list[ControlAction]:
        """Let a plan wait that cannot go on yet; after a while its record is `stalled`.

        Its story has each reason once: ranks that come and go would fill it.
        """
        if self._waiting is None or self._waiting[0] != record.plan.plan_id:
            self._waiting = record.plan.plan_id, now
        stalled = PlanPhase.STALLED
        if now - self._waiting[1] < self.timing.wave.stall_after_s or record.reason is reason:
            return []
        unix = now + self.unix_offset_s
        change = self.records.change(
            record, "stalled", unix, phase=stalled, reason=reason, detail=detail
        )
        return [change, WaveHealth(record.plan.key(record.waves_committed), True, reason, detail)]
