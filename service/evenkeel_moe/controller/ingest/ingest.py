"""Turns the ranks' reports into windows of load, in memory and in the store."""

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace

import structlog

from evenkeel_moe.controller.ingest.group_memory import limit_steps, max_waiting_bytes
from evenkeel_moe.controller.ingest.waiting_reports import (
    IncompleteGroups,
    ReportAnswer,
    WaitingReport,
    WaitingReports,
)
from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import MAX_STEP, LoadReport, LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.ports.stores import Clock, WindowStore
from evenkeel_moe.telemetry.assembly import Intake, Quarantine, Rejection, StepAssembler
from evenkeel_moe.telemetry.load_check import LoadCheck
from evenkeel_moe.telemetry.step_kernels import NO_STEP
from evenkeel_moe.telemetry.step_times import StepTimes
from evenkeel_moe.telemetry.windows import StepRing
from evenkeel_moe.wire.link import ReportAck

_log = structlog.get_logger(__name__)
_STORE_SOURCE_EVERY_S = 10.0


@dataclass(eq=False, repr=False)
class Ingest:
    """All load reports of one deployment.

    Args:
        window_steps: complete steps kept per phase.
        max_pending: most incomplete steps held.
        stride: ranks were told to report only the steps with step % stride == 0.
        accepted: called with the number of rank steps taken.
        rejected: called with the reason and the number of rank steps that were not used.
        dropped: called with a rank and the number of steps that its recorder dropped.
        incomplete: bounds the waiting reports of all groups of which some ranks are missing.
        check: gets the steps that do not add up; those of the windows are added elsewhere.
    """

    deployment: DeploymentId
    window_store: WindowStore
    clock: Clock
    _: KW_ONLY
    window_steps: int
    max_pending: int
    stride: int
    accepted: Callable[[int], None]
    rejected: Callable[[Reason, int], None]
    dropped: Callable[[int, int], None]
    incomplete: InitVar[IncompleteGroups]
    check: LoadCheck
    generation: Generation | None = field(default=None, init=False)
    """The generation whose steps are assembled."""
    shape: ModelShape | None = field(default=None, init=False)
    """The shape of the steps that are kept, or that are being restored."""
    rings: dict[Phase, StepRing] = field(default_factory=dict, init=False)
    quarantine: Quarantine = field(default_factory=Quarantine, init=False)
    newest_step: int | None = field(default=None, init=False)
    newest_at: float | None = field(default=None, init=False)
    """Monotonic seconds at which the newest step was complete; None before the first step."""
    step_times: StepTimes = field(default_factory=StepTimes, init=False)
    _assembler: StepAssembler | None = field(default=None, init=False)
    _restored: Generation | None = field(default=None, init=False)
    _summed_to: dict[Phase, int] = field(default_factory=dict, init=False)
    """Newest step of each phase that was restored with source-side sums."""
    _settled: bool = field(default=False, init=False)
    """True while the group's placement is known; otherwise reports wait."""
    _stored: dict[Phase, int] = field(default_factory=dict, init=False)
    """Newest step of each phase that the store has, or that is being stored."""
    _forget_stored: bool = field(default=False, init=False)
    _source_stored_at: dict[Phase, float] = field(default_factory=dict, init=False)

    def __post_init__(self, incomplete: IncompleteGroups) -> None:
        self._waiting = WaitingReports(self._reject_waiting, incomplete)

    # --- generations and placements ---------------------------------------------------------------

    def begin_generation(
        self, generation: Generation, shape: ModelShape, *, carries: bool = False
    ) -> None:
        """Assemble the steps of another generation.

        Its step numbers start again at 0, so its windows start empty, unless they were restored.

        Args:
            generation: the one that begins.
            shape: of its group.
            carries: the group came from the present one. Its step numbers go on, and the loads of
                experts stay, if it serves as many layers and experts.
        """
        if generation == self.generation:
            return
        before = self.shape
        restored = (
            generation == self._restored and before is not None and shape.sizes == before.sizes
        )
        carried: dict[Phase, list[LoadWindow]] = {}
        if carries and before is not None and _routes_alike(before, shape):
            carried = {
                phase: [part.at_width(shape.num_ranks) for part in ring.parts()]
                for phase, ring in self.rings.items()
            }
        self.generation, self._restored, self.shape = generation, None, shape
        limits = limit_steps(shape, self.window_steps, self.max_pending)
        self._waiting.begin_complete(max_waiting_bytes(shape, limits))
        closed_to = NO_STEP if not carried or self.newest_step is None else self.newest_step
        self._assembler = StepAssembler(
            shape, max_pending=limits.pending_steps, closed_to=closed_to
        )
        self._assembler.sample(self.stride, 0)
        self._settled = False
        if restored:
            self._assembler.summed_to = self._summed_to
        else:
            self._forget_stored = True
            self._stored.clear()
            self.step_times = StepTimes()
            self.rings = {}
            self.check.clear()
            if not carried:
                self.newest_step = self.newest_at = None
        for phase in Phase:
            ring = self.rings.setdefault(phase, self._make_ring(shape))
            for part in carried.get(phase, ()):
                ring.append(part)

    def _make_ring(self, shape: ModelShape) -> StepRing:
        limits = limit_steps(shape, self.window_steps, self.max_pending)
        return StepRing(shape, limits.window_steps, keeps_sources=limits.keeps_sources)

    def leave_generation(self) -> None:
        """Forget the generation and its steps; another generation is begun or restored next."""
        self.generation = self._assembler = self.shape = None
        self._waiting.begin_incomplete()
        self.newest_step = self.newest_at = None
        self.step_times = StepTimes()
        self.rings = {}
        self.check.clear()
        self._stored.clear()

    def settle(self, epoch: Epoch, placement: Placement) -> None:
        """Learn the placement the group runs under, and take the reports that waited for it."""
        assert self._assembler is not None
        self._assembler.learn_epoch(epoch, placement)
        self._settled = True
        for report, answer in self._waiting.take_all():
            answer(self._take(report))

    def unsettle(self) -> None:
        """Let reports wait: the placement is in question."""
        self._settled = False

    def expect(self, epoch: Epoch, placement: Placement) -> None:
        """Learn a placement that some ranks may run under before they say so."""
        if self._assembler is not None:
            self._assembler.learn_epoch(epoch, placement)

    def sample(self, stride: int, from_step: int) -> None:
        """Expect, from a step on, only the steps with step % stride == 0 (R18)."""
        self.stride = stride
        if self._assembler is not None:
            self._assembler.sample(stride, from_step)

    def close(self) -> None:
        """Drop the reports that wait: the deployment ends here."""
        self._waiting.close()

    # --- reading ----------------------------------------------------------------------------------

    def windows(self, most: int) -> dict[Phase, LoadWindow]:
        """Return the newest steps of each phase in one piece; omit phases without a step."""
        found = {phase: ring.window(most) for phase, ring in self.rings.items()}
        return {phase: window for phase, window in found.items() if window is not None}

    def parts(self) -> dict[Phase, list[LoadWindow]]:
        """Return each window in its parts, oldest first; omit phases without a step."""
        return {phase: ring.parts() for phase, ring in self.rings.items() if len(ring)}

    def highest_step(self, rank: EpRank, generation: Generation) -> int | None:
        """Return the highest step taken from a rank in a generation; None before the first."""
        if self._assembler is None or generation != self.generation:
            return None
        return self._assembler.highest_step(rank)

    def clear_quarantine(self) -> None:
        """Reset the counts and samples of rejected reports."""
        self.quarantine = Quarantine()

    # --- reports ----------------------------------------------------------------------------------

    def take(self, report: LoadReport, answer: ReportAnswer) -> None:
        """Take one report, now or when the placement is known, and answer it."""
        if self._settled and self._assembler is not None:
            answer(self._take(report))
            return
        self._waiting.add(report, answer)

    def malformed(
        self, rank: EpRank, violation: PeerViolation, steps: tuple[int, ...]
    ) -> ReportAck:
        """Count a report that cannot be right; return an answer that lets the rank forget it."""
        self._reject(rank, Rejection(violation.reason, max(1, len(steps)), str(violation)))
        highest = max((step for step in steps if 0 <= step <= MAX_STEP), default=None)
        return ReportAck(highest, len(steps), violation.reason)

    def _take(self, report: LoadReport) -> ReportAck:
        if self._assembler is None or report.generation != self.generation:
            detail = (
                f"rank {report.rank} is of generation {report.generation}, not {self.generation}"
            )
            return self._reject_all(report, Reason.UNKNOWN_GENERATION, detail)
        intake = self._assembler.take(report)
        if not intake.repeated:  # A rank sends reports again that were not acknowledged.
            self._count_dropped(report)
        if intake.accepted_steps:
            self.accepted(intake.accepted_steps)
        self._enter(report.rank, intake)
        if not intake.rejected:
            return ReportAck(intake.highest_step)
        for rejection in intake.rejected:
            self._reject(report.rank, rejection)
        refused = sum(rejection.rank_steps for rejection in intake.rejected)
        return ReportAck(intake.highest_step, refused, intake.rejected[0].reason)

    def _reject_waiting(self, waiting: WaitingReport, detail: str) -> None:
        waiting.answer(self._reject_all(waiting.report, Reason.UNKNOWN_EPOCH, detail))

    def _reject_all(self, report: LoadReport, reason: Reason, detail: str) -> ReportAck:
        """Reject every step of a report."""
        self._count_dropped(report)
        self._reject(report.rank, Rejection(reason, len(report.steps), detail))
        return ReportAck(report.last_step, len(report.steps), reason)

    def _count_dropped(self, report: LoadReport) -> None:
        if report.dropped_steps:
            self.dropped(report.rank, report.dropped_steps)

    def _enter(self, rank: EpRank, intake: Intake) -> None:
        """Add completed steps and source-side sums to the windows."""
        for phase, steps in intake.complete:
            added = self.rings[phase].append(steps)
            if not len(added):
                continue
            newest = int(added.steps[-1])
            if self.newest_step is None or newest > self.newest_step:
                self.newest_step = newest
            self.newest_at = self.clock.monotonic()
            self.step_times.note(self.newest_at, self.newest_step)
        if intake.unsummed is not None and len(intake.unsummed):
            self.check.add(intake.unsummed)
        for phase, sums in (intake.source or {}).items():
            self.rings[phase].add_source(rank, sums)

    def _reject(self, rank: EpRank, rejection: Rejection) -> None:
        first = self.quarantine.rank_steps[rejection.reason] == 0
        self.quarantine.add(rank, rejection)
        self.rejected(rejection.reason, rejection.rank_steps)
        level = (
            _log.warning if first and rejection.reason is not Reason.DUPLICATE_STEP else _log.debug
        )
        level(
            "report_rejected",
            deployment=self.deployment,
            reason=rejection.reason,
            detail=rejection.detail,
        )

    # --- the copy in the store --------------------------------------------------------------------

    async def restore(self, generation: Generation, shape: ModelShape) -> int:
        """Load the stored windows of a generation, in case it is still running.

        Returns:
            The number of steps found.

        Raises:
            Unavailable: the store is out of reach.
        """
        found = 0
        # Fetch everything before a ring is replaced: if the store fails half way, nothing changes.
        most = limit_steps(shape, self.window_steps, self.max_pending).window_steps
        before, self.shape = self.shape, shape  # Counted as memory from here on.
        try:
            stored = {
                phase: await self.window_store.fetch(self.deployment, phase, shape, most)
                for phase in Phase
            }
        except BaseException:
            self.shape = before
            raise
        self._summed_to = {}
        for phase, window in stored.items():
            ring = self.rings[phase] = self._make_ring(shape)
            if window is None:
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

    async def store(self) -> None:
        """Append the new steps to the stored windows.

        Raises:
            Unavailable: the store is out of reach. The next call stores what the windows hold.
        """
        if self._forget_stored:
            await self.window_store.forget(self.deployment)
            self._forget_stored = False
        for phase, ring in list(self.rings.items()):
            if self.rings.get(phase) is not ring:
                return  # Another generation began: what is stored must be forgotten first.
            before = self._stored.get(phase, -1)
            parts = ring.parts(before)
            if not parts:
                continue
            self._stored[phase] = int(parts[-1].steps[-1])
            parts[-1] = self._with_source(phase, ring, parts[-1])
            try:
                await self.window_store.append(self.deployment, phase, *parts)
            except BaseException:  # Also after a cancellation the next call stores these steps.
                if self.rings.get(phase) is ring:
                    self._stored[phase] = before
                raise

    def _with_source(self, phase: Phase, ring: StepRing, steps: LoadWindow) -> LoadWindow:
        """Add the source-side sums to the steps now and then: they are large and change slowly."""
        now = self.clock.monotonic()
        if now - self._source_stored_at.get(phase, float("-inf")) < _STORE_SOURCE_EVERY_S:
            return steps
        source = ring.source()
        if source is None:
            return steps
        self._source_stored_at[phase] = now
        return replace(steps, source=source)


def _routes_alike(one: ModelShape, other: ModelShape) -> bool:
    """Return True if groups of both shapes can serve the same model."""
    names = "num_layers", "num_logical_experts", "top_k"
    return all(getattr(one, name) == getattr(other, name) for name in names)
