"""One rank's guest in vLLM: reports counts, delivers plans, and watches the rearrangements."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.device_recorder import StepCounts
from evenkeel_moe.agent.engine_moves import Move
from evenkeel_moe.agent.ports import GateFailed, RankLink
from evenkeel_moe.agent.together import together
from evenkeel_moe.engines.guest.bootstrap import EngineFacts, Former, agree_on_former
from evenkeel_moe.engines.guest.collective_start import require_plugin_in_group
from evenkeel_moe.engines.guest.counts import StepNote
from evenkeel_moe.engines.guest.engine_guest import EngineGuest
from evenkeel_moe.engines.guest.expert_times import ExpertCall
from evenkeel_moe.engines.guest.plan_agreement import map_digest
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.guest.slot_weights import SlotWeights
from evenkeel_moe.engines.vllm.canary import VllmProbe
from evenkeel_moe.engines.vllm.experts import expert_call, refuse_adapters
from evenkeel_moe.engines.vllm.parallelism import (
    is_elastic,
    joins_group,
    refuse_elastic,
    refuse_older_runner,
    roll_call,
    shrunk_map,
    stage_settings,
)
from evenkeel_moe.engines.vllm.reload import ReloadMap, finish_rearrangement
from evenkeel_moe.engines.vllm.state import (
    VllmModelState,
    VllmState,
    counting_side,
    is_draft,
    rates_maps,
    read_map,
    read_shape,
)
from evenkeel_moe.engines.vllm.warm import move_experts, start_from_file
from evenkeel_moe.errors import EvenkeelError, Reason, Unavailable
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Prepare

_log = structlog.get_logger(__name__)


class VllmGuest(EngineGuest):
    """The guest of one `EplbState`. It balances the target model and ignores a draft model.

    Args:
        settings: the plugin's settings.
        state: vLLM's `EplbState`.
        groups: vLLM's `parallel_state` module.
        engine: vLLM's `eplb_state` module.
        make_link: see `EngineGuest`.
    """

    engine_name = "vLLM"

    def __init__(
        self,
        settings: GuestSettings,
        state: VllmState,
        groups: Any,
        engine: Any,
        make_link: Callable[[], RankLink] | None = None,
    ) -> None:
        super().__init__(settings, make_link)
        self.state = state
        self._groups = groups
        self._engine = engine
        self._model_state: VllmModelState | None = None
        self._policy: Any = None
        self._reload: ReloadMap | None = None
        """None if vLLM loads weights as it does without the plugin."""
        self._probe: VllmProbe | None = None
        self.worker_watched = False
        """True once the plugin learns of this rank's warm-up and of its new weights."""
        self._warming_up = False
        self._prepared: int | None = None
        self._answer: NDArray[np.int64] | None = None
        """The map that the planner gave vLLM for the plan under way."""
        self._side = counting_side(state)
        self._rank: int | None = None
        """This rank's number in the group of the newest agent."""
        self._shape: ModelShape | None = None
        """The shape of that group's model."""
        self._former: Former | None = None
        """That group, while vLLM changes the ranks."""
        self.between_groups = False
        """True while vLLM changes the ranks, and on a rank that joins until it has joined."""
        self._was_resized = False

    # --- start ------------------------------------------------------------------------------------

    def join(
        self,
        model_state: VllmModelState,
        policy: Any,
        watch_resize: Callable[[], None],
    ) -> None:
        """Start the agent for the target model. Collective; after a failure vLLM runs without it.

        Args:
            model_state: of the target model.
            policy: the planner class that vLLM must use so that plans reach it; None in observe
                mode.
            watch_resize: called if vLLM may change the number of ranks; it may raise Unsupported.
        """
        self._model_state, self._policy = model_state, policy
        self._try_to_start(lambda: self._start(model_state, watch_resize))

    @property
    def joined(self) -> bool:
        """True once `join` was called."""
        return self._model_state is not None

    def _start(self, model_state: VllmModelState, watch_resize: Callable[[], None]) -> None:
        elastic = is_elastic(self.state.parallel_config)
        if elastic:
            refuse_elastic(self.settings, self._side)
            watch_resize()
        pipeline = self._groups.get_pp_group()
        stage, stages = int(pipeline.rank_in_group), int(pipeline.world_size)
        refuse_older_runner(stage, stages)
        if self.places:
            refuse_adapters(model_state.model.moe_layers)
        self.settings = stage_settings(self.settings, stage, stages)
        group, timeout_s = self._group, self.settings.group_timeout_s
        if not elastic:
            require_plugin_in_group(group.cpu_group, timeout_s)
        elif joins_group():
            # The ranks of the group serve, and come to no collective call before the resize.
            self.between_groups = True
            roll_call(self._group).announce()
            return
        else:
            roll_call(self._group).require_all(timeout_s)
        self._start_in_group(model_state, None)

    def _start_in_group(self, model_state: VllmModelState, former: Former | None) -> Agent:
        """Start the agent in vLLM's present group, which may come from another; collective."""
        group = self._group
        size, rank = int(group.world_size), int(group.rank_in_group)
        shape = together(self, "read the model", lambda: read_shape(model_state, size))
        tensor_group = self._groups.get_tp_group()
        self._place_in_batch = int(tensor_group.rank_in_group)
        self._ranks_of_batch = int(tensor_group.world_size)
        if self.settings.placement and former is None:
            start_from_file(
                self.settings,
                model_state,
                size,
                self._engine,
                group.device_group,
                self._gather,
            )

        def read() -> EngineFacts:
            placement = Placement(
                read_map(model_state).astype(np.int32), size, shape.num_logical_experts
            )
            device = torch.device(model_state.physical_to_logical_map.device)
            model = model_state.model
            self._probe = VllmProbe(model.moe_layers, rank, shape.slots_per_rank, device)
            return EngineFacts(
                placement,
                SlotWeights(lambda layer: model.expert_weights[layer]),
                device,
                dispatch=DispatchModel.EVEN.value,  # vLLM uses all replicas of an expert alike.
                side=self._side,
                probe=self._probe,
                slots_stay_filled=rates_maps(self.state),
                former=former,
                former_rank=self._rank,
            )

        agent = self._start_agent(rank, shape, read)
        self._rank, self._shape = rank, shape
        if self.places:
            self._reload = ReloadMap(model_state, self._engine, group)
        if self.places and self.state.policy is not self._policy:
            agent.disable_migration(
                f"vLLM's EPLB plans with {self.state.policy.__name__}, not with the controller's"
                " plans: another plugin replaced the planner"
            )
        return agent

    # --- elastic expert parallelism, around vLLM's resize -----------------------------------------

    def leave(self) -> None:
        """End the move under way and the agent, before vLLM changes the ranks.

        Collective over the ranks, which all stand between the same two steps. vLLM goes on whatever
        happens here.

        Raises:
            GateFailed: see `Agent.step_boundary`.
        """
        try:
            if self.agent is not None:
                self.moves.end_move()
        except GateFailed:
            raise
        except Exception as error:
            # vLLM drops what its worker still has to bring; every layer stays whole.
            _log.error("move_given_up", detail=f"vLLM changes the ranks: {error!s:.300}")
        # Not before: to end a move that is due, vLLM rearranges in the group as it is.
        self.between_groups, agent = True, self.agent
        if agent is None:
            return
        self._former, self._reload = Former.of(agent, self._step), None
        self._leave_group(agent)

    def shrunk(self, current: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64] | None:
        """Return the map for the ranks that stay; collective over all ranks of the group.

        Args:
            current: (L, S) the map in use.
            num_ranks: M, the ranks that stay are the first ones.

        Returns:
            (L, M * slots_per_rank); None, on all ranks, if vLLM's own planner must answer.
        """
        shape = self._shape
        if self._former is None or shape is None or current.shape[1] != shape.num_slots:
            return None
        found: NDArray[np.int64] | None = None
        try:
            found = shrunk_map(current, shape, num_ranks)
        except EvenkeelError as error:
            _log.error("resize_not_planned", detail=str(error))
        digests = self._gather(np.array([0 if found is None else map_digest(found)], np.int64))
        if len(np.unique(digests)) > 1:
            _log.error("resize_not_planned", detail="the ranks found different maps")
            return None
        return found

    def grew(self) -> bool:
        """Start the agent of a group with more ranks; collective over it.

        Returns:
            True, on all ranks, if the experts stay where they are: the ranks that join get theirs
            by the controller's next plan.
        """
        self.rejoin()
        return self.agent is not None and self.places

    def rejoin(self) -> None:
        """Start the agent of the group that vLLM has formed; collective over it."""
        (former, self._former), self.between_groups = (self._former, None), False
        self._was_resized, self._prepared = True, None
        model_state = self._model_state
        if model_state is not None:
            self._try_to_start(lambda: self._start_again(model_state, former))
        self._end_left()

    def _start_again(self, model_state: VllmModelState, mine: Former | None) -> None:
        """Start the agent after a resize.

        Args:
            model_state: of the target model.
            mine: the group that this rank was in; None if it joins, or had no agent.
        """
        shape, roll = self._shape, roll_call(self._group)
        if shape is not None or not joins_group():
            if shape is None or mine is None:
                roll.decline()
                raise Unavailable("this rank had no agent before the resize")
            # They do that before vLLM makes the group: nobody waits for a rank without the plugin.
            roll.require_announced(shape.num_ranks)
        roll.require_all(self.settings.group_timeout_s)
        former = together(
            self, "agree on the group before", lambda: agree_on_former(mine, self._gather)
        )
        self._step = former.step
        agent = self._start_in_group(model_state, former)
        # The warm-up of the new group was counted.
        model_state.expert_load_pass.zero_()
        # In observe mode other weights may have been loaded unseen.
        if self.places and agent.hello().checksums_digest != former.checksums:
            agent.disable_migration(
                "the experts are not those from before the resize: restart this group"
            )

    # --- around vLLM's warm-up and steps ----------------------------------------------------------

    def warm_up_began(self) -> None:
        """Count the steps from here on as dummies; vLLM itself takes some of them for served."""
        self._warming_up = True

    def warm_up_ended(self) -> None:
        """Count served steps from here on.

        vLLM's passes that end without a step of its balancer leave their counts behind, for the
        next step to find. They are cleared, as vLLM does at a dummy step.
        """
        self._warming_up, self._prepared = False, None
        self._end_step()
        self._begin_step()
        if self.agent is not None and self._model_state is not None:
            self._model_state.expert_load_pass.zero_()

    def prepared(self, model_config: Any, num_tokens: int) -> None:
        """Note how many real tokens the next forward pass of a model has.

        Args:
            model_config: vLLM's configuration of the model, which vLLM may replace by another one.
            num_tokens: tokens without padding.
        """
        if not is_draft(model_config):
            self._prepared = num_tokens

    def before_step(self, *, dummy: bool) -> None:
        """Count the step and run the step boundary: after the forward pass, before vLLM's balancer.

        Raises:
            GateFailed: see `Agent.step_boundary`.
        """
        model_state, agent = self._model_state, self.agent
        if model_state is None or agent is None:
            return
        if self._step == 0 and not self.worker_watched:
            _log.warning(
                "worker_not_watched",
                detail="vLLM started no worker through WorkerWrapperBase: its KV cache is unknown,"
                " its warm-up counts as served, and sleep at level 2 is not noticed",
            )
        is_dummy, seconds = dummy or self._warming_up, self._end_step()
        note = StepNote(self._step, agent.epoch, is_dummy, self._prepared, seconds)
        deliver = partial(self._deliver, agent, note)

        def take(counts: StepCounts) -> None:
            counted = model_state.expert_load_pass
            if self._side is CountingSide.SOURCE:
                counts.take(counted, model_state.physical_to_logical_map, deliver)
            else:
                counts.take(counted[:, self._slots], None, deliver)

        self._count(note.step, take)
        self._prepared = None
        self._step += 1
        self.weights_loaded()
        try:
            agent.step_boundary()
        finally:  # A rank that skipped the trigger would rearrange without the others.
            if self.places:
                self._set_trigger()
        self._begin_step()

    def _set_trigger(self) -> None:
        """Make vLLM's counter reach its interval at the agreed step, and only then."""
        state = self.state
        if self._due:
            state.expert_rearrangement_step = state.expert_rearrangement_step_interval
        elif state.expert_rearrangement_step + 1 >= state.expert_rearrangement_step_interval:
            state.expert_rearrangement_step = -1  # An interval may be 1, and vLLM adds 1 first.

    # --- called by vLLM's balancer ----------------------------------------------------------------

    def plan(self, current: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the map to go to, agreed over the EPLB CPU group.

        vLLM calls it once per rank, on any thread.
        """
        answer = self.agreement.agree(current, self._gather)
        self._answer = None if answer is current else answer
        return answer

    def rearranging(self) -> None:
        """Note that vLLM begins a rearrangement."""
        self._due, self._answer = False, None

    def rearranged(self) -> None:
        """Move the experts if synchronous vLLM did not; collective then, as vLLM's own copies are.

        On ROCm vLLM leaves out a map that its own load window rates less than 5 % better. The
        agreed plan goes on all the same.
        """
        answer, model_state = self._answer, self._model_state
        if self.state.is_async or answer is None or model_state is None:
            return
        self._answer = None
        if np.array_equal(read_map(model_state), answer):
            return
        _log.info("rearranged_without_vllm", detail="vLLM left the plan out: its gain is too small")
        move_experts(model_state, answer, self._engine, self._group.device_group)

    def concerns(self, layers: int, slots: int) -> bool:
        """Return True if the agent runs and a map of this size is the target model's."""
        model_state = self._model_state
        return (
            self.agent is not None
            and model_state is not None
            and tuple(model_state.physical_to_logical_map.shape) == (layers, slots)
        )

    def layer_committed(self, model_state: Any, layer: int, seconds: float) -> None:
        """Asynchronous mode: vLLM switched one layer, on every rank at this step."""
        target = self._model_state
        if target is None or model_state is not target or self.agent is None:
            return
        if self.moves.move is not None and self.agreement.move is not None:
            self.moves.layer_switched(layer, seconds)
        if layer == int(target.model.num_moe_layers) - 1:
            self._rearrangement_ended(self.agent, target)

    def all_committed(self, model_state: Any, seconds: float) -> None:
        """Synchronous mode: vLLM switched all layers at once."""
        target = self._model_state
        if target is None or model_state is not target or self.agent is None:
            return
        if self.moves.reloading:  # These commits are our own.
            return
        move = self.moves.move
        for layer in move.layers if move is not None else ():
            self.moves.layer_switched(layer, seconds)
        self._rearrangement_ended(self.agent, target)

    def _rearrangement_ended(self, agent: Agent, model_state: VllmModelState) -> None:
        now = read_map(model_state)
        if self.moves.move is not None:
            self.agreement.end()
            self.moves.move_finished(now)
        else:
            self._follow(agent, now)

    # --- around vLLM's loaders --------------------------------------------------------------------

    def before_weights(self, *, discard: bool = False) -> None:
        """Prepare for other weights, before the first is replaced; further calls do nothing.

        Collective: vLLM calls it on all ranks between the same two steps. In observe mode vLLM
        loads as it does without the plugin.

        Args:
            discard: vLLM discards the weights and the maps first.

        Raises:
            Unavailable, GateFailed: see `EngineMoves.begin_reload`; nothing was replaced.
        """
        reload = self._reload
        if reload is None or self.moves.reloading:
            if reload is not None:
                reload.discarded |= discard
            return
        if self._was_resized:
            raise Unavailable(
                "vLLM changed the number of ranks, and where its loaders write since then is not"
                " known to the plugin: restart this group with the new weights"
            )
        self.moves.begin_reload()
        if not finish_rearrangement(self.state, self._engine, self._group, self._worker_ended):
            self.moves.end_reload()
            raise Unavailable("vLLM's EPLB moves experts and does not end: restart this group")
        reload.go_to_start(discard=discard)

    def before_sleep(self, level: int) -> None:
        """End the move under way; at level 2 vLLM also discards the weights. Raises: as above."""
        if level > 1:
            self.before_weights(discard=True)
        elif self._reload is not None and not self.moves.reloading:
            self.moves.end_move()

    def woke(self) -> None:
        """Restore what vLLM discarded with the weights, which follow with a reload."""
        if self._reload is not None and self._reload.discarded:
            self._reload.restore(self.state)
            for kept in (self._probe, self._times):
                if kept is not None:
                    kept.forget()

    def weights_loaded(self) -> None:
        """Go back to the map in use, and register the new weights; collective, ends a reload.

        Without a call it happens at the next step, which routes by the map of the start.
        """
        reload = self._reload
        if reload is None or not self.moves.reloading or reload.discarded:
            return
        reload.go_back()
        self.moves.end_reload()

    # --- HostEngine -------------------------------------------------------------------------------

    def refusal(self, prepare: Prepare, new: Placement) -> tuple[Reason, str] | None:
        """Return why vLLM cannot go to `new`."""
        del prepare
        if self.state.policy is not self._policy:
            return Reason.UNSUPPORTED, f"vLLM plans with {self.state.policy.__name__}"
        if self._worker_ended():
            return Reason.UNSUPPORTED, "vLLM's asynchronous EPLB worker has ended"
        empty = int((new.phy2log == EMPTY).sum())
        # Where a slot is empty now, vLLM rates no map.
        is_filled = self.agent is None or (self.agent.placement.phy2log != EMPTY).all()
        if empty and is_filled and rates_maps(self.state):
            return Reason.UNSUPPORTED, f"{empty} empty slots: vLLM on ROCm, not asynchronous, fails"
        return None

    def fault(self) -> str | None:
        """Return what stopped vLLM's balancer, for the causes that vLLM itself does not report."""
        if (disagreement := self._disagreement()) is not None or not self.state.is_async:
            return disagreement
        if self._worker_ended():
            return (
                "vLLM's asynchronous EPLB worker has ended (vLLM logs `async loop error`);"
                " vLLM does not restart it"
            )
        move, model_state = self.moves.move, self._model_state
        if move is None or model_state is None or self._due:
            return None
        idle = not model_state.rebalanced and model_state.pending_result is None
        # The first step after the request is too early to judge.
        if idle and move.quiet_steps > 1:
            return (
                "vLLM's ranks stopped the rearrangement between two layers"
                " (vLLM logs `coordinated stop`)"
            )
        return None

    def finish(self, move: Move) -> None:
        """Let vLLM begin the move if it has not, and switch the layers that remain."""
        if self._due:
            self.state.expert_rearrangement_step = 0
            self.state.rearrange()

        def is_stopped() -> bool:
            quiet_s = time.monotonic() - move.quiet_since_s
            return self._worker_ended() or quiet_s > self.settings.stall_after_s

        finish_rearrangement(self.state, self._engine, self._group, is_stopped)

    def _worker_ended(self) -> bool:
        worker = self.state.async_worker
        return self.state.is_async and worker is not None and not worker.is_alive()

    # --- EngineGuest ------------------------------------------------------------------------------

    def _expert_calls(self) -> Sequence[ExpertCall]:
        model_state = self._model_state
        layers = () if model_state is None else model_state.model.moe_layers
        return [expert_call(layer) for layer in layers]

    @property
    def _group(self) -> Any:
        return self._groups.get_ep_group()

    def _plan_group(self) -> Any:
        return self._groups.get_eplb_group().cpu_group
