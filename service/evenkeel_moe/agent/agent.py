"""The agent: what an engine runs inside each rank. It records, copies, votes and swaps.

An engine makes one per rank, calls `record` and `step_boundary` once per forward pass, dummy passes
included, and `close` at the end::

    agent = Agent(config, placement, epoch, weights, maps, connect=..., link=...)
    ...
    agent.record(step, counts, epoch=agent.epoch, tokens=n, phase=Phase.DECODE)
    agent.step_boundary()          # raises GateFailed: leave the group, restart the process

Three threads meet here: the engine's, the link's (an event loop) and the transfer thread. One lock
guards the participant and the gate; actions are carried out under it, and none of them waits.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.agent.build import Connect, free_bytes, make_participant, make_transport
from evenkeel_moe.agent.checksums import agree_on_checksums, agree_on_start, checksums_digest
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.network_thread import NetworkThread
from evenkeel_moe.agent.ports import (
    ExpertWeights,
    GateFailed,
    MapInstaller,
    RankLink,
    WeightTransport,
)
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import (
    CancelStaging,
    ControllerMessage,
    FromController,
    Hello,
    LeaveGroup,
    MigrationDisabled,
    ParticipantAction,
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
from evenkeel_moe.protocol.rank.gate import Gate, GateAction, PollFailed, PollResolved
from evenkeel_moe.wire.link import (
    CostCurve,
    FlowControl,
    Heartbeat,
    NotLeader,
    Registration,
    ReportAck,
    ToRankLink,
)

if TYPE_CHECKING:
    from evenkeel_moe.adapters.torch.groups import Work

__all__ = ["Agent", "SwapRecord"]

_log = structlog.get_logger(__name__)
_PROGRESS_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """One swap as it happened here."""

    wave: WaveKey
    epoch: int
    """The new one."""
    step: int
    """Last step recorded before it; -1 before the first."""
    layers: tuple[int, ...]
    seconds: float
    """How long the step was held up."""
    received_bytes: int


class Agent:
    """One deployment's agent on one rank. The constructor is collective over the EP group.

    Args:
        config: this rank.
        placement: the map the group starts on, the same on every rank, with its weights loaded.
        epoch: its number.
        weights: the engine's slots.
        maps: the engine's routing tables.
        connect: makes communicators apart from the engine's own.
        device: where the weights lie.
        link: the stream to the controller; None serves without one.
        on_swap: told of each swap, on the transfer thread, before the controller is: the place to
            save the placement, so that a restarted group finds what it acknowledged.
        on_progress: (wave, bytes staged, bytes to stage) while a wave is staged, on the transfer thread.

    Raises:
        Unavailable: the other ranks did not come.
        PeerViolation: the ranks disagree on generation, placement, epoch or weights version.
    """

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
    ) -> None:
        self._config = config
        self._device = device
        self._weights = weights
        self._on_swap = on_swap
        self._on_progress = on_progress
        self._progress_at = 0.0
        self._left: LeaveGroup | None = None
        self._trouble = ""
        self._free_bytes: int | None = None
        """As last read."""
        self._curve: CostCurve | None = None
        self._lock = threading.Lock()
        self._permit = threading.Event()
        self._poll: tuple[torch.Tensor, Work] | None = None

        self._gate_group = connect("gate", torch.device("cpu"))
        agree_on_start(self._gate_group, config, placement, epoch)
        checksums = agree_on_checksums(self._gate_group, config.identity.rank, placement, weights)
        self._participant = make_participant(config, placement, epoch, checksums)
        self._gate = Gate(
            [self._participant], poll_every=config.poll_every, resolve_after=config.resolve_after
        )
        agreement = torch.from_numpy(self._gate.agreement())
        self._gate_group.start_all_reduce_min(agreement).wait()
        self._gate.settle(agreement.numpy())
        transport = self._make_transport(placement, connect)
        transport.rebuild(0)
        self._worker = StagingWorker(config.identity.rank, transport, weights, maps, self)
        self._worker.start()

        shape = config.shape
        width = (
            shape.slots_per_rank
            if config.side is CountingSide.DESTINATION
            else shape.num_logical_experts
        )
        self._recorder = Recorder(config.ring_steps, shape.num_layers, width)
        self._network: NetworkThread | None = None
        if link is not None:
            self._network = NetworkThread(link, self._recorder, config.identity, config.side)
            self._network.start(self)

    # --- the engine's thread ------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the map in use."""
        return self._participant.epoch

    @property
    def placement(self) -> Placement:
        """The map in use."""
        return self._participant.placement

    @property
    def observe_only(self) -> bool:
        """Whether this rank refuses every wave."""
        return self._participant.observe_only

    @property
    def trouble(self) -> str:
        """Why this rank takes no wave any more, in words; empty while all is well."""
        return self._trouble

    @property
    def dropped_steps(self) -> int:
        """Recorded steps lost because no controller took them in time."""
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
        """Note what one step did; never waits. See StepMeta.

        Args:
            counts: (L, slots_per_rank) or (L, E) [tokens], as the side asks. Kept, not copied: hand in an array that is
                not written again. It is made read-only once a report takes it, so that numpy refuses who does.
        """
        self._recorder.record(step, counts, epoch, tokens, phase, dummy, compute_s)

    def step_boundary(self) -> None:
        """Between two forward passes: poll the gate when it is time, and swap when all ranks agreed.

        Raises:
            GateFailed: leave the EP group at once; nothing this rank knows of the group holds any more.
        """
        if self._gate.advance():
            try:
                self._at_gate()
            except (
                Exception
            ) as error:  # inside the gate an error means unknown, never "not agreed" (R8)
                _log.exception("gate_failed")
                self._left = LeaveGroup(Reason.GATE_FAILED, repr(error)[:300])
        if self._left is not None:
            raise GateFailed(self._left.detail, self._left.reason)

    def request_reload(self) -> threading.Event:
        """Ask to load other weights; the event is set, at some later boundary, when the engine may (R4)."""
        self._permit.clear()
        self.feed(ReloadRequested())
        return self._permit

    def finish_reload(self, weights_version: int) -> None:
        """The other weights are in every slot; collective, between the same two boundaries on every rank.

        With the version of before, the reload was given up.
        """
        checksums = agree_on_checksums(
            self._gate_group, self._config.identity.rank, self.placement, self._weights
        )
        if checksums is None:
            self.disable_migration(
                f"weights {weights_version} were loaded with replicas that differ, or not for every expert"
            )
        self.feed(WeightsReloaded(weights_version, checksums or ()))

    def tell_curve(self, curve: CostCurve) -> None:
        """Tell the controller how long a layer takes here by its tokens, now and on every new stream."""
        self._curve = curve
        if self._network is not None:
            self._network.send(curve, None)

    def disable_migration(self, why: str) -> None:
        """Refuse every further wave; telemetry goes on. Said once, and with every heartbeat."""
        if self._trouble:
            return
        self._trouble = why
        # Called with and without the lock: this event sets a flag and moves nothing.
        self._participant.handle(MigrationDisabled(), time.monotonic())
        _log.error("placement_off", deployment=self._config.identity.deployment, detail=why)

    def close(self) -> None:
        """End the threads and the transfers. The gate's communicator goes with the process."""
        if self._network is not None:
            self._network.close()
        self._worker.close()

    def _make_transport(self, placement: Placement, connect: Connect) -> WeightTransport:
        return make_transport(self._config, placement, self._weights, connect, self._device)

    def _at_gate(self) -> None:
        gate = self._gate
        if gate.resolve_due:
            event = self._wait_poll()
            with self._lock:
                for item in gate.handle(event, time.monotonic()):
                    self._carry_out_gate(item)
        if gate.poll_due:
            with self._lock:
                vector = torch.from_numpy(gate.begin_poll(time.monotonic()))
            try:
                self._poll = vector, self._gate_group.start_all_reduce_min(vector)
            except RuntimeError as error:
                self._leave_by(gate.on_failure(f"the poll could not begin: {error}"))
        for fault in gate.faults:
            _log.error("gate_fault", detail=fault)
            self.disable_migration(f"the agent failed at the gate: {fault}")
        gate.faults.clear()

    def _wait_poll(self) -> PollResolved | PollFailed:
        assert self._poll is not None
        vector, work = self._poll
        self._poll = None
        try:
            work.wait(timedelta(seconds=self._config.gate_timeout_s))
        except RuntimeError as error:
            return PollFailed(str(error)[:300])
        return PollResolved(vector.numpy())

    def _leave_by(self, actions: Sequence[GateAction]) -> None:
        with self._lock:
            for item in actions:
                self._carry_out_gate(item)

    def _carry_out_gate(self, item: GateAction) -> None:
        if isinstance(item.action, Swap):
            self._swap(item.action)
        else:
            self._carry_out(item.action)

    def _swap(self, action: Swap) -> None:
        """The commit point was passed: from here on the rank swaps or leaves (R8)."""
        began = time.perf_counter()
        layers = (
            self._participant.prepare.body.layers if self._participant.prepare is not None else ()
        )
        try:
            ready = self._worker.swap(action.wave)
        except Exception as error:  # what the slots hold is unknown now
            _log.exception("swap_failed", wave=str(action.wave))
            for answer in self._participant.handle(
                SwapFailed(action.wave, repr(error)), time.monotonic()
            ):
                self._carry_out(answer)
            return
        seconds = time.perf_counter() - began
        answers = self._participant.handle(
            SwapFinished(action.wave, ready.digest, seconds), time.monotonic()
        )
        record = SwapRecord(
            action.wave, self.epoch, self._recorder.last_step, layers, seconds, ready.received_bytes
        )
        placement = self._participant.placement
        self._worker.later(lambda: self._after_swap(record, placement, answers))

    def _after_swap(
        self, record: SwapRecord, placement: Placement, answers: Sequence[ParticipantAction]
    ) -> None:
        """What is told to the controller was saved before."""
        if self._on_swap is not None:
            try:
                self._on_swap(record, placement)
            except Exception:  # the rank is at the new epoch all the same, and must say so
                _log.exception("on_swap_failed", epoch=record.epoch)
        with self._lock:
            for answer in answers:
                self._carry_out(answer)

    # --- actions, under the lock -----------------------------------------------------------------

    def feed(self, event: object) -> None:
        """Hand an event to the participant, from any thread; never raises (R9)."""
        with self._lock:
            try:
                for action in self._participant.handle(event, time.monotonic()):
                    self._carry_out(action)
            except Exception as error:  # a bug of ours: refuse waves, keep polling
                _log.exception("participant_failed", story=self._participant.story)
                self.disable_migration(
                    f"the agent failed at {type(event).__name__}: {error!r:.200}"
                )

    def _carry_out(self, action: ParticipantAction) -> None:
        match action:
            case SendToController(message=message, stream=stream):
                if self._network is not None:
                    self._network.send(message, stream)
            case StartStaging(prepare=prepare):
                new = self._participant.next_placement
                assert new is not None
                self._worker.stage(prepare, self._participant.placement, new)
            case CancelStaging(wave=wave):
                self._worker.cancel(wave)
            case RebuildTransport(serial=serial):
                self._worker.rebuild(serial)
            case PermitReload():
                self._permit.set()
            case LeaveGroup():
                self._left = action
            case Swap():
                raise AssertionError("only the gate orders a swap")

    # --- StagingEvents, on the transfer thread ----------------------------------------------------

    def request_rebuild(self, serial: int) -> None:
        """The transfer communicator `serial` broke: ask the group for the next at the coming polls (R10)."""
        with self._lock:
            self._gate.request_rebuild(serial)

    def progress(self, wave: WaveKey, done: int, total: int) -> None:
        """Tell the controller how far staging is, a few times a second."""
        now = time.monotonic()
        if done < total and now - self._progress_at < _PROGRESS_INTERVAL_S:
            return
        self._progress_at = now
        if self._network is not None:
            self._network.send(StagingProgress(wave, done, total), None)
        if self._on_progress is not None:
            self._on_progress(wave, done, total)

    # --- LinkListener, on the link's thread ---------------------------------------------------------

    def hello(self) -> Hello:
        """Everything the controller must know of this rank, as of now."""
        with self._lock:
            participant = self._participant
            return Hello(
                identity=participant.identity,
                shape=self._config.shape,
                node=self._config.node,
                gpu_uuid=self._config.gpu_uuid,
                epoch=participant.epoch,
                placement_digest=participant.placement.digest,
                weights_version=participant.weights_version,
                checksums_digest=checksums_digest(participant.checksums),
                free_bytes=self._room(),
                staging_bytes=self._config.staging_bytes,
                gate_digest=self._gate.digest,
                capabilities=frozenset() if participant.observe_only else frozenset({"migrate"}),
                highest_term=participant.leader.term if participant.leader is not None else 0,
            )

    def heartbeat(self) -> Heartbeat:
        """Alive, how many steps were run, and what is wrong."""
        return Heartbeat(self._gate.calls, self._room(), self._config.staging_bytes, self._trouble)

    def _room(self) -> int:
        """Free bytes of the device; where it cannot say, as it last said: without a heartbeat the rank would be taken for gone."""
        try:
            self._free_bytes = free_bytes(self._device)
        except Exception as error:
            if self._free_bytes is None:
                raise
            _log.warning(
                "free_bytes_unknown", detail=f"{error!r:.200}", last_known=self._free_bytes
            )
        return self._free_bytes

    def received(self, stream: int, message: ToRankLink) -> None:
        """A message of the controller: telemetry's own words stop here, the rest goes to the participant."""
        assert self._network is not None
        match message:
            case Registration(flow=flow, highest_step=highest_step):
                self._network.reporter.registered(flow, highest_step)
                if self._curve is not None:
                    self._network.send(self._curve, stream)
                if message.reason is not None:
                    _log.warning(
                        "registered",
                        outcome=message.outcome,
                        reason=message.reason,
                        detail=message.detail,
                    )
            case ReportAck(highest_step=highest_step):
                self._network.reporter.acknowledged(highest_step)
            case FlowControl():
                self._network.reporter.paced(message)
            case NotLeader():
                return
            case _:
                controller_message: ControllerMessage = message
                self.feed(FromController(stream, controller_message))

    def lost(self, stream: int) -> None:
        """The stream ended; steps wait in the ring."""
        assert self._network is not None
        self._network.reporter.lost()
