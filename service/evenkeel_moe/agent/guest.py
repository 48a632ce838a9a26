"""The agent of an engine that copies its experts itself: a guest beside the engine's own balancer.

The protocol is the same up to the commit point: Prepare is checked and voted on, Commit arms, the gate agrees on
the step. What then follows is the engine's: the agent hands it the agreed map, the engine copies and switches layer
by layer with machinery of its own, and tells the agent of each layer. So there is one writer of the map, and
every layer is whole at every step, but the wave as a whole takes many steps; until its last layer the rank stays
at the old epoch, and no gate is polled. An engine that stops half way is said to have stopped: `trouble`.

The engine outlives its guest: nothing here ends the process, but for one case (R8): this rank was armed for a wave and
cannot know whether the others began it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.transport import Progress, StageOutcome, checksum
from evenkeel_moe.agent.agent import Agent, SwapRecord
from evenkeel_moe.agent.build import Connect
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.ports import ExpertWeights, GateFailed, RankLink, WeightTransport
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import (
    EngineRebalanced,
    MigrationDisabled,
    ParticipantState,
    Prepare,
    Swap,
    SwapFinished,
)

__all__ = ["GuestAgent", "HostEngine", "Move"]

_log = structlog.get_logger(__name__)


class HostEngine(Protocol):
    """What a guest asks of its engine."""

    def refusal(self, prepare: Prepare, new: Placement) -> tuple[Reason, str] | None:
        """Why the engine cannot go to `new`, before anything is agreed; on the agent's transfer thread."""
        ...

    def begin(self, move: "Move") -> None:
        """Every rank agreed on this step: copy and switch; on the engine's thread, must not fail."""
        ...

    def fault(self) -> str | None:
        """What is known to be broken in the engine's own balancer; asked at each step of a move."""
        ...


@dataclass(slots=True)
class Move:
    """A wave in the engine's hands."""

    wave: WaveKey
    placement: Placement
    """The map when it is done."""
    layers: tuple[int, ...]
    """Layers that change."""
    ready: ReadyWave
    began_s: float
    done: set[int] = field(default_factory=set)
    """Layers switched so far."""
    longest_s: float = 0.0
    """Longest that one layer's switch held up a step."""
    quiet_since_s: float = 0.0
    quiet_steps: int = 0
    """Steps since the last layer was switched."""


class GuestAgent(Agent):
    """One deployment's agent on one rank of an engine that copies weights itself. Collective to make.

    Args:
        engine: the engine's balancer.
        stall_after_s: seconds, and stall_after_steps: steps, both of which must pass without a layer being
            switched before a move is said to have stopped. Too short calls a slow copy a stop.
        The others are those of `Agent`.
    """

    def __init__(
        self,
        config: AgentConfig,
        placement: Placement,
        epoch: int,
        weights: ExpertWeights,
        engine: HostEngine,
        *,
        connect: Connect,
        device: torch.device,
        link: RankLink | None = None,
        on_swap: Callable[[SwapRecord, Placement], None] | None = None,
        stall_after_s: float = 30.0,
        stall_after_steps: int = 64,
    ) -> None:
        self._engine = engine
        self._move: Move | None = None
        self._off = False
        self._stall_after_s = stall_after_s
        self._stall_after_steps = stall_after_steps
        super().__init__(
            config,
            placement,
            epoch,
            weights,
            _HandOver(),
            connect=connect,
            device=device,
            link=link,
            on_swap=on_swap,
        )

    def _make_transport(self, placement: Placement, connect: Connect) -> WeightTransport:
        return _NoCopies(self._engine, lambda: self._participant.next_placement)

    # --- what the engine tells ----------------------------------------------------------------------

    @property
    def move(self) -> Move | None:
        """The wave in the engine's hands."""
        return self._move

    def step_boundary(self) -> None:
        """Between two forward passes; while the engine moves layers the gate rests, alike on all ranks.

        Raises:
            GateFailed: this rank was armed in a poll whose outcome is unknown (R8). Any other failure of
                the gate cannot have passed a wave: it costs the placement, not the engine.
        """
        move = self._move
        if move is not None:
            self._gate.rest()
            self._watch(move)
            return
        if self._off:
            self._gate.rest()
            return
        armed = self._participant.must_wait_for_poll()
        try:
            super().step_boundary()
        except GateFailed as error:
            if armed:
                raise
            self._off = True
            self.disable_migration(f"the gate failed, and no wave was under way: {error}")

    def layer_switched(self, layer: int, seconds: float = 0.0) -> None:
        """The engine switched one layer of the move; `seconds`: how long the step was held up."""
        move = self._move
        if move is None:
            return
        move.quiet_since_s, move.quiet_steps = time.monotonic(), 0
        move.longest_s = max(move.longest_s, seconds)
        move.done.add(layer)
        total = len(move.layers)
        done = sum(one in move.done for one in move.layers)
        nbytes = self._config.shape.bytes_per_expert
        self._worker.later(lambda: self.progress(move.wave, done * nbytes, total * nbytes))

    def move_finished(self, phy2log: NDArray[np.int64]) -> None:
        """The engine says it is done; phy2log: (L, S) the map it now routes by.

        Anything but the agreed map is a stop: the rank stays with the wave and says so.
        """
        move = self._move
        if move is None:
            return
        wrong = np.argwhere(np.asarray(phy2log) != move.placement.phy2log)
        if len(wrong):
            layers = sorted({int(layer) for layer, _ in wrong})
            reason = self._engine.fault() or "the engine did not say why"
            self.disable_migration(
                f"the engine ended {move.wave.plan_id} with {len(wrong)} of {move.placement.phy2log.size} slots"
                f" not as planned, in layers {layers[:8]}: {reason}"
            )
            return
        with self._lock:
            self._move = None
            answers = self._participant.handle(
                SwapFinished(move.wave, move.ready.digest, move.longest_s), time.monotonic()
            )
        record = SwapRecord(
            move.wave, self.epoch, self._recorder.last_step, move.layers, move.longest_s, 0
        )
        placement = self._participant.placement
        self._worker.later(lambda: self._verify(placement, move.layers))
        self._worker.later(lambda: self._after_swap(record, placement, answers))

    def engine_rebalanced(self, phy2log: NDArray[np.int64]) -> None:
        """The engine changed the map by itself, on every rank at this step: follow it.

        The epoch rises by one, so that no plan for the old map is taken, and the controller asks anew. A map of
        another size is another deployment: it is not followed, and no plan is taken any more.
        """
        with self._lock:
            participant = self._participant
            if participant.state is not ParticipantState.IDLE:
                return
            shape = self._config.shape
            if np.shape(phy2log) != participant.placement.phy2log.shape:
                self.disable_migration(
                    f"the engine went from {participant.placement.phy2log.shape} layers and slots to"
                    f" {np.shape(phy2log)}: restart this group"
                )
                return
            placement = Placement(
                np.asarray(phy2log, np.int32), shape.num_ranks, shape.num_logical_experts
            )
            participant.handle(EngineRebalanced(placement), time.monotonic())

    def observe_as_asked(self) -> None:
        """Refuse every wave because the engine was configured so: no trouble."""
        self._participant.handle(MigrationDisabled(), time.monotonic())

    # --- what the gate wants ------------------------------------------------------------------------

    def _swap(self, action: Swap) -> None:
        """The commit point was passed: the wave is the engine's from here."""
        placement, prepare = self._participant.next_placement, self._participant.prepare
        assert placement is not None
        assert prepare is not None
        now = time.monotonic()
        ready = self._worker.swap(action.wave)
        self._move = Move(
            action.wave, placement, prepare.body.layers, ready, now, quiet_since_s=now
        )
        self._engine.begin(self._move)

    def _watch(self, move: Move) -> None:
        move.quiet_steps += 1
        fault = self._engine.fault()
        quiet_s = time.monotonic() - move.quiet_since_s
        if fault is None and (
            move.quiet_steps < self._stall_after_steps or quiet_s < self._stall_after_s
        ):
            return
        why = fault or f"no layer for {move.quiet_steps} steps and {quiet_s:.0f} s"
        self.disable_migration(
            f"{move.wave.plan_id} stopped with {len(move.done)} of {len(move.layers)} layers switched: {why}."
            " Every layer is whole and serving goes on; only a restart of the group moves experts again"
        )

    def _verify(self, placement: Placement, layers: Sequence[int]) -> None:
        """Hash what the engine copied here and compare with what was registered at load (R4)."""
        per_rank, rank = placement.slots_per_rank, self._config.identity.rank
        checksums = self._participant.checksums
        if not checksums:
            return
        for layer in layers:
            for local in range(per_rank):
                expert = int(placement.phy2log[layer, rank * per_rank + local])
                if expert == EMPTY:
                    continue
                found = checksum(self._weights.tensors(layer, local))
                expected = checksums[layer * placement.num_logical_experts + expert]
                if found != expected:
                    self.disable_migration(
                        f"layer {layer} slot {rank * per_rank + local} holds {found:016x}, expert {expert} was"
                        f" registered as {expected:016x} ({Reason.CHECKSUM_MISMATCH}): restart this group"
                    )
                    return


class _HandOver:
    """A MapInstaller with nothing to install: the engine's tables are the engine's."""

    def build(self, layers: Sequence[int], rows: NDArray[np.int32], epoch: int) -> None:
        del layers, rows, epoch

    def install(self, built: None) -> None:
        del built


class _NoCopies:
    """A WeightTransport that moves nothing: staging is asking the engine whether it can."""

    serial = 0
    broken = False

    def __init__(self, engine: HostEngine, wanted: Callable[[], Placement | None]) -> None:
        self._engine = engine
        self._wanted = wanted

    @property
    def staged(self) -> Mapping[tuple[int, int], tuple[torch.Tensor, ...]]:
        return {}

    def stage(self, prepare: Prepare, cancel: threading.Event, progress: Progress) -> StageOutcome:
        del progress
        new = self._wanted()
        if new is None or cancel.is_set():
            return StageOutcome(Reason.CANCELLED, "the wave was given up")
        refusal = self._engine.refusal(prepare, new)
        return StageOutcome() if refusal is None else StageOutcome(*refusal)

    def rebuild(self, serial: int) -> None:
        self.serial = serial

    def abort(self) -> None:
        """Nothing is in flight."""

    def fence(self) -> None:
        """No copy of ours follows."""

    def clear(self) -> None:
        """Nothing is staged."""
