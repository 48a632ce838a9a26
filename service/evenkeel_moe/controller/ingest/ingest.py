"""Reports to windows: assembly, the window in memory, and its copy in the store."""

from collections import Counter, deque
from collections.abc import Callable

import structlog

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import MAX_STEP, LoadReport, LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.ports import Clock, WindowStore
from evenkeel_moe.telemetry.assembly import Intake, Quarantine, Rejection, StepAssembler
from evenkeel_moe.telemetry.windows import StepRing
from evenkeel_moe.wire.link import ReportAck

__all__ = ["Ingest"]

_log = structlog.get_logger(__name__)
_MAX_WAITING = 64
"""Reports of one rank held until its generation's placement is known."""
_SOURCE_EVERY_S = 10.0
_MOST_PENDING_BYTES = 1 << 30
"""Of incomplete steps; fewer are held where a shape is so large that `max_pending` of them would not fit."""
_MOST_WAITING_BYTES = 256 << 20
"""Of all reports that wait for a placement: after an outage every rank sends its whole ring before the last is back."""


class Ingest:
    """All telemetry of one deployment.

    Args:
        window_steps: complete steps kept per phase.
        max_pending: incomplete steps kept.
        stride: ranks were told to report only the steps with step % stride == 0.
        rejected: told (reason, rank steps) of everything that was not used.
        dropped: told (rank, steps) of what a recorder had to drop.
        accepted: told the rank steps taken.
    """

    def __init__(
        self,
        deployment: DeploymentId,
        store: WindowStore,
        clock: Clock,
        *,
        window_steps: int,
        max_pending: int,
        stride: int,
        accepted: Callable[[int], None],
        rejected: Callable[[Reason, int], None],
        dropped: Callable[[int, int], None],
    ) -> None:
        self.deployment = deployment
        self.generation: Generation | None = None
        """Whose steps are assembled."""
        self.rings: dict[Phase, StepRing] = {}
        self.quarantine = Quarantine()
        self.newest_step: int | None = None
        self.newest_at: float | None = None
        """Monotonic seconds at which the newest step was complete; None when none ever was."""
        self._store = store
        self._clock = clock
        self._window_steps = window_steps
        self._max_pending = max_pending
        self._stride, self._stride_from = stride, 0
        self._accepted = accepted
        self._rejected = rejected
        self._dropped = dropped
        self._assembler: StepAssembler | None = None
        self._restored: Generation | None = None
        self._summed_to: dict[Phase, int] = {}
        """Newest step of each phase that was taken back with source-side sums."""
        self._settled = False
        self._waiting: dict[EpRank, deque[tuple[LoadReport, Callable[[ReportAck], None]]]] = {}
        self._waiting_bytes: Counter[EpRank] = Counter()
        self._stored: dict[Phase, int] = {}
        """Newest step of each phase that the store has, or is being given."""
        self._forget_stored = False
        self._source_stored_at: dict[Phase, float] = {}

    # --- what the deployment says -----------------------------------------------------------------

    def begin_generation(self, generation: Generation, shape: ModelShape) -> None:
        """Assemble another generation's steps: its step numbers begin anew, so the windows do too."""
        if generation == self.generation:
            return
        restored = generation == self._restored
        self.generation, self._restored = generation, None
        most = _MOST_PENDING_BYTES // (
            8 * shape.num_layers * max(shape.num_slots, shape.num_logical_experts)
        )
        self._assembler = StepAssembler(shape, max_pending=max(1, min(self._max_pending, most)))
        self._stride_from = 0  # Step numbers begin anew.
        self._assembler.sample(self._stride, 0)
        self._settled = False
        if restored:
            self._assembler.summed_to = self._summed_to
        else:
            self._forget_stored = True
            self._stored.clear()
            self.newest_step = self.newest_at = None
            self.rings = {}
        for phase in Phase:
            self.rings.setdefault(phase, StepRing(shape, self._window_steps))

    def leave_generation(self) -> None:
        """Forget whose steps were assembled, and the steps: another generation is begun, or taken back, whatever came before."""
        self.generation = self._assembler = None
        self.newest_step = self.newest_at = None
        self.rings = {}
        self._stored.clear()

    async def restore(self, generation: Generation, shape: ModelShape) -> int:
        """Take back the stored windows of a generation, should it still be the one; the steps found.

        Raises:
            Unavailable: the store is out of reach.
        """
        found = 0
        # All before any ring is replaced: a store that fails half way leaves what is here.
        stored = {phase: await self._store.fetch(self.deployment, phase) for phase in Phase}
        self._summed_to = {}
        for phase, window in stored.items():
            ring = self.rings[phase] = StepRing(shape, self._window_steps)
            sizes = (shape.num_layers, shape.num_logical_experts)
            if (
                window is None
                or window.counts.shape[1:] != sizes
                or window.tokens.shape[1] != shape.num_ranks
            ):
                continue
            found += len(ring.append(window))
            newest = ring.newest_step
            if newest is None:
                continue
            self._stored[phase] = newest
            if window.source is not None:
                self._summed_to[phase] = newest
                for rank in range(shape.num_ranks):
                    ring.add_source(EpRank(rank), window.source[rank].astype("int64"))
            if self.newest_step is None or newest > self.newest_step:
                self.newest_step = newest
        self._restored, self._forget_stored = generation, False
        if self._assembler is not None and generation == self.generation:
            self._assembler.summed_to = self._summed_to
        return found

    def windows(self, most: int) -> dict[Phase, LoadWindow]:
        """The newest steps of each window in memory, in one piece; phases without a step are left out."""
        found = {phase: ring.window(most) for phase, ring in self.rings.items()}
        return {phase: window for phase, window in found.items() if window is not None}

    def parts(self) -> dict[Phase, list[LoadWindow]]:
        """The windows in memory in the parts they are held in, oldest first; phases without a step are left out."""
        return {phase: ring.parts() for phase, ring in self.rings.items() if len(ring)}

    def settle(self, epoch: Epoch, placement: Placement) -> None:
        """The map the group runs under; reports that waited for it are taken in."""
        assert self._assembler is not None
        self._assembler.learn_epoch(epoch, placement)
        self._settled = True
        waiting, self._waiting = self._waiting, {}
        self._waiting_bytes.clear()
        for reports in waiting.values():
            for report, answer in reports:
                answer(self._take(report))

    def sample(self, stride: int, from_step: int) -> None:
        """From a step on ranks were told to report only those with step % stride == 0 (R18)."""
        self._stride, self._stride_from = stride, from_step
        if self._assembler is not None:
            self._assembler.sample(stride, from_step)

    def expect(self, epoch: Epoch, placement: Placement) -> None:
        """The map a wave under way leads to: some rank may run under it before it says so."""
        if self._assembler is not None:
            self._assembler.learn_epoch(epoch, placement)

    def unsettle(self) -> None:
        """The map is in question: reports wait."""
        self._settled = False

    def highest_step(self, rank: EpRank, generation: Generation) -> int | None:
        """Highest step taken from a rank in a generation; None before the first."""
        if self._assembler is None or generation != self.generation:
            return None
        return self._assembler.highest_step(rank)

    def clear_quarantine(self) -> None:
        """Count what is rejected from zero."""
        self.quarantine = Quarantine()

    # --- what ranks say -----------------------------------------------------------------------------

    def take(self, report: LoadReport, answer: Callable[[ReportAck], None]) -> None:
        """Take one report in, at once or when the map is known; the answer says what became of it."""
        if self._assembler is None or report.generation != self.generation:
            if self._assembler is not None and self._settled:
                answer(self._of_another_generation(report))
            else:
                self._wait(report, answer)
        elif not self._settled:
            self._wait(report, answer)
        else:
            answer(self._take(report))

    def malformed(
        self, rank: EpRank, violation: PeerViolation, steps: tuple[int, ...]
    ) -> ReportAck:
        """Count a report that cannot be right; its answer lets the rank forget it."""
        self._reject(rank, Rejection(violation.reason, max(1, len(steps)), str(violation)))
        highest = max((step for step in steps if 0 <= step <= MAX_STEP), default=None)
        return ReportAck(highest, len(steps), violation.reason)

    def _wait(self, report: LoadReport, answer: Callable[[ReportAck], None]) -> None:
        queue = self._waiting.setdefault(report.rank, deque())
        queue.append((report, answer))
        self._waiting_bytes[report.rank] += report.counts.nbytes
        if len(queue) > _MAX_WAITING:
            self._give_up_oldest(report.rank)
        # The rank that has most gives way, so that one with large reports costs the others none of theirs.
        while (
            self._waiting_bytes.total() > _MOST_WAITING_BYTES
            and sum(map(len, self._waiting.values())) > 1
        ):
            self._give_up_oldest(max(self._waiting_bytes, key=self._waiting_bytes.__getitem__))

    def _give_up_oldest(self, rank: EpRank) -> None:
        queue = self._waiting[rank]
        detail = f"rank {rank}: no placement known for {len(queue)} reports of {self._waiting_bytes[rank]} bytes"
        report, answer = queue.popleft()
        self._waiting_bytes[rank] -= report.counts.nbytes
        self._count_dropped(report)
        self._reject(rank, Rejection(Reason.UNKNOWN_EPOCH, len(report.steps), detail))
        answer(ReportAck(report.last_step, len(report.steps), Reason.UNKNOWN_EPOCH))

    def _take(self, report: LoadReport) -> ReportAck:
        if self._assembler is None or report.generation != self.generation:
            return self._of_another_generation(report)
        intake = self._assembler.take(report)
        if not intake.repeated:  # A rank sends again what was not acknowledged.
            self._count_dropped(report)
        if intake.accepted_steps:
            self._accepted(intake.accepted_steps)
        self._enter(report.rank, intake)
        if not intake.rejected:
            return ReportAck(intake.highest_step)
        for rejection in intake.rejected:
            self._reject(report.rank, rejection)
        refused = sum(rejection.rank_steps for rejection in intake.rejected)
        return ReportAck(intake.highest_step, refused, intake.rejected[0].reason)

    def _of_another_generation(self, report: LoadReport) -> ReportAck:
        detail = f"rank {report.rank} is of generation {report.generation}, not {self.generation}"
        self._count_dropped(report)
        self._reject(report.rank, Rejection(Reason.UNKNOWN_GENERATION, len(report.steps), detail))
        return ReportAck(report.last_step, len(report.steps), Reason.UNKNOWN_GENERATION)

    def _count_dropped(self, report: LoadReport) -> None:
        if report.dropped_steps:
            self._dropped(report.rank, report.dropped_steps)

    def _enter(self, rank: EpRank, intake: Intake) -> None:
        for phase, steps in intake.complete:
            added = self.rings[phase].append(steps)
            if not len(added):
                continue
            newest = int(added.steps[-1])
            if self.newest_step is None or newest > self.newest_step:
                self.newest_step = newest
            self.newest_at = self._clock.monotonic()
        for phase, sums in (intake.source or {}).items():
            self.rings[phase].add_source(rank, sums)

    def _reject(self, rank: EpRank, rejection: Rejection) -> None:
        first = self.quarantine.rank_steps[rejection.reason] == 0
        self.quarantine.add(rank, rejection)
        self._rejected(rejection.reason, rejection.rank_steps)
        level = (
            _log.warning if first and rejection.reason is not Reason.DUPLICATE_STEP else _log.debug
        )
        level(
            "report_rejected",
            deployment=self.deployment,
            reason=rejection.reason,
            detail=rejection.detail,
        )

    # --- the copy in the store ----------------------------------------------------------------------

    async def store(self) -> None:
        """Append what is new to the stored windows.

        Raises:
            Unavailable: the store is out of reach; it is given later what the window still holds.
        """
        if self._forget_stored:
            await self._store.forget(self.deployment)
            self._forget_stored = False
        for phase, ring in list(self.rings.items()):
            if self.rings.get(phase) is not ring:
                return  # Another generation began meanwhile; what is stored must be forgotten first.
            before = self._stored.get(phase, -1)
            parts = ring.parts(before)
            if not parts:
                continue
            self._stored[phase] = int(parts[-1].steps[-1])
            parts[-1] = self._with_source(phase, parts[-1])
            try:
                await self._store.append(self.deployment, phase, *parts)
            except BaseException:  # Also when it was cancelled: who stores next gives them again.
                if self.rings.get(phase) is ring:
                    self._stored[phase] = before
                raise

    def _with_source(self, phase: Phase, steps: LoadWindow) -> LoadWindow:
        """The steps with the ring's source-side sums now and then: they are large and change slowly."""
        now = self._clock.monotonic()
        if now - self._source_stored_at.get(phase, float("-inf")) < _SOURCE_EVERY_S:
            return steps
        ring = self.rings.get(phase)
        source = ring.source() if ring is not None else None
        if source is None:
            return steps
        self._source_stored_at[phase] = now
        return LoadWindow(
            steps.counts, steps.steps, steps.epochs, steps.tokens, steps.compute_s, source
        )
