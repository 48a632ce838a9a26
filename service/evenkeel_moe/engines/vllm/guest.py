"""One rank of vLLM and its guest: counts out, plans in, and a watch over what vLLM does with them."""

import time
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed
from numpy.typing import NDArray

from evenkeel_moe.agent.guest import GuestAgent, Move
from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.bootstrap import make_guest
from evenkeel_moe.engines.guest.collective_start import all_or_none, roll_call_of
from evenkeel_moe.engines.guest.counts import StepCounts, StepNote, record_step
from evenkeel_moe.engines.guest.plan_agreement import Orders, gather_rows
from evenkeel_moe.engines.guest.settings import GuestMode, GuestSettings
from evenkeel_moe.engines.vllm.state import (
    VllmModelState,
    VllmState,
    VllmWeights,
    read_map,
    read_shape,
)
from evenkeel_moe.engines.vllm.warm import start_from_file
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import Prepare

__all__ = ["VllmGuest", "is_draft", "timed"]

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed


class VllmGuest:
    """Beside one `EplbState`; balances its target model, the drafter's map is left alone.

    Args:
        settings: the plugin's.
        state: vLLM's.
        groups: module with `get_ep_group` and `get_eplb_group`.
        engine: vLLM's `eplb_state` module.
        link: instead of gRPC to the controllers.
    """

    def __init__(
        self,
        settings: GuestSettings,
        state: VllmState,
        groups: Any,
        engine: Any,
        link: RankLink | None = None,
    ) -> None:
        self.settings = settings
        self.state = state
        self.orders = Orders()
        self.agent: GuestAgent | None = None
        self._groups = groups
        self._engine = engine
        self._link = link
        self._model_state: VllmModelState | None = None
        self._policy: Any = None
        self._counts: StepCounts | None = None
        self._step = 0
        self._top_k = 1
        self._prepared: int | None = None
        self._told_factor = False
        self._due = False

    @property
    def places(self) -> bool:
        """Whether vLLM's balancer is to follow the controller."""
        return self.settings.mode is GuestMode.PLACE

    # --- start ------------------------------------------------------------------------------------------

    def join(self, model_state: VllmModelState, policy: Any) -> None:
        """The target model is registered: start the agent. Collective; what fails leaves vLLM without one.

        Args:
            model_state: of the target model.
            policy: the planner class that must be in force for plans to be given; None in observe mode.
        """
        self._model_state, self._policy = model_state, policy
        try:
            self._start(model_state)
        except Exception as error:  # vLLM serves with or without us
            _log.exception("guest_not_started", detail=str(error)[:300])

    def _start(self, model_state: VllmModelState) -> None:
        group = self._groups.get_ep_group()
        size, rank = int(group.world_size), int(group.rank_in_group)
        roll_call_of(group.cpu_group, self.settings.group_timeout_s)
        shape = all_or_none("read the model", lambda: read_shape(model_state, size), self._gather)
        if self.settings.placement:
            start_from_file(
                self.settings.placement,
                model_state,
                size,
                self._engine,
                group.device_group,
                self._gather,
            )
        self._top_k = shape.top_k
        self._counts = StepCounts(shape.num_logical_experts, self._deliver)

        def make() -> GuestAgent:
            return make_guest(
                self.settings,
                rank,
                shape,
                Placement(read_map(model_state).astype(np.int32), size, shape.num_logical_experts),
                VllmWeights(model_state.model),
                self,
                broadcast=self._broadcast,
                device=torch.device(model_state.physical_to_logical_map.device),
                link=self._link,
            )

        self.agent = all_or_none("start an agent", make, self._gather, GuestAgent.close)
        if not self.places:
            self.agent.observe_as_asked()
        elif self.state.policy is not self._policy:
            self.agent.disable_migration(
                f"vLLM's EPLB plans with {self.state.policy.__name__}, not with the controller's plans:"
                " another plugin replaced the planner"
            )
        elif getattr(self.state.parallel_config, "enable_elastic_ep", False):
            self.agent.disable_migration(
                "elastic expert parallelism changes the ranks: plans are not given to it"
            )
        _log.info("guest_started", deployment=self.settings.deployment, rank=rank, shape=str(shape))

    # --- around vLLM's step -----------------------------------------------------------------------------

    def prepared(self, num_tokens: int) -> None:
        """vLLM says how many real tokens the coming forward pass has."""
        self._prepared = num_tokens

    def before_step(self, *, dummy: bool) -> None:
        """After the forward pass, before vLLM looks at its balancer: count, then stand at the boundary.

        Raises:
            GateFailed: see `GuestAgent.step_boundary`.
        """
        model_state, agent = self._model_state, self.agent
        if model_state is None or agent is None or self._counts is None:
            return
        self._count(
            StepNote(self._step, agent.epoch, dummy, self._prepared), self._counts, model_state
        )
        self._prepared = None
        self.orders.step = self._step
        self._step += 1
        try:
            agent.step_boundary()
        finally:  # a rank that left the trigger alone would rearrange without the others
            if self.places:
                self._set_trigger()

    def _count(self, note: StepNote, counts: StepCounts, model_state: VllmModelState) -> None:
        """What fails here costs the telemetry of this rank, never the step, and never the gate's rhythm (R9)."""
        try:
            counts.pick_up()
            counts.take(note, model_state.expert_load_pass, model_state.physical_to_logical_map)
        except Exception:
            counts.failed(note.step)

    def _set_trigger(self) -> None:
        """vLLM rearranges when its counter reaches the interval: at our step, and at no other."""
        state = self.state
        if self._due:
            state.expert_rearrangement_step = state.expert_rearrangement_step_interval
        elif state.expert_rearrangement_step + 1 >= state.expert_rearrangement_step_interval:
            state.expert_rearrangement_step = 0

    # --- what vLLM's balancer does ----------------------------------------------------------------------

    def plan(self, current: NDArray[np.int64]) -> NDArray[np.int64]:
        """The map to go to, agreed over the EPLB CPU group; called by vLLM once per rank, on any thread."""
        return self.orders.answer(current, self._gather)

    def rearranging(self) -> None:
        """vLLM begins a rearrangement."""
        self._due = False

    def concerns(self, layers: int, slots: int) -> bool:
        """Whether a map of this size is the target model's, and a guest is there to answer for it."""
        model_state = self._model_state
        return (
            self.agent is not None
            and model_state is not None
            and tuple(model_state.physical_to_logical_map.shape) == (layers, slots)
        )

    def layer_committed(self, model_state: Any, layer: int, seconds: float) -> None:
        """vLLM's asynchronous mode switched one layer, on every rank at this step."""
        mine = self._model_state
        if mine is None or model_state is not mine or self.agent is None:
            return
        if self.agent.move is not None and self.orders.move is not None:
            self.agent.layer_switched(layer, seconds)
        if layer == int(mine.model.num_moe_layers) - 1:
            self._ended()

    def all_committed(self, model_state: Any, seconds: float) -> None:
        """vLLM's synchronous mode switched every layer at once."""
        if model_state is not self._model_state or self.agent is None:
            return
        move = self.agent.move
        for layer in move.layers if move is not None else ():
            self.agent.layer_switched(layer, seconds)
        self._ended()

    def _ended(self) -> None:
        """A rearrangement is through: ours, or one that nobody here asked for."""
        agent, model_state = self.agent, self._model_state
        assert agent is not None
        assert model_state is not None
        now = read_map(model_state)
        if agent.move is not None:
            self.orders.move = None
            agent.move_finished(now)
        elif not np.array_equal(now, agent.placement.phy2log):
            if self.places:
                agent.disable_migration(
                    "vLLM's EPLB moved experts that no plan moved: another writer beside ours"
                )
            agent.engine_rebalanced(now)

    # --- HostEngine -------------------------------------------------------------------------------------

    def refusal(self, prepare: Prepare, new: Placement) -> tuple[Reason, str] | None:
        """vLLM takes any map of its own shape, empty slots included."""
        del prepare
        model_state = self._model_state
        if model_state is None or self.state.policy is not self._policy:
            return Reason.UNSUPPORTED, f"vLLM plans with {self.state.policy.__name__}"
        have = tuple(model_state.physical_to_logical_map.shape)
        if new.phy2log.shape != have:
            return (
                Reason.WRONG_SHAPE,
                f"the plan is for {new.phy2log.shape} layers and slots, vLLM has {have}",
            )
        if self.state.is_async and not self._worker_lives():
            return Reason.UNSUPPORTED, "vLLM's asynchronous EPLB worker has ended"
        return None

    def begin(self, move: Move) -> None:
        """Let vLLM rearrange at this very step; its planner will ask for the plan."""
        self.orders.move, self._due = move, True
        self.orders.refused = ""

    def fault(self) -> str | None:
        """The known ways in which vLLM's balancer stops without a word."""
        if self.orders.refused:
            return f"the ranks did not agree on the plan: {self.orders.refused}"
        if not self.state.is_async:
            return None
        if not self._worker_lives():
            return "vLLM's asynchronous EPLB worker has ended (its log says `async loop error`); it is not restarted"
        agent, model_state = self.agent, self._model_state
        if agent is None or agent.move is None or model_state is None or self._due:
            return None
        if not model_state.rebalanced and model_state.pending_result is None and self._began():
            return "vLLM's ranks stopped the rearrangement between two layers (its log says `coordinated stop`)"
        return None

    def _began(self) -> bool:
        """Whether vLLM took up the rearrangement we asked for."""
        agent = self.agent
        return agent is not None and agent.move is not None and agent.move.quiet_steps > 1

    def _worker_lives(self) -> bool:
        worker = self.state.async_worker
        return worker is None or bool(worker.is_alive())

    # --- small parts ------------------------------------------------------------------------------------

    def _deliver(self, note: StepNote, counts: NDArray[np.int64]) -> None:
        agent = self.agent
        if agent is None:
            return
        routed = int(counts[0].sum())
        tokens = routed // self._top_k
        if (
            note.prepared_tokens
            and not note.dummy
            and not self._told_factor
            and tokens != note.prepared_tokens
        ):
            self._told_factor = True
            _log.warning(
                "tokens_counted_otherwise",
                step=note.step,
                prepared=note.prepared_tokens,
                counted=tokens,
                detail="this all-to-all routes a token on several ranks; shares stay right, totals are multiples",
            )
        record_step(agent, note, counts, tokens, self.settings.phase)

    def _gather(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return gather_rows(row, self._groups.get_eplb_group().cpu_group)

    def _broadcast(self, told: bytes | None) -> bytes:
        """Rank 0's bytes, by two sums: sums are what every kind of vLLM's groups can do."""
        group = self._groups.get_ep_group().cpu_group
        size = torch.tensor([0 if told is None else len(told)], dtype=torch.int64)
        _distributed.all_reduce(size, group=group)
        words = torch.zeros(int(size.item()), dtype=torch.int32)
        if told is not None:
            words += torch.tensor(list(told), dtype=torch.int32)
        _distributed.all_reduce(words, group=group)
        return bytes(words.tolist())

    def close(self) -> None:
        """End the agent's threads."""
        if self.agent is not None:
            self.agent.close()


def timed(work: Any, *args: Any, **kwargs: Any) -> float:
    """Seconds that a call took."""
    began = time.perf_counter()
    work(*args, **kwargs)
    return time.perf_counter() - began


def is_draft(model_name: str | None) -> bool:
    """Whether `add_model` was given a drafter."""
    if model_name is not None and not isinstance(model_name, str):
        raise InvalidInput(f"model_name is {type(model_name).__name__}")
    return model_name is not None and model_name.endswith("(draft)")
