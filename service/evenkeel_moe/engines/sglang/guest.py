"""One rank of SGLang and its guest: counts out, plans in, and a watch over what the EPLB manager does with them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.agent.guest import GuestAgent, Move
from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.bootstrap import make_guest
from evenkeel_moe.engines.guest.collective_start import all_or_none, engine_spared, roll_call_of
from evenkeel_moe.engines.guest.counts import StepCounts, StepNote, record_step
from evenkeel_moe.engines.guest.plan_agreement import Orders, gather_rows
from evenkeel_moe.engines.guest.settings import GuestMode, GuestSettings
from evenkeel_moe.engines.sglang.state import (
    Rows,
    SglangWeights,
    counting_side,
    initial,
    read_shape,
)
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Prepare

__all__ = ["Engine", "SglangGuest", "timed"]

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Engine:
    """Where SGLang keeps what the guest asks for."""

    metadata: Callable[[], Any]
    """The global `ExpertLocationMetadata`."""
    recorder: Callable[[], Any]
    """The global expert distribution recorder."""
    cpu_group: Callable[[], Any]
    """A CPU group over all ranks."""


class SglangGuest:
    """Beside one `EPLBManager`.

    Args:
        settings: the plugin's.
        manager: SGLang's.
        engine: see `Engine`.
        link: instead of gRPC to the controllers.
    """

    def __init__(
        self, settings: GuestSettings, manager: Any, engine: Engine, link: RankLink | None = None
    ) -> None:
        self.settings = settings
        self.manager = manager
        self.orders = Orders()
        self.agent: GuestAgent | None = None
        self._engine = engine
        self._link = link
        self._rows = Rows(())
        self._layers: dict[torch.device, Tensor] = {}
        self._side = CountingSide.SOURCE
        self._counts: StepCounts | None = None
        self._local = slice(0)
        self._top_k = 1
        self._step = 0
        self._counted: Tensor | None = None
        self._tokens: int | None = None
        self._due = False
        self._changed: list[int] = []

    @property
    def places(self) -> bool:
        """Whether SGLang's manager is to follow the controller."""
        return self.settings.mode is GuestMode.PLACE

    @property
    def ordered(self) -> bool:
        """Whether a plan waits for SGLang's planner."""
        return self.orders.move is not None

    # --- start, at the first forward pass: the manager is older than the model ----------------------------

    def join(self) -> None:
        """Start the agent. Collective; what fails leaves SGLang without one."""
        try:
            self._start()
        except Exception as error:  # SGLang serves with or without us
            _log.exception("guest_not_started", detail=str(error)[:300])

    def _start(self) -> None:
        roll_call_of(self._engine.cpu_group(), self.settings.group_timeout_s)
        shape = all_or_none("read the model", self._read, self._gather)
        rank, metadata = _distributed.get_rank(), self._engine.metadata()
        self._local = slice(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
        self._top_k = shape.top_k
        self._counts = StepCounts(shape.num_logical_experts, self._deliver)

        def make() -> GuestAgent:
            return make_guest(
                self.settings,
                rank,
                shape,
                initial(metadata, self._rows),
                SglangWeights(
                    self.manager._get_model().routed_experts_weights_of_layer, self._rows
                ),
                self,
                broadcast=self._broadcast,
                device=torch.device(metadata.physical_to_logical_map.device),
                side=self._side,
                link=self._link,
            )

        self.agent = all_or_none("start an agent", make, self._gather, GuestAgent.close)
        if not self.places:
            self.agent.observe_as_asked()
        _log.info("guest_started", deployment=self.settings.deployment, rank=rank, side=self._side)

    def _read(self) -> ModelShape:
        """The model's shape; also which rows are MoE layers, and what the recorder counts."""
        metadata = self._engine.metadata()
        by_layer = self.manager._get_model().routed_experts_weights_of_layer
        world = _distributed.get_world_size()
        if world != metadata.ep_size:
            raise InvalidInput(
                f"{world} ranks of which {metadata.ep_size} share experts: SGLang moves experts over all ranks,"
                " so this plugin needs them to be the same"
            )
        config = self.manager._model_config
        shape = read_shape(
            metadata,
            by_layer,
            getattr(config, "hf_text_config", None) or getattr(config, "hf_config", None),
        )
        self._rows = Rows(tuple(sorted(by_layer)))
        self._side = counting_side(self._engine.recorder()._single_pass_gatherers["primary"])
        return shape

    # --- what SGLang's recorder and manager do --------------------------------------------------------------

    def pass_began(self, forward_batch: Any) -> None:
        """A forward pass begins; its real tokens, where SGLang says them."""
        tokens = getattr(forward_batch, "num_token_non_padded_cpu", None)
        if tokens is None:
            ids = getattr(forward_batch, "input_ids", None)
            tokens = None if ids is None else len(ids)
        self._tokens = None if tokens is None else int(tokens)

    def counted(self, by_slot: Tensor) -> None:
        """The recorder gathered a pass: (hidden layers, S), padding left out."""
        self._counted = by_slot

    def boundary(self) -> None:
        """After a forward pass, before the manager's turn.

        Raises:
            GateFailed: see `GuestAgent.step_boundary`.
        """
        if self._step == 0 and self.agent is None:
            self.join()
        agent, counts = self.agent, self._counts
        step, self._step = self._step, self._step + 1
        self.orders.step = step
        if agent is None or counts is None:
            return
        self._count(agent, counts, step)
        agent.step_boundary()

    def _count(self, agent: GuestAgent, counts: StepCounts, step: int) -> None:
        """What fails here costs telemetry, never the step; a pass nobody counted is not reported at all."""
        by_slot, self._counted = self._counted, None
        try:
            counts.pick_up()
            if by_slot is None:
                return
            by_slot = by_slot[self._layers_on(by_slot.device)]
            if self._side is CountingSide.SOURCE:
                held = self._engine.metadata().physical_to_logical_map
                phy2log = held[self._layers_on(held.device)]
                counts.take(
                    StepNote(step, agent.epoch, False, self._tokens),
                    by_slot,
                    phy2log.to(by_slot.device),
                )
                return
            # While layers are switched one after the other, what a slot held is not one epoch's map.
            mixed = agent.move is not None
            counts.take(
                StepNote(step, agent.epoch, mixed, self._tokens), by_slot[:, self._local], None
            )
        except Exception:
            counts.failed(step)

    def _layers_on(self, device: torch.device) -> Tensor:
        """(L,) int64 hidden layers that are MoE; copied to a device once, for the copy waits for the device."""
        layers = self._layers.get(device)
        if layers is None:
            layers = self._layers[device] = torch.tensor(self._rows.layer_ids, device=device)
        return layers

    def run(self, original: Callable[[], Iterator[None]]) -> Iterator[None]:
        """The manager's entry point: a rebalance when a plan is due, at the same pass on every rank.

        Begins with the first forward pass. A guest that did not start leaves the manager to itself.
        """
        if self.agent is None:
            yield from original()
            return
        while True:
            yield
            if not self._due:
                continue
            self._due = False
            yield from self.manager.rebalance()
            if self.agent is not None and self.agent.move is not None:
                self.orders.move = None
                with engine_spared(self, "EPLBManager.rebalance"):
                    self.agent.move_finished(self._map())

    def plan(self, steps: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What SGLang's planner answers: (phy2log, log2phy, replicas) over hidden layers.

        Args:
            steps: (steps, hidden layers, E) what the planner was asked with.
            num_slots: slots of a layer it must fill.

        Returns:
            None when SGLang asks for another number of slots than it has, or no guest could be started: its own
            planner must answer.
        """
        if self.agent is None:
            return None
        hidden = self._engine.metadata().physical_to_logical_map_cpu.numpy()
        if hidden.shape[1] != num_slots:
            return None
        rows = self.orders.answer(self._rows.moe(hidden), self._gather)
        full = self._rows.hidden(rows, hidden)
        num_ranks = int(self._engine.metadata().ep_size)
        placement = Placement(full.astype(np.int32), num_ranks, int(steps.shape[-1]))
        return (
            torch.from_numpy(full),
            torch.from_numpy(placement.log2phy.astype(np.int64)),
            torch.from_numpy(placement.logcnt.astype(np.int64)),
        )

    def switched(self, layer_ids: list[int], seconds: float) -> None:
        """SGLang's updater switched these hidden layers, on every rank at this pass."""
        agent = self.agent
        if agent is None:
            return
        self._changed += layer_ids
        if agent.move is None:
            return
        for layer in layer_ids:
            if layer in self._rows.layer_ids:
                agent.layer_switched(self._rows.layer_ids.index(layer), seconds)

    def settle(self) -> None:
        """After the manager's turn: follow what changed without a plan of ours."""
        agent, changed, self._changed = self.agent, self._changed, []
        if agent is None or agent.move is not None or not changed:
            return
        now = self._map()
        if np.array_equal(now, agent.placement.phy2log):
            return
        if self.places:
            agent.disable_migration(
                "SGLang's EPLB moved experts that no plan moved: another writer beside ours"
            )
        agent.engine_rebalanced(now)

    # --- HostEngine -----------------------------------------------------------------------------------------

    def refusal(self, prepare: Prepare, new: Placement) -> tuple[Reason, str] | None:
        """SGLang takes any map of its own shape without empty slots."""
        del prepare
        if not self.places:
            return Reason.OBSERVE_ONLY, "this plugin observes"
        have = (len(self._rows.layer_ids), int(self._engine.metadata().num_physical_experts))
        if new.phy2log.shape != have:
            return (
                Reason.WRONG_SHAPE,
                f"the plan is for {new.phy2log.shape} layers and slots, SGLang has {have}",
            )
        if (new.phy2log == EMPTY).any():
            return (
                Reason.UNSUPPORTED,
                f"{int((new.phy2log == EMPTY).sum())} empty slots: SGLang's maps have none",
            )
        disabled = self.manager._rebalance_disabled_reason
        return (
            None
            if disabled is None
            else (Reason.UNSUPPORTED, f"SGLang's rebalancing is off: {disabled}")
        )

    def begin(self, move: Move) -> None:
        """Let the manager rebalance at this very pass."""
        self.orders.move, self.orders.refused, self._due = move, "", True

    def fault(self) -> str | None:
        """The known ways in which a rebalance does not happen."""
        if self.orders.refused:
            return f"the ranks did not agree on the plan: {self.orders.refused}"
        disabled = self.manager._rebalance_disabled_reason
        return None if disabled is None else f"SGLang's rebalancing is off: {disabled}"

    # --- small parts ------------------------------------------------------------------------------------------

    def _map(self) -> NDArray[np.int64]:
        return self._rows.moe(self._engine.metadata().physical_to_logical_map_cpu.numpy())

    def _deliver(self, note: StepNote, counts: NDArray[np.int64]) -> None:
        agent = self.agent
        if agent is None:
            return
        if self._side is CountingSide.SOURCE:
            tokens = int(counts[0].sum()) // self._top_k
        elif note.prepared_tokens is None:
            return
        else:
            tokens = note.prepared_tokens
        record_step(agent, note, counts, tokens, self.settings.phase)

    def _gather(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return gather_rows(row, self._engine.cpu_group())

    def _broadcast(self, told: bytes | None) -> bytes:
        answer: list[bytes | None] = [told]
        _distributed.broadcast_object_list(answer, src=0, group=self._engine.cpu_group())
        assert answer[0] is not None
        return answer[0]

    def close(self) -> None:
        """End the agent's threads."""
        if self.agent is not None:
            self.agent.close()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returned, and the seconds it took."""
    began = time.perf_counter()
    answer = work()
    return answer, time.perf_counter() - began
