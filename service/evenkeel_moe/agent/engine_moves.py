"""The moves of an engine that copies its experts itself, beside or inside its own balancer.

The protocol is the same up to the commit point: Prepare is checked and voted on, Commit arms the
rank, and the gate agrees on the step. From there on the engine acts: it gets the agreed map, copies
and switches layer by layer, and reports each layer. The map thus has a single writer, and every
layer is whole at every step. Until the last layer the rank stays at the old epoch, and the gate is
not polled. A move that stops half way is a trouble of the agent.

The engine outlives its agent. Nothing here ends the process, with one exception (R8): this rank was
armed for a wave and cannot know whether the others began it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.streams import OwnStream, mark_queued
from evenkeel_moe.adapters.torch.transport import Progress, StageOutcome
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.build import AgentParts, Connect, own_name
from evenkeel_moe.agent.checksums import find_differences
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.moves import ExpertMoves
from evenkeel_moe.agent.ports import ExpertWeights, WeightTransport
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.agent.together import together
from evenkeel_moe.agent.trouble import FaultEnd, Trouble
from evenkeel_moe.errors import InvalidInput, Reason, Unavailable
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.ports.threads import Event
from evenkeel_moe.protocol.messages import ParticipantState, Prepare
from evenkeel_moe.protocol.rank.participant import Participant

_log = structlog.get_logger(__name__)
_PAUSE = "pause the engine before weights are replaced, so that all ranks stand at one step"


class HostEngine(Protocol):
    """The engine, as its guest sees it."""

    def refusal(self, prepare: Prepare, new: Placement) -> tuple[Reason, str] | None:
        """Return why the engine cannot move to `new`; None if it can.

        Called on the agent's transfer thread, before anything is agreed.
        """
        ...

    def begin(self, move: "Move") -> None:
        """Start to copy and switch: every rank agreed on this step.

        Called on the engine's thread; must not fail.
        """
        ...

    def fault(self) -> str | None:
        """Return a known fault of the engine's own balancer; asked at each step of a move."""
        ...

    def finish(self, move: "Move") -> None:
        """Carry the move out to its end now, without further steps; collective.

        Needed only by an engine that calls `EngineMoves.end_move` or `begin_reload`. It returns
        early, on all ranks, if the move cannot end.
        """
        ...


@dataclass(slots=True)
class Move:
    """A wave that the engine carries out."""

    wave: WaveKey
    placement: Placement
    """The map after the move."""
    layers: tuple[int, ...]
    """The layers that change."""
    ready: ReadyWave
    done: set[int] = field(default_factory=set)
    """The layers switched so far."""
    longest_s: float = 0.0
    """The longest time for which the switch of one layer delayed a step."""
    quiet_since_s: float = 0.0
    """Time of the last switch of a layer [monotonic s]."""
    quiet_steps: int = 0
    """Steps since the last switch of a layer."""


class _Asking:
    """A WeightTransport that copies nothing: staging asks the engine whether it can move."""

    serial = 0
    broken = False
    staged: Mapping[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def __init__(self, engine: HostEngine, participant: Participant) -> None:
        self._engine = engine
        self._participant = participant

    def stage(self, prepare: Prepare, cancel: Event, progress: Progress) -> StageOutcome:
        """Ask the engine whether it can move."""
        new = self._participant.next_placement
        if new is None or cancel.is_set():
            return StageOutcome(Reason.CANCELLED, "the wave was cancelled")
        refusal = self._engine.refusal(prepare, new)
        return StageOutcome() if refusal is None else StageOutcome(*refusal)

    def rebuild(self, serial: int) -> None:
        """Note the number of a communicator that does not exist here."""
        self.serial = serial

    def abort(self) -> None:
        """Nothing is in flight."""

    def fence(self) -> None:
        """Nothing to order: the agent copies nothing."""

    def clear(self) -> None:
        """Nothing is staged."""


class EngineMoves(ExpertMoves):
    """The moves that the engine carries out: an agent gets this in place of routing tables.

    The engine calls the methods of the first two parts, on its own thread.

    Args:
        engine: the engine's balancer.
        stall_after_s, stall_after_steps: seconds and steps; a move has stopped when both pass
            without a layer being switched. If they are too short, a slow copy counts as stopped.
    """

    outlives_gate = True

    def __init__(
        self, engine: HostEngine, *, stall_after_s: float = 30.0, stall_after_steps: int = 64
    ) -> None:
        self._engine = engine
        self._stall_after_s = stall_after_s
        self._stall_after_steps = stall_after_steps
        self.move: Move | None = None
        """The wave that the engine carries out; None between waves."""
        self.reloading = False
        """True from `begin_reload` to `end_reload`."""

    # --- moves, called by the engine --------------------------------------------------------------

    def layer_switched(self, layer: int, seconds: float = 0.0) -> None:
        """Note that the engine switched a layer, which delayed the step by `seconds`."""
        move, agent = self.move, self._agent
        if move is None:
            return
        move.quiet_since_s, move.quiet_steps = agent.now(), 0
        move.longest_s = max(move.longest_s, seconds)
        move.done.add(layer)
        total = len(move.layers)
        done = len(move.done.intersection(move.layers))
        nbytes = self._config.shape.bytes_per_expert
        agent.later(lambda: agent.progress(move.wave, done * nbytes, total * nbytes))

    def move_finished(self, phy2log: NDArray[np.int64]) -> None:
        """Finish the move; every rank calls it at the same step.

        If the engine did not reach the agreed map, the ranks compare their maps. Equal ones end the
        wave as dropped, and the group goes on from the map it has. Otherwise the rank keeps the
        wave and reports the trouble.

        Args:
            phy2log: (L, S) the map the engine now routes by; every layer is whole.
        """
        move, agent = self.move, self._agent
        if move is None:
            return
        if not np.array_equal(phy2log, move.placement.phy2log):
            self._end_elsewhere(move, np.array(phy2log, np.int32))
            return
        self._faults.end(FaultEnd.MOVE)
        # The engine's last copies may still be pending in the stream of this thread.
        copied = mark_queued(self._device)
        agent.later(lambda: self._verify(move.placement, move.layers, copied))
        self.move = self.moved_to = None
        agent.move_ended(move.ready, move.layers, move.longest_s)

    def _end_elsewhere(self, move: Move, phy2log: NDArray[np.int32]) -> None:
        """End a move that led to another map, if it is the same on all ranks; collective."""
        wrong = np.argwhere(phy2log != move.placement.phy2log)
        layers = sorted({int(layer) for layer, _ in wrong})
        why = (
            f"the engine ended {move.wave.plan_id} with {len(wrong)} of"
            f" {move.placement.phy2log.size} slots not as planned, in layers {layers[:8]}:"
            f" {self._engine.fault() or 'the engine gave no reason'}"
        )
        config = self._config
        try:
            found = together(
                self.meeting,
                "read their map",
                lambda: Placement(
                    phy2log, config.shape.num_ranks, config.shape.num_logical_experts
                ),
            )
            differences = self._differences({"map": found.digest, "move": str(move.wave)})
            if differences:
                raise InvalidInput(f"the ranks differ in their {', '.join(differences)}")
            if not found.logcnt.all():
                raise InvalidInput("an expert has no slot")
        except (Unavailable, InvalidInput) as error:
            self._faults.begin(f"{why}; {str(error)[:300]}", FaultEnd.RESTART)
            return
        _log.error("move_given_up", deployment=config.identity.deployment, detail=why)
        self._faults.end(FaultEnd.MOVE)
        self.move = self.moved_to = None
        self._agent.follow_engine(found, ParticipantState.SWAPPING)

    def _differences(self, facts: dict[str, str]) -> list[str]:
        """Return in which facts the ranks differ; collective. Raises: see `find_differences`."""
        return find_differences(self.meeting, {"steps": f"{self._agent.steps}", **facts})

    def engine_rebalanced(self, phy2log: NDArray[np.int64]) -> None:
        """Follow a change of the map that the engine made itself, on every rank at this step.

        The epoch rises by one, so that plans for the old map are refused and the controller asks
        for the new one. A rank that holds a wave does this once the wave has ended. A map of
        another size belongs to another deployment: it is not followed, and migration is disabled.
        """
        shape = self._config.shape
        known, found = self._agent.placement.phy2log.shape, np.shape(phy2log)
        if found != known:
            self._faults.begin(
                f"the engine went from {known} layers and slots to {found}: restart this group",
                FaultEnd.RESTART,
            )
            return
        rows = np.array(phy2log, np.int32)
        self.moved_to = Placement(rows, shape.num_ranks, shape.num_logical_experts)
        self._follow_engine()

    def _follow_engine(self) -> None:
        """Go to the map that the engine changed by itself, unless this rank holds a wave."""
        placement = self.moved_to
        if placement is not None and self._agent.follow_engine(placement, ParticipantState.IDLE):
            self.moved_to = None

    # --- other weights, called by the engine ------------------------------------------------------

    def end_move(self) -> None:
        """End the move under way, so that no bytes are in flight until the next boundary.

        Collective: every rank calls it between the same two step boundaries.

        Raises:
            Unavailable: the ranks did not come together, or the move cannot end.
            GateFailed: see `Agent.step_boundary`.
        """
        agent = self._agent
        move = "" if self.move is None else str(self.move.wave)
        try:
            differences = self._differences({"map": agent.placement.digest, "move": move})
        except Unavailable as error:
            raise Unavailable(f"{error}; {_PAUSE}") from error
        if differences:
            raise Unavailable(f"the ranks differ in their {', '.join(differences)}; {_PAUSE}")
        together(self.meeting, "end the move", self._end_move_here)

    def _end_move_here(self) -> None:
        """End the move on this rank; the engine's own part is collective."""
        agent = self._agent
        agent.resolve_poll()
        if self.move is not None:
            self._engine.finish(self.move)
        if self.move is not None:
            why = self._faults.why or "it hangs"
            raise Unavailable(f"{self.move.wave.plan_id} cannot end: {why}")
        # What was copied is compared with the checksums of the present weights.
        if not agent.wait_until_idle(self._config.gate_timeout_s):
            raise Unavailable("the check of the copied experts takes too long")

    def begin_reload(self) -> None:
        """End the move under way, and take no wave until `end_reload`; collective as `end_move`.

        Call it before the first weight is replaced; further calls do nothing.

        Raises:
            Unavailable, GateFailed: see `end_move`. Do not load the weights then.
        """
        if self.reloading:
            return
        self.end_move()
        if not self._agent.request_reload().is_set():
            raise Unavailable("a wave is under way at the gate")
        self.reloading = True

    def end_reload(self) -> None:
        """Register the weights that are in the slots now; collective as `end_move`."""
        if self.reloading:
            self.reloading = False
            self._agent.finish_reload(self._participant.weights_version + 1)

    # --- ExpertMoves, called by the agent ---------------------------------------------------------

    def attach(
        self,
        agent: Agent,
        config: AgentConfig,
        weights: ExpertWeights,
        connect: Connect,
        device: torch.device,
    ) -> None:
        """Take the agent and the engine's slots, before anything else; collective."""
        super().attach(agent, config, weights, connect, device)
        self._agent, self._stream = agent, OwnStream(device)
        # Not the gate's communicator: after a failure of the gate it is gone, and the engine must
        # still be able to load weights.
        self.meeting = connect(own_name("meeting", config), torch.device("cpu"))

    def make_transport(
        self, parts: AgentParts, participant: Participant, faults: Trouble
    ) -> WeightTransport:
        """Return a transport that asks the engine whether it can move, and copies nothing."""
        self._participant, self._faults = participant, faults
        return _Asking(self._engine, participant)

    def build(self, layers: Sequence[int], rows: NDArray[np.int32], epoch: int) -> None:
        """Build no tables: the engine updates its own."""

    def install(self, built: None) -> None:
        """Install no tables."""

    def is_moving(self) -> bool:
        """Watch the move under way; without one, follow what the engine changed by itself."""
        if self.move is not None:
            self._watch(self.move)
        elif self.moved_to is not None:
            self._follow_engine()
        return self.move is not None

    def carry_out(self, ready: ReadyWave, placement: Placement, layers: tuple[int, ...]) -> bool:
        """Hand the wave to the engine: the commit point has passed."""
        self.move = Move(ready.wave, placement, layers, ready, quiet_since_s=self._agent.now())
        self._engine.begin(self.move)
        return False

    def _watch(self, move: Move) -> None:
        move.quiet_steps += 1
        fault = self._engine.fault()
        quiet_s = self._agent.now() - move.quiet_since_s
        if fault is None and (
            move.quiet_steps < self._stall_after_steps or quiet_s < self._stall_after_s
        ):
            return
        why = fault or f"no layer for {move.quiet_steps} steps and {quiet_s:.0f} s"
        self._faults.begin(
            f"{move.wave.plan_id} stopped with {len(move.done)} of {len(move.layers)} layers"
            f" switched: {why}. Every layer is whole and serving continues; experts move again once"
            " the engine has ended this move, or after a restart of the group",
            FaultEnd.MOVE,
        )

    def _verify(self, placement: Placement, layers: Sequence[int], copied: Any) -> None:
        """Compare the checksums of the copied experts with those registered at load (R4).

        `copied` marks the engine's copies; they are hashed once it has passed.
        """
        per_rank, rank = placement.slots_per_rank, self._config.identity.rank
        checksums = self._participant.checksums
        if not checksums:
            return
        mine = placement.phy2log.reshape(placement.num_layers, -1, per_rank)[list(layers), rank]
        for row, local in np.argwhere(mine != EMPTY).tolist():
            layer, expert = layers[row], int(mine[row, local])
            with self._stream.after(copied):
                found = checksum(self._weights.tensors(layer, local))
            expected = checksums[layer * placement.num_logical_experts + expert]
            if found != expected:
                self._faults.begin(
                    f"layer {layer} slot {rank * per_rank + local} holds {found:016x}, expert"
                    f" {expert} was registered as {expected:016x}"
                    f" ({Reason.CHECKSUM_MISMATCH}): load the weights again, or restart this group",
                    FaultEnd.RELOAD,
                )
                return
