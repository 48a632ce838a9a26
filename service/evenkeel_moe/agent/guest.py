"""The agent of an engine that copies its experts itself: a guest beside the engine's own balancer.

The protocol is the same up to the commit point: Prepare is checked and voted on, Commit arms the
rank, and the gate agrees on the step. From there on the engine acts: the agent hands it the agreed
map, and the engine copies and switches layer by layer and reports each layer to the agent. The map
thus has a single writer, and every layer is whole at every step. Until the last layer the rank
stays at the old epoch, and the gate is not polled. A move that stops half way is `trouble`.

The engine outlives its guest. Nothing here ends the process, with one exception (R8): this rank was
armed for a wave and cannot know whether the others began it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.streams import OwnStream, mark_queued
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.build import Connect, own_name
from evenkeel_moe.agent.checksums import agree_on_checksums, find_differences
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.engine_copies import NoCopies, NoMaps
from evenkeel_moe.agent.ports import (
    ClockReader,
    ExpertWeights,
    GateFailed,
    RankLink,
    WeightTransport,
)
from evenkeel_moe.agent.staging import ReadyWave
from evenkeel_moe.agent.swap_record import SwapRecord
from evenkeel_moe.agent.trouble import FaultEnd
from evenkeel_moe.errors import InvalidInput, Reason, Unavailable
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import (
    EngineRebalanced,
    ParticipantState,
    Prepare,
    Swap,
)

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

        Needed only by an engine that calls `GuestAgent.end_move` or `begin_reload`. It returns
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


class GuestAgent(Agent):
    """The agent of one deployment on one rank of an engine that copies weights itself.

    The constructor is collective over the EP group.

    Args:
        engine: the engine's balancer.
        stall_after_s, stall_after_steps: seconds and steps; a move has stopped when both pass
            without a layer being switched. If they are too short, a slow copy counts as stopped.
        config, placement, epoch, weights, connect, device, link, on_swap: see `Agent`.
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
        clock: ClockReader | None = None,
    ) -> None:
        self._engine = engine
        self._move: Move | None = None
        self._moved_to: Placement | None = None
        """The map that the engine changed by itself while this rank held a wave; followed once the
        wave has ended."""
        self._off = False
        self._reloading = False
        self._stream = OwnStream(device)
        self._stall_after_s = stall_after_s
        self._stall_after_steps = stall_after_steps
        self._meeting = connect(own_name("meeting", config), torch.device("cpu"))
        super().__init__(
            config,
            placement,
            epoch,
            weights,
            NoMaps(),
            connect=connect,
            device=device,
            link=link,
            on_swap=on_swap,
            clock=clock,
        )

    def _make_transport(self, placement: Placement, connect: Connect) -> WeightTransport:
        return NoCopies(self._engine.refusal, lambda: self._participant.next_placement)

    def _register(self, placement: Placement) -> tuple[int, ...] | None:
        # Not over the gate's communicator: after a failure of the gate it is gone, and the engine
        # must still be able to load weights.
        rank = self._config.identity.rank
        return agree_on_checksums(self._meeting, rank, placement, self._weights)

    # --- called by the engine ---------------------------------------------------------------------

    @property
    def move(self) -> Move | None:
        """The wave that the engine carries out; None between waves."""
        return self._move

    @property
    def placement(self) -> Placement:
        """The map in use."""
        return super().placement if self._moved_to is None else self._moved_to

    def step_boundary(self, step: int | None = None) -> None:
        """Poll the gate when a poll is due; during a move no rank polls. Call between steps.

        Raises:
            GateFailed: this rank was armed in a poll whose outcome is unknown (R8). Any other
                failure of the gate cannot have passed a wave: it disables migration, and the engine
                goes on.
        """
        move = self._move
        if move is not None:
            self._gate.rest()
            self._watch(move)
            return
        if self._moved_to is not None:
            with self._lock:
                self._follow_engine()
        if self._off:
            self._gate.rest()
            return
        armed = self._participant.must_wait_for_poll()
        try:
            super().step_boundary(step)
        except GateFailed as error:
            if armed:
                raise
            self._off = True
            self.disable_migration(f"the gate failed, and no wave was under way: {error}")
            # The other ranks would wait for this one at their next poll. Not on this thread: an
            # abort waits for a poll in flight.
            self._worker.later(self._polls.abort)

    def layer_switched(self, layer: int, seconds: float = 0.0) -> None:
        """Note that the engine switched a layer, which delayed the step by `seconds`."""
        move = self._move
        if move is None:
            return
        move.quiet_since_s, move.quiet_steps = time.monotonic(), 0
        move.longest_s = max(move.longest_s, seconds)
        move.done.add(layer)
        total = len(move.layers)
        done = len(move.done.intersection(move.layers))
        nbytes = self._config.shape.bytes_per_expert
        self._worker.later(lambda: self.progress(move.wave, done * nbytes, total * nbytes))

    def move_finished(self, phy2log: NDArray[np.int64]) -> None:
        """Finish the move; every rank calls it at the same step.

        If the engine did not reach the agreed map, the ranks compare their maps. Equal ones end the
        wave as dropped, and the group goes on from the map it has. Otherwise the rank keeps the
        wave and reports the trouble.

        Args:
            phy2log: (L, S) the map the engine now routes by; every layer is whole.
        """
        move = self._move
        if move is None:
            return
        if not np.array_equal(phy2log, move.placement.phy2log):
            self._end_elsewhere(move, np.array(phy2log, np.int32))
            return
        self._trouble.end(FaultEnd.MOVE)
        # The engine's last copies may still be pending in the stream of this thread.
        copied = mark_queued(self._device)
        self._worker.later(lambda: self._verify(move.placement, move.layers, copied))
        with self._lock:
            self._move = self._moved_to = None
            self._finish_swap(move.wave, move.ready.digest, move.layers, move.longest_s, 0)

    def _end_elsewhere(self, move: Move, phy2log: NDArray[np.int32]) -> None:
        """End a move that led to another map, if it is the same on all ranks; collective."""
        wrong = np.argwhere(phy2log != move.placement.phy2log)
        layers = sorted({int(layer) for layer, _ in wrong})
        why = (
            f"the engine ended {move.wave.plan_id} with {len(wrong)} of"
            f" {move.placement.phy2log.size} slots not as planned, in layers {layers[:8]}:"
            f" {self._engine.fault() or 'the engine gave no reason'}"
        )
        shape = self._config.shape
        try:
            found = Placement(phy2log, shape.num_ranks, shape.num_logical_experts)
            differences = self._differences({"map": found.digest, "move": str(move.wave)})
            if differences:
                raise InvalidInput(f"the ranks differ in their {', '.join(differences)}")
            if not found.logcnt.all():
                raise InvalidInput("an expert has no slot")
        except (RuntimeError, InvalidInput) as error:
            self.disable_migration(f"{why}; {str(error)[:300]}")
            return
        _log.error("move_given_up", deployment=self._config.identity.deployment, detail=why)
        self._trouble.end(FaultEnd.MOVE)
        with self._lock:
            self._move = self._moved_to = None
            self._carry_out_answers(EngineRebalanced(found))

    def _differences(self, facts: dict[str, str]) -> list[str]:
        """Return in which facts the ranks differ; collective. Raises: see `find_differences`."""
        return find_differences(self._meeting, {"steps": f"{self._gate.calls}", **facts})

    def engine_rebalanced(self, phy2log: NDArray[np.int64]) -> None:
        """Follow a change of the map that the engine made itself, on every rank at this step.

        The epoch rises by one, so that plans for the old map are refused and the controller asks
        for the new one. A rank that holds a wave does this once the wave has ended. A map of
        another size belongs to another deployment: it is not followed, and migration is disabled.
        """
        with self._lock:
            shape = self._config.shape
            known, found = self.placement.phy2log.shape, np.shape(phy2log)
            if found != known:
                self.disable_migration(
                    f"the engine went from {known} layers and slots to {found}: restart this group"
                )
                return
            self._moved_to = Placement(
                np.array(phy2log, np.int32), shape.num_ranks, shape.num_logical_experts
            )
            self._follow_engine()

    def _follow_engine(self) -> None:
        """Go to the map that the engine changed by itself, unless this rank holds a wave."""
        participant, placement = self._participant, self._moved_to
        if placement is None or participant.state is not ParticipantState.IDLE:
            return
        self._moved_to = None
        if placement != participant.placement:
            participant.handle(EngineRebalanced(placement), time.monotonic())

    @property
    def reloading(self) -> bool:
        """True from `begin_reload` to `end_reload`."""
        return self._reloading

    # --- other weights ----------------------------------------------------------------------------

    def end_move(self) -> None:
        """End the move under way, so that no bytes are in flight until the next boundary.

        Collective: every rank calls it between the same two step boundaries.

        Raises:
            Unavailable: the ranks did not come together, or the move cannot end.
            GateFailed: see `step_boundary`.
        """
        move = "" if self._move is None else str(self._move.wave)
        try:
            differences = self._differences({"map": self.placement.digest, "move": move})
        except RuntimeError as error:
            raise Unavailable(f"not all ranks came: {str(error)[:300]}; {_PAUSE}") from error
        if differences:
            raise Unavailable(f"the ranks differ in their {', '.join(differences)}; {_PAUSE}")
        self._resolve_poll()
        if self._move is not None:
            self._engine.finish(self._move)
        if self._move is not None:
            raise Unavailable(f"{self._move.wave.plan_id} cannot end: {self.trouble or 'it hangs'}")
        # What was copied is compared with the checksums of the present weights.
        if not self._worker.wait_until_idle(self._config.gate_timeout_s):
            raise Unavailable("the check of the copied experts takes too long")

    def begin_reload(self) -> None:
        """End the move under way, and take no wave until `end_reload`; collective as `end_move`.

        Call it before the first weight is replaced; further calls do nothing.

        Raises:
            Unavailable, GateFailed: see `end_move`. Do not load the weights then.
        """
        if self._reloading:
            return
        self.end_move()
        if not self.request_reload().is_set():
            raise Unavailable("a wave is under way at the gate")
        self._reloading = True

    def end_reload(self) -> None:
        """Register the weights that are in the slots now; collective as `end_move`."""
        if self._reloading:
            self._reloading = False
            self.finish_reload(self._participant.weights_version + 1)

    def _resolve_poll(self) -> None:
        """Use the result of the poll in flight now, on every rank at this boundary."""
        if self._off or not self._gate.polling:
            return
        result = self._polls.wait()
        with self._lock:
            self._carry_out_gate(self._gate.handle(result, time.monotonic()))
        if self._left is not None:
            raise GateFailed(self._left.detail, self._left.reason)

    # --- called by the gate -----------------------------------------------------------------------

    def _swap(self, action: Swap) -> None:
        """Hand the wave to the engine: the commit point has passed."""
        placement, prepare = self._participant.next_placement, self._participant.prepare
        assert placement is not None
        assert prepare is not None
        ready = self._worker.swap(action.wave)
        self._move = Move(
            action.wave, placement, prepare.body.layers, ready, quiet_since_s=time.monotonic()
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
        for layer in layers:
            for local in range(per_rank):
                expert = int(placement.phy2log[layer, rank * per_rank + local])
                if expert == EMPTY:
                    continue
                with self._stream.after(copied):
                    found = checksum(self._weights.tensors(layer, local))
                expected = checksums[layer * placement.num_logical_experts + expert]
                if found != expected:
                    self.disable_migration(
                        f"layer {layer} slot {rank * per_rank + local} holds {found:016x}, expert"
                        f" {expert} was registered as {expected:016x}"
                        f" ({Reason.CHECKSUM_MISMATCH}): load the weights again, or restart this"
                        " group",
                        FaultEnd.RELOAD,
                    )
                    return
