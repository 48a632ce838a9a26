"""The agent: the part of Evenkeel that runs inside each rank. It records, copies, votes and swaps.

An engine creates one agent per rank. It calls `record` and `step_boundary` once per forward pass,
including dummy passes, and `close` at the end::

    agent = Agent(config, placement, epoch, weights, maps, connect=..., link=...)
    ...
    agent.record(step, counts, epoch=agent.epoch, tokens=n, phase=Phase.DECODE)
    agent.step_boundary()          # raises GateFailed: leave the group, restart the process

An engine that copies experts by itself passes `EngineMoves` in place of its routing tables.

Three threads use an agent: the engine's thread, the network thread (an event loop) and the transfer
thread. One lock guards the participant and the gate. No action that runs under it blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.agent.build import SYSTEM_PARTS, AgentParts, Connect, own_name
from evenkeel_moe.agent.canary_runs import CanaryRuns, Probe
from evenkeel_moe.agent.checksums import agree_on_start, checksums_digest
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.gate_polls import GatePolls
from evenkeel_moe.agent.memory import FreeMemory
from evenkeel_moe.agent.moves import ExpertMoves, OwnMoves, SlotsWritten, SwapRecord
from evenkeel_moe.agent.network_thread import NetworkThread
from evenkeel_moe.agent.ports import (
    ClockReader,
    ExpertWeights,
    GateFailed,
    MapInstaller,
    RankLink,
    WeightTransport,
)
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.agent.staging_progress import StagingReports
from evenkeel_moe.agent.together import together
from evenkeel_moe.agent.trouble import FaultEnd, Trouble
from evenkeel_moe.errors import EvenkeelError, InvalidInput, PeerViolation, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.ports.threads import Event
from evenkeel_moe.protocol.messages import (
    MIGRATE,
    CancelStaging,
    EngineRebalanced,
    FromController,
    Hello,
    LeaveGroup,
    ParticipantAction,
    ParticipantState,
    PermitReload,
    RebuildTransport,
    ReloadRequested,
    SendToController,
    StagingProgress,
    StartStaging,
    Swap,
    SwapFailed,
    SwapFinished,
    WeightsReloaded,
)
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.wire.link import Heartbeat, RankFact, ToRankLink

_log = structlog.get_logger(__name__)


class Agent:
    """The agent of one deployment on one rank. The constructor is collective over the EP group.

    Args:
        config: this rank's configuration.
        placement: the map the group starts with, the same on every rank; its weights are loaded.
        epoch: epoch of that map.
        weights: the engine's expert slots.
        maps: the engine's routing tables; or `EngineMoves`, if the engine copies experts and
            switches its tables by itself.
        connect: creates communicators that the engine does not use.
        device: device that holds the weights.
        link: stream to the controller; None runs without a controller.
        on_swap: called after each swap, on the transfer thread, before the controller is told. Save
            the placement here, so that a restarted group finds the map it acknowledged. If it
            raises, the rank takes no waves until the group restarts.
        on_progress: called with (wave, bytes staged, bytes to stage), on the transfer thread.
        slots_written: called after each swap, inside `step_boundary`; see `SlotsWritten`. Not
            accepted with `EngineMoves`.
        probe: called for every expert at the start and after a reload, and for moved experts inside
            `step_boundary`; see `Probe`. All ranks pass one, or none does.

    Raises:
        Unavailable: the other ranks did not come, or one of them was refused.
        PeerViolation: the ranks disagree on generation, placement, epoch, weights version, shape,
            or the tensors of an expert.
        InvalidInput: rank, group, placement, epoch and shape do not fit each other; the tensors of
            an expert are copies, or not as large as the shape says; or `slots_written` beside
            `EngineMoves`.
    """

    parts: AgentParts = SYSTEM_PARTS

    def __init__(
        self,
        config: AgentConfig,
        placement: Placement,
        epoch: int,
        weights: ExpertWeights,
        maps: MapInstaller,
        *,
        connect: Connect,
        device: torch.device,
        link: RankLink | None = None,
        on_swap: Callable[[SwapRecord, Placement], None] | None = None,
        on_progress: Callable[[WaveKey, int, int], None] | None = None,
        clock: ClockReader | None = None,
        slots_written: SlotsWritten | None = None,
        probe: Probe | None = None,
    ) -> None:
        parts = self.parts
        self._config = config
        self._on_swap = on_swap
        self._reports = StagingReports(self.now, self._tell_progress, on_progress)
        self._left: LeaveGroup | None = None
        self._without_gate = False
        self._memory = FreeMemory(device)
        self._lock = parts.threads.lock()
        self._permit = parts.threads.event()
        self._saving = parts.barrier()

        self._gate_group = connect(own_name("gate", config), torch.device("cpu"))
        own = OwnMoves(self._gate_group, slots_written)
        self._moves = maps if isinstance(maps, ExpertMoves) else own
        if self._moves is not own and slots_written is not None:
            raise InvalidInput("an engine that moves experts itself calls no hooks of a swap")
        self._moves.attach(self, config, weights, connect, device)
        self._canary = self._make_canary(probe, device)
        agree_on_start(self._gate_group, config, placement, epoch, self._canary is not None)
        checksums, unsound = self._register_start(placement)
        self._participant = self._make_participant(placement, epoch, checksums)
        self._trouble = Trouble(self._participant)
        if unsound:
            self._trouble.begin(unsound, FaultEnd.RELOAD)
        self._gate = together(self._gate_group, "make their gate", self._make_gate)
        self._polls = GatePolls(self._gate_group, config.gate_timeout_s)
        self._polls.settle(self._gate)
        transport = together(self._gate_group, "take their staging memory", self._make_transport)
        transport.rebuild(0)
        self._worker = parts.worker(
            config.identity.rank, transport, weights, maps, self, parts.threads
        )

        shape = config.shape.num_layers, config.counts_per_layer
        self._recorder = Recorder(config.ring_steps, *shape)
        self._network: NetworkThread | None = None
        if link is not None:
            self._network = parts.network(link, self._recorder, config.identity, config.side, clock)
            self._network.start(self)

    def _make_participant(
        self, placement: Placement, epoch: int, checksums: tuple[int, ...]
    ) -> Participant:
        config = self._config
        return self.parts.participant(
            config.identity,
            config.shape,
            placement,
            epoch=Epoch(epoch),
            weights_version=config.weights_version,
            checksums=checksums,
            staging_bytes=config.staging_bytes,
            drop_after_s=config.drop_after_s,
            observe_only=config.observe_only,
        )

    def _make_transport(self) -> WeightTransport:
        return self._moves.make_transport(self.parts, self._participant, self._trouble)

    def _make_gate(self) -> Gate:
        config = self._config
        return self.parts.gate(
            self._participant, poll_every=config.poll_every, resolve_after=config.resolve_after
        )

    def _make_canary(self, probe: Probe | None, device: torch.device) -> CanaryRuns | None:
        """Return the canary of this rank; None if there is nothing to ask."""
        config = self._config
        if probe is None or config.canary_step_s == 0:
            return None
        return CanaryRuns(
            probe,
            config.identity.rank,
            device,
            config.canary_step_s,
            now=self.now,
            later=self.later,
            tell=self.tell,
            alarm=lambda why: self.disable_migration(why, FaultEnd.RELOAD),
        )

    # --- the engine's thread ----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the map in use."""
        return self._participant.epoch

    @property
    def placement(self) -> Placement:
        """The map in use."""
        return self._moves.moved_to or self._participant.placement

    @property
    def observe_only(self) -> bool:
        """True if this rank refuses every wave."""
        return not self._participant.takes_waves

    @property
    def trouble(self) -> str:
        """The fault that disabled migration on this rank; empty without one."""
        return self._trouble.why

    @property
    def dropped_steps(self) -> int:
        """The number of recorded steps lost because no controller took them in time."""
        return self._recorder.dropped_total

    def record(
        self,
        step: int,
        counts: NDArray[np.int64],
        *,
        epoch: int,
        tokens: int,
        phase: Phase,
        dummy: bool = False,
        compute_s: float | None = None,
    ) -> None:
        """Record the load of one step; never blocks. See StepMeta.

        Args:
            counts: (L, slots_per_rank) or (L, E) [tokens] by `config.side`; do not reuse the array.
            compute_s: seconds of this rank's routed experts, without shared experts; None in a step
                that was not measured. All ranks measure the same steps.
        """
        self._recorder.record(step, counts, epoch, tokens, phase, dummy, compute_s)

    def step_boundary(self, step: int | None = None) -> None:
        """Poll the gate when a poll is due, and swap when all ranks agreed; call between steps.

        All ranks pass the engine's number of the last step, or none does; see `Gate.advance`. While
        an engine moves experts by itself, no rank polls.

        Raises:
            GateFailed: leave the EP group at once; the state of the group is unknown to this rank.
                An engine that moves experts by itself leaves only if this rank was armed in a poll
                whose outcome is unknown (R8). Any other failure of the gate cannot have passed a
                wave: it disables migration, and the engine goes on.
        """
        if self._moves.is_moving() or self._without_gate:
            self._gate.rest()
            return
        if self._canary is not None:
            self._canary.ask(self.placement)
        self._through_gate(lambda: self._advance(step))

    def _advance(self, step: int | None) -> None:
        if self._gate.advance(step):
            self._at_gate()

    def _through_gate(self, use: Callable[[], None]) -> None:
        """Use the gate. `step_boundary` says what follows from a failure."""
        may_pass = not self._moves.outlives_gate or self._participant.must_wait_for_poll()
        try:
            use()
        except Exception as error:
            self._fail_at_gate(error)
        if may_pass:
            self._raise_if_left()
        elif self._left is not None:
            left, self._left = self._left, None
            self._without_gate = True
            self.disable_migration(f"the gate failed, and no wave was under way: {left.detail}")
            # The other ranks would wait for this one at their next poll. Not on this thread: an
            # abort waits for a poll in flight.
            self.later(self._polls.abort)

    def _fail_at_gate(self, error: Exception) -> None:
        """Leave: in the gate an error means unknown, not "not agreed" (R8)."""
        _log.error("gate_failed", exc_info=error)
        self._left = LeaveGroup(Reason.GATE_FAILED, repr(error)[:300])

    def _raise_if_left(self) -> None:
        if self._left is not None:
            raise GateFailed(self._left.detail, self._left.reason)

    def request_reload(self) -> Event:
        """Ask to load other weights; the event is set at the boundary that permits it (R4)."""
        self._permit.clear()
        self.feed(ReloadRequested())
        return self._permit

    def finish_reload(self, weights_version: int) -> None:
        """Register the weights that are now in every slot.

        Collective; every rank calls it between the same two boundaries. An unchanged version means
        that the reload was cancelled, so that a moved expert's fault stays; or repeated, if the
        weights of this version could not be registered before.
        """
        known = self._participant
        checksums: tuple[int, ...] = ()
        why = ""
        try:
            checksums = self._register(self.placement)
        except Exception as error:
            why = f"after loading weights {weights_version}: "
            why += str(error) if isinstance(error, EvenkeelError) else f"{error!r:.300}"
        if weights_version != known.weights_version or not known.checksums:
            self._trouble.end(FaultEnd.RELOAD)  # It was of the weights before.
        if why:
            self.disable_migration(why, FaultEnd.RELOAD)
        self.feed(WeightsReloaded(weights_version, checksums))

    def _register(self, placement: Placement) -> tuple[int, ...]:
        """Register the weights in all slots and return their checksums; collective."""
        checksums = self._moves.register(placement)
        if self._canary is not None:
            self._canary.register(self._moves.meeting, placement)
        return checksums

    def _register_start(self, placement: Placement) -> tuple[tuple[int, ...], str]:
        """Register as `_register`; return the checksums, or why no expert may be copied."""
        try:
            return self._register(placement), ""
        except PeerViolation as error:
            if error.reason is not Reason.CHECKSUM_MISMATCH:
                raise
            return (), str(error)

    def tell(self, fact: RankFact) -> None:
        """Tell the controller a fact, such as the KV cache, now and on new streams."""
        if self._network is not None:
            self._network.tell(fact)

    def disable_migration(self, why: str, until: FaultEnd = FaultEnd.RESTART) -> None:
        """Refuse every further wave, and send the cause with every heartbeat, until it ends."""
        self._trouble.begin(why, until)

    def abort_polls(self) -> None:
        """End the gate, after another rank has died: ranks that wait for this one's polls go on.

        The agent can then only be closed.
        """
        self._polls.abort()

    def close(self, *, planned: bool = True) -> bool:
        """Tell the controller if the end is planned, then end the threads and the transfers.

        Returns:
            True if the slots may go to an agent of another group: no transfer uses them any more.
        """
        if self._network is not None:
            self._network.close(planned=planned and self._left is None)
        # The gate's communicator belongs to the group and ends with it.
        return self._worker.close()

    def _at_gate(self) -> None:
        gate = self._gate
        if gate.resolve_due:
            self._use_poll()
        # A poll that began now would be used while the engine moves experts, and the gate rests.
        if gate.poll_due and self._participant.state is not ParticipantState.SWAPPING:
            with self._lock:
                vector = gate.begin_poll(self.now())
            try:
                self._polls.begin(vector)
            except RuntimeError as error:
                with self._lock:
                    self._carry_out_gate(gate.on_failure(f"the poll could not begin: {error}"))
        for fault in gate.faults:
            _log.error("gate_fault", detail=fault)
            self.disable_migration(f"the agent failed at the gate: {fault}")
        gate.faults.clear()

    def _use_poll(self) -> None:
        result = self._polls.wait()
        with self._lock:
            self._carry_out_gate(self._gate.handle(result, self.now()))

    def _carry_out_gate(self, actions: Sequence[ParticipantAction]) -> None:
        for action in actions:
            if isinstance(action, Swap):
                self._swap(action)
            else:
                self._carry_out(action)

    def _swap(self, action: Swap) -> None:
        """Swap the staged wave. The commit point has passed: this rank swaps or leaves (R8)."""
        layers = held.body.layers if (held := self._participant.prepare) is not None else ()
        began = self.now()
        try:
            ready = self._worker.swap(action.wave)
            new = self._participant.next_placement
            assert new is not None
            is_over = self._moves.carry_out(ready, new, layers)
        except Exception as error:  # the content of the slots is unknown now
            told = isinstance(error, EvenkeelError)  # its text says all
            detail = str(error) if told else repr(error)
            _log.error("swap_failed", wave=str(action.wave), detail=detail, exc_info=not told)
            self._carry_out_answers(SwapFailed(action.wave, detail))
            return
        if is_over:
            self._finish_swap(ready, layers, self.now() - began)

    def _finish_swap(self, ready: ReadyWave, layers: tuple[int, ...], seconds: float) -> None:
        """Move to the new epoch, and queue what follows a swap on the transfer thread."""
        before = self.placement
        self._saving.begin(self._participant.epoch, before.digest)
        self._carry_out_answers(SwapFinished(ready.wave, ready.digest, seconds))
        if self._canary is not None:
            self._canary.moved(ready.wave, before, self.placement)
        step, received = self._recorder.last_step, ready.received_bytes
        record = SwapRecord(ready.wave, self.epoch, step, layers, seconds, received)
        self.later(partial(self._after_swap, record, self.placement))

    def _after_swap(self, record: SwapRecord, placement: Placement) -> None:
        """Let the engine save the placement before the controller is told of the swap."""
        if self._on_swap is not None:
            try:
                self._on_swap(record, placement)
            except Exception as error:
                # The rank is at the new epoch all the same, and must report it.
                _log.exception("on_swap_failed", epoch=record.epoch)
                self.disable_migration(
                    f"the placement of epoch {record.epoch} was not saved, so the group would"
                    f" restart from an earlier one: {error!r:.200}"
                )
        with self._lock:
            for answer in self._saving.end():
                self._carry_out(answer)

    # --- actions, while the lock is held ----------------------------------------------------------

    def feed(self, event: object) -> None:
        """Pass an event to the participant, from any thread; never raises (R9)."""
        with self._lock:
            try:
                self._participant.step = self._gate.calls
                self._carry_out_answers(event)
            except Exception as error:  # our own bug: refuse waves, keep polling
                _log.exception("participant_failed", story=self._participant.story)
                kind = type(event).__name__
                self.disable_migration(f"the agent failed at {kind}: {error!r:.200}")

    def _carry_out_answers(self, event: object) -> None:
        for answer in self._participant.handle(event, self.now()):
            self._carry_out(answer)

    def _carry_out(self, action: ParticipantAction) -> None:
        match action:
            case SendToController():
                if self._network is not None:
                    for answer in self._saving.outgoing(action):
                        self._network.send(answer.message, answer.stream)
            case StartStaging(prepare=prepare):
                new = self._participant.next_placement
                assert new is not None
                self._worker.stage(prepare, self._participant.placement, new)
            case CancelStaging(wave=wave):
                self._worker.cancel(wave)
            case RebuildTransport(serial=serial):
                self._worker.rebuild(serial)
            case PermitReload():
                if self._canary is not None:
                    self._canary.pause()
                self._permit.set()
            case LeaveGroup():
                self._left = action
            case Swap():
                raise AssertionError("only the gate orders a swap")

    # --- for `EngineMoves`, of an engine that moves experts by itself -----------------------------

    @property
    def steps(self) -> int:
        """The step boundaries so far."""
        return self._gate.calls

    def now(self) -> float:
        """Return monotonic seconds."""
        return self.parts.threads.monotonic()

    def later(self, job: Callable[[], None]) -> None:
        """Run something slow on the transfer thread, after the jobs in its queue."""
        self._worker.later(job)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the transfer thread has run its jobs; False if they take longer."""
        return self._worker.wait_until_idle(timeout_s)

    def resolve_poll(self) -> None:
        """Use the result of the poll in flight now, on every rank at this boundary.

        Raises:
            GateFailed: see `step_boundary`.
        """
        if not self._without_gate and self._gate.polling:
            self._through_gate(self._use_poll)

    def move_ended(self, ready: ReadyWave, layers: tuple[int, ...], seconds: float) -> None:
        """Go to the epoch of a wave that the engine has carried out."""
        with self._lock:
            self._finish_swap(ready, layers, seconds)

    def follow_engine(self, placement: Placement, state: ParticipantState) -> bool:
        """Go to a map that the engine chose, if the participant is in a state; return if it is."""
        with self._lock:
            participant = self._participant
            if participant.state is not state:
                return False
            if state is not ParticipantState.IDLE or placement != participant.placement:
                before = participant.placement
                self._carry_out_answers(EngineRebalanced(placement))
                if self._canary is not None:
                    self._canary.moved(None, before, placement)
            return True

    # --- StagingEvents, on the transfer thread ----------------------------------------------------

    def request_rebuild(self, serial: int) -> None:
        """Ask the group, at its next polls, to replace the broken transfer communicator (R10)."""
        with self._lock:
            self._gate.request_rebuild(serial)

    def progress(self, wave: WaveKey, done: int, total: int) -> None:
        """Report the bytes staged so far to the controller and the engine."""
        self._reports.report(wave, done, total)

    def _tell_progress(self, wave: WaveKey, done: int, total: int) -> None:
        if self._network is not None:
            self._network.send(StagingProgress(wave, done, total), None)

    # --- LinkListener, on the network thread ------------------------------------------------------

    def hello(self) -> Hello:
        """Return the first message of a stream."""
        with self._lock:
            config, known = self._config, self._participant
            epoch, digest = self._saving.told(known.epoch, known.placement.digest)
            return Hello(
                identity=known.identity,
                shape=config.shape,
                node=config.node,
                gpu_uuid=config.gpu_uuid,
                epoch=epoch,
                placement_digest=digest,
                weights_version=known.weights_version,
                checksums_digest=checksums_digest(known.checksums),
                free_bytes=self._memory.read(),
                staging_bytes=config.staging_bytes,
                gate_digest=self._gate.digest,
                # Heartbeats tell a fault that will end.
                capabilities=frozenset({MIGRATE}) if self._trouble.moves else frozenset(),
                highest_term=known.leader.term if known.leader is not None else 0,
                device=config.device_name,
                weight_format=config.weight_format,
                dispatch=config.dispatch,
                slots_stay_filled=config.slots_stay_filled,
                lineage=config.lineage,
            )

    def heartbeat(self) -> Heartbeat:
        """Return the steps run, the free memory and the trouble of this rank."""
        memory, staging = self._memory.read(), self._config.staging_bytes
        return Heartbeat(self._gate.calls, memory, staging, self.trouble)

    def received(self, stream: int, message: ToRankLink) -> None:
        """Pass messages about reports to the reporter, and all others to the participant."""
        assert self._network is not None
        if (other := self._network.take_telemetry(stream, message)) is not None:
            self.feed(FromController(stream, other))

    def lost(self, stream: int) -> None:
        """Stop reporting until the next registration; steps wait in the ring."""
        assert self._network is not None
        self._network.reporter.lost()
