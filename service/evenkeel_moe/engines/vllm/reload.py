"""Brings other weights to the slots where the plans have put their experts.

vLLM's loaders write the experts of a checkpoint into the slots of the map with which vLLM starts,
whatever map is in use (vLLM pull request 55228), and a layer that its asynchronous worker has
copied before would overwrite newer weights. So the rearrangement under way ends first, the experts
go back to the map of the start before the first weight is replaced, and to the map in use after
the last one.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.engines.guest.plan_agreement import gather_rows
from evenkeel_moe.engines.vllm.state import VllmModelState, VllmState, read_map
from evenkeel_moe.engines.vllm.warm import move_experts

_log = structlog.get_logger(__name__)
_REBALANCED, _PENDING, _STOPPED = range(3)


class ReloadMap:
    """The map in use, while the experts are where vLLM loads them.

    Args:
        model_state: of the target model.
        engine: vLLM's `eplb_state` module.
        group: vLLM's EP group.
    """

    def __init__(self, model_state: VllmModelState, engine: Any, group: Any) -> None:
        self._model_state = model_state
        self._engine = engine
        self._group = group
        self._in_use: NDArray[np.int64] | None = None
        self.discarded = False
        """True while vLLM's device memory is discarded, with the weights and the maps in it."""

    def go_to_start(self, *, discard: bool) -> None:
        """Move the experts to the map of the start; collective.

        Args:
            discard: vLLM is about to discard the weights, so there is nothing to move.
        """
        self._in_use, self.discarded = read_map(self._model_state).copy(), discard
        if not discard:
            self._move(self._start_of(self._model_state))

    def restore(self, state: VllmState) -> None:
        """Write the tables that were discarded with the weights, as vLLM has them at the start.

        A drafter is at the map of the start always: no plan moves its experts.
        """
        self.discarded = False
        for each in state.model_states.values():
            start = torch.from_numpy(self._start_of(each))
            self._engine._commit_eplb_maps(each, new_physical_to_logical_map=start)
            for counts in (each.expert_load_pass_buffer, each.expert_load_window):
                counts.zero_()
            each.last_expert_load.fill_(1)
        state._update_layer_should_record()

    def go_back(self) -> None:
        """Move the experts to the map that was in use; collective."""
        if self._in_use is not None:
            self._move(self._in_use)
            self._in_use = None

    def _move(self, target: NDArray[np.int64]) -> None:
        began = time.perf_counter()
        moved = move_experts(self._model_state, target, self._engine, self._group.device_group)
        seconds = round(time.perf_counter() - began, 3)
        _log.info("experts_moved_for_weights", slots_changed=moved, seconds=seconds)

    def _start_of(self, model_state: VllmModelState) -> NDArray[np.int64]:
        """Return the (L, S) map with which vLLM starts, which its loaders follow."""
        model = model_state.model
        row = self._engine.EplbState.build_initial_global_physical_to_logical_map(
            model.num_routed_experts, model.num_redundant_experts
        )
        return np.tile(np.array(row, np.int64), (int(model.num_moe_layers), 1))


def finish_rearrangement(
    state: VllmState, engine: Any, group: Any, is_stopped: Callable[[], bool]
) -> bool:
    """Switch every layer that vLLM's asynchronous worker still has to bring; collective.

    vLLM itself switches one layer at each step.

    Args:
        state: vLLM's `EplbState`.
        engine: vLLM's `eplb_state` module.
        group: vLLM's EP group.
        is_stopped: returns True if the worker of this rank brings no further layer.

    Returns:
        False, on all ranks, if the rearrangement of a model cannot end.
    """
    for model_state in state.model_states.values():
        while True:
            row = np.zeros(3, np.int64)
            row[_REBALANCED] = model_state.rebalanced
            row[_PENDING] = model_state.pending_result is not None
            row[_STOPPED] = model_state.rebalanced and is_stopped()
            rows = gather_rows(row, group.cpu_group)
            if not rows[:, _REBALANCED].any():
                break
            if rows[:, _STOPPED].any() or not rows[:, _REBALANCED].all():
                return False
            if rows[:, _PENDING].all():
                engine._move_to_workspace(model_state=model_state, ep_rank=group.rank_in_group)
            else:
                time.sleep(0.001)
    return True
