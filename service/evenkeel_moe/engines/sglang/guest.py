"""One rank's guest in SGLang: reports counts, delivers plans, and watches the EPLB manager."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.device_recorder import StepCounts
from evenkeel_moe.agent.engine_moves import Move
from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.agent.together import together
from evenkeel_moe.engines.guest.bootstrap import EngineFacts
from evenkeel_moe.engines.guest.collective_start import require_plugin_in_group
from evenkeel_moe.engines.guest.counts import StepNote
from evenkeel_moe.engines.guest.engine_guest import EngineGuest
from evenkeel_moe.engines.guest.expert_times import ExpertCall, Seconds
from evenkeel_moe.engines.guest.guards import Unsupported, refuse_differences
from evenkeel_moe.engines.guest.settings import GuestSettings, settings_of_part
from evenkeel_moe.engines.guest.slot_weights import SlotWeights
from evenkeel_moe.engines.sglang import access
from evenkeel_moe.engines.sglang.canary import SglangProbe
from evenkeel_moe.engines.sglang.experts import expert_calls, left_behind
from evenkeel_moe.engines.sglang.hooks import compare_loaders
from evenkeel_moe.engines.sglang.kv_cache import read_kv_cache
from evenkeel_moe.engines.sglang.state import (
    MoeRows,
    WarmUp,
    counting_side,
    dispatcher,
    initial_placement,
    is_health_check,
    read_shape,
    routed_weights,
    unserved,
)
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Prepare

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed
_WATCHDOG_PART = 0.8
"""Part of the watchdog's time that the ranks may wait for each other: a pass also computes."""
_FILLER_ON_ROCM = 0
"""The expert of the rows that pad a batch on ROCm; on other devices SGLang gives them none."""


class SglangGuest(EngineGuest):
    """The guest of one `EPLBManager`.

    Args:
        settings: the plugin's settings.
        manager: SGLang's EPLB manager.
        make_link: see `EngineGuest`.
    """

    engine_name = "SGLang"

    def __init__(
        self,
        settings: GuestSettings,
        manager: Any,
        make_link: Callable[[], RankLink] | None = None,
    ) -> None:
        super().__init__(settings, make_link)
        self.manager = manager
        self._runner: Any = None
        self._rows = MoeRows(())
        self._weights: dict[int, Sequence[Tensor]] = {}
        self._layers: dict[torch.device, Tensor] = {}
        self._counted: Tensor | None = None
        self._gathered = 1
        """Batches of attention data parallelism that every rank routes together."""
        self._tokens: int | None = None
        self._rids: Sequence[str] | None = None
        self._warm_up = WarmUp(expected=False)
        self._changed: list[int] = []

    @property
    def has_plan(self) -> bool:
        """True while a plan waits for SGLang's planner."""
        return self.agreement.move is not None

    # --- start, at the first forward pass, because the manager is made before the model
    # ------------

    def join(self) -> None:
        """Start the agent. Collective; after a failure SGLang runs without it."""
        if self._runner is not None:
            self.kv_cache_allocated(lambda: read_kv_cache(self._runner))
        self._try_to_start(self._start)

    def _start(self) -> None:
        self._refuse_unsupported()
        context = access.context()
        # After this time SGLang ends a server that is still at the same pass.
        limit_s = _WATCHDOG_PART * float(context.get_device().watchdog_timeout)
        if self.settings.group_timeout_s > limit_s:
            self.settings = self.settings.model_copy(update={"group_timeout_s": limit_s})
        parallel = context.get_parallel()
        if parallel.dp_size > 1 and parallel.attn_dp_size == 1:
            replica = f"replica {parallel.dp_rank} of {parallel.dp_size}"
            self.settings = settings_of_part(self.settings, f"dp{parallel.dp_rank}", replica)
        require_plugin_in_group(self._plan_group(), self.settings.group_timeout_s)
        shape = together(self, "read the model", self._read_model)
        rank, metadata = _distributed.get_rank(), access.metadata()

        def read() -> EngineFacts:
            device = torch.device(metadata.physical_to_logical_map.device)
            return EngineFacts(
                initial_placement(metadata, self._rows),
                SlotWeights(lambda layer: self._weights[self._rows.layer_ids[layer]]),
                device,
                dispatch=dispatcher(context.get_exec().moe),
                side=self._side,
                probe=SglangProbe(self._expert_calls, rank, shape.slots_per_rank, device),
                slots_stay_filled=True,  # SGLang's maps hold an expert in every slot.
            )

        self._start_agent(rank, shape, read)

    def _refuse_unsupported(self) -> None:
        """Refuse groups of ranks that the plugin does not support, on every rank alike.

        Raises:
            Unsupported: before any collective call; the message has the numbers.
        """
        world, ranks = _distributed.get_world_size(), access.metadata().ep_size
        if world != ranks:
            raise Unsupported(
                f"{world} ranks, of which {ranks} share experts: SGLang moves experts"
                " over all ranks, so this plugin needs both numbers to be equal"
            )
        context = access.context()
        moe = context.get_exec().moe
        if moe.elastic_ep_backend is not None:
            raise Unsupported(
                "SGLang runs with elastic expert parallelism"
                f" (elastic_ep_backend {moe.elastic_ep_backend}), which"
                f" goes on after a death with a mask over its ranks (now {ranks}) inside a forward"
                " pass: the plugin's collective calls need all ranks, so it supports a fixed number"
            )
        gathered = access.gathered_batches()
        if gathered > 1 and not access.only_prefills_eagerly():
            raise Unsupported(
                f"--moe-a2a-backend {moe.moe_a2a_backend} with {gathered} groups of attention data"
                " parallelism: SGLang fills their batches up to one length, and its recorder counts"
                " what fills them like tokens; choose an all-to-all backend, or, for a server with"
                " --disaggregation-mode prefill, --cuda-graph-backend-prefill disabled"
            )
        if self.places and self.settings.record:
            raise Unsupported("nobody plans without a controller: record in mode observe")
        mode = moe.expert_distribution_recorder_mode
        if self.places and mode not in ("stat", "stat_approx"):
            raise Unsupported(
                f"--expert-distribution-recorder-mode {mode}: SGLang's scheduler ends at the first"
                " rebalance with another mode than stat or stat_approx"
            )

    def _read_model(self) -> ModelShape:
        """Return the model's shape; note the MoE layers, and what the recorder counts.

        Raises:
            Unsupported: SGLang replaces weights in another way than the plugin knows, or would move
                other tensors than it serves with.
        """
        # Now that SGLang has loaded the model, because these modules import most of SGLang.
        refuse_differences(compare_loaders())
        metadata = access.metadata()
        model = self.manager._get_model()
        self._weights = routed_weights(model)
        if self.places and (words := self._unmovable(model)):
            raise Unsupported(words)
        config = self.manager._model_config
        text_config = getattr(config, "hf_text_config", None) or getattr(config, "hf_config", None)
        shape = read_shape(metadata, self._weights, text_config)
        self._rows = MoeRows(tuple(self._weights))
        # Without an all-to-all all ranks route the same tokens and add up their outputs.
        parallel, rank = access.context().get_parallel(), _distributed.get_rank()
        self._gathered = access.gathered_batches()
        self._place_in_batch = parallel.attn_tp_rank if access.routes_own_tokens() else rank
        self._ranks_of_batch = metadata.ep_size
        self._filler = None if torch.version.hip is None else _FILLER_ON_ROCM
        self._side = counting_side(access.recorder()._single_pass_gatherers["primary"])
        self._warm_up = WarmUp(expected=not access.context().get_serving().skip_server_warmup)
        return shape

    def pool_allocated(self, runner: Any) -> None:
        """Measure the experts from here on: SGLang records its CUDA graphs next.

        Args:
            runner: SGLang's `ModelRunner`, which has allocated the KV cache.
        """
        self._runner = runner
        self._measure_experts(torch.device(access.metadata().physical_to_logical_map.device))

    # --- called by SGLang's recorder and manager
    # ---------------------------------------------------

    def pass_began(self, forward_batch: Any) -> None:
        """Note the real tokens of a forward pass that begins, if SGLang reports them, and whose.

        A pass of a draft model also begins, and has counts, but no end.
        """
        self._counted = None
        self._rids = getattr(forward_batch, "rids", None)
        gathered = getattr(forward_batch, "global_num_tokens_cpu", None)
        if gathered is not None and self._gathered > 1:
            self._tokens = sum(gathered)
            return
        tokens = getattr(forward_batch, "global_num_token_non_padded_cpu", None)
        if tokens is None:
            ids = getattr(forward_batch, "input_ids", None)
            tokens = None if ids is None else len(ids)
        self._tokens = None if tokens is None else int(tokens)

    def counted(self, by_slot: Tensor) -> None:
        """Note the recorder's counts of a pass: (hidden layers, S), without padding.

        Those of the pass that starts the agent are left out.
        """
        if self.agent is not None:
            self._counted = by_slot

    def boundary(self) -> None:
        """Count the pass and run the step boundary: after a forward pass, before the manager.

        Raises:
            GateFailed: see `Agent.step_boundary`.
        """
        if self._step == 0 and self.agent is None:
            self.join()
        agent, (by_slot, self._counted) = self.agent, (self._counted, None)
        step, self._step = self._step, self._step + 1
        if agent is None:
            return
        seconds = self._end_step()
        self._count(step, lambda counts: self._take(agent, counts, step, by_slot, seconds))
        self.weights_loaded()
        agent.step_boundary()
        self._begin_step()

    def _take(
        self,
        agent: Agent,
        counts: StepCounts,
        step: int,
        by_slot: Tensor | None,
        seconds: Seconds,
    ) -> None:
        """Take the counts of a pass, if the recorder counted it."""
        own = self._warm_up.has(self._rids)
        if by_slot is None:
            return
        by_slot = by_slot[self._layers_on(by_slot.device)]
        if self._side is CountingSide.SOURCE:
            held = access.metadata().physical_to_logical_map
            phy2log = held[self._layers_on(held.device)].to(by_slot.device)
            is_dummy = own or is_health_check(self._rids)
        else:
            by_slot, phy2log = by_slot[:, self._slots], None
            # While layers are switched one by one, the slots follow no single epoch's map. A health
            # check of one rank is no dummy: the slots of this rank got tokens of other ranks too.
            is_dummy = own or self.moves.move is not None
        note = StepNote(step, agent.epoch, is_dummy, self._tokens, seconds)
        counts.take(by_slot, phy2log, partial(self._deliver, agent, note))

    def _layers_on(self, device: torch.device) -> Tensor:
        """Return the (L,) int64 MoE layers; cached, because the copy to a device waits."""
        layers = self._layers.get(device)
        if layers is None:
            layers = self._layers[device] = torch.tensor(self._rows.layer_ids, device=device)
        return layers

    def run(self, original: Callable[[], Iterator[None]]) -> Iterator[None]:
        """Replace the manager's entry point: rebalance when a plan is due, on all ranks at once.

        Begins with the first forward pass. If the guest did not start, the manager runs as usual.
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
            if self.moves.move is not None:
                self.agreement.end()
                with self.protect_engine("EPLBManager.rebalance"):
                    self.moves.move_finished(self._map())

    def plan(self, steps: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the planner's answer: (phy2log, log2phy, replicas) over hidden layers.

        Args:
            steps: (steps, hidden layers, E) the planner's input.
            num_slots: slots per layer that the planner must fill.

        Returns:
            None if SGLang's own planner must answer: no guest could be started, or SGLang wants
            another number of slots than it has.
        """
        if self.agent is None:
            return None
        metadata = access.metadata()
        hidden = metadata.physical_to_logical_map_cpu.numpy()
        if hidden.shape[1] != num_slots:
            return None
        rows = self.agreement.agree(self._rows.moe(hidden), self._gather)
        full = self._rows.hidden(rows, hidden)
        placement = Placement(full.astype(np.int32), int(metadata.ep_size), int(steps.shape[-1]))
        return (
            torch.from_numpy(full),
            torch.from_numpy(placement.log2phy.astype(np.int64)),
            torch.from_numpy(placement.logcnt.astype(np.int64)),
        )

    def switched(self, layer_ids: list[int], seconds: float) -> None:
        """SGLang's updater switched these hidden layers, on every rank at this pass."""
        if self.agent is None:
            return
        self._changed += layer_ids
        for layer in layer_ids:
            if layer in self._rows.layer_ids:
                self.moves.layer_switched(self._rows.layer_ids.index(layer), seconds)

    def settle(self) -> None:
        """Follow what SGLang changed without a plan; called after the manager."""
        agent, changed, self._changed = self.agent, self._changed, []
        if agent is not None and self.moves.move is None and changed:
            self._follow(agent, self._map())

    # --- around SGLang's loaders, which follow the map in use
    # -------------------------------------

    def before_weights(self) -> None:
        """End the move under way, before the first weight is replaced; collective.

        Further calls do nothing, nor does a call in observe mode, or by SGLang's own rebalance,
        which restores experts of lost ranks.

        Raises:
            Unavailable, GateFailed: see `EngineMoves.begin_reload`; nothing was replaced.
        """
        if self.agent is None or not self.places or self.moves.reloading:
            return
        if not getattr(self.manager._main_generator, "gi_running", False):
            self.moves.begin_reload()

    def weights_loaded(self) -> None:
        """Register the new weights; collective. Without a call it happens at the next pass."""
        if self.agent is None or not self.moves.reloading:
            return
        try:
            model = self.manager._get_model()
            # Some models make the map anew at each access, of the tensors that they have then.
            self._weights = routed_weights(model)
            if words := self._unmovable(model):
                self.agent.disable_migration(words)
        finally:  # Other ranks wait in it.
            self.moves.end_reload()

    # --- HostEngine -------------------------------------------------------------------------------

    def refusal(self, prepare: Prepare, new: Placement) -> tuple[Reason, str] | None:
        """Return why SGLang cannot go to `new`; it does not accept empty slots."""
        del prepare
        empty = int((new.phy2log == EMPTY).sum())
        if empty:
            return Reason.UNSUPPORTED, f"{empty} empty slots: SGLang's maps have none"
        disabled = self._disabled()
        return None if disabled is None else (Reason.UNSUPPORTED, disabled)

    def fault(self) -> str | None:
        """Return why a rebalance does not happen, for the known causes."""
        return self._disagreement() or self._disabled()

    def finish(self, move: Move) -> None:
        """Let the manager begin the move if it has not, and switch the layers that remain."""
        del move  # SGLang goes through all layers, at least one each time.
        for _ in range(len(self._rows.layer_ids) + 2):
            if self.moves.move is None:
                return
            next(self.manager._main_generator)

    def _unmovable(self, model: Any) -> str:
        """Return why SGLang's moves would not bring whole experts; empty if they would."""
        return unserved(model, self._weights) or left_behind(model, self._weights)

    def _disabled(self) -> str | None:
        reason = self.manager._rebalance_disabled_reason
        return None if reason is None else f"SGLang's rebalancing is off: {reason}"

    # --- EngineGuest ------------------------------------------------------------------------------

    def _map(self) -> NDArray[np.int64]:
        return self._rows.moe(access.metadata().physical_to_logical_map_cpu.numpy())

    def _deliver(self, agent: Agent, note: StepNote, counts: NDArray[np.int64]) -> None:
        """Record the counts of a pass, unless a kernel routed it that SGLang does not see."""
        tokens, is_first = note.prepared_tokens, not self._place_in_batch
        if self._side is CountingSide.SOURCE and tokens and is_first and not counts.any():
            agent.disable_migration(
                f"SGLang's recorder counted none of the {tokens} tokens of a pass: the MoE kernel"
                " chooses the experts by itself, and may not follow the map of experts; choose"
                " another --moe-runner-backend, such as flashinfer_trtllm_routed"
            )
            return
        super()._deliver(agent, note, counts)

    def _expert_calls(self) -> Sequence[ExpertCall]:
        model, moe = self.manager._get_model(), access.context().get_exec().moe
        return expert_calls(model, list(routed_weights(model)), str(moe.moe_a2a_backend))

    def _plan_group(self) -> Any:
        return access.cpu_group()
