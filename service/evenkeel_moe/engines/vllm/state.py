"""The parts of vLLM's EPLB state that the plugin reads; vLLM itself is not imported."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.guest.model_facts import shared_experts, top_k, widest_expert
from evenkeel_moe.engines.vllm.hooks import ASCEND
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.topology import ModelShape


class VllmModelState(Protocol):
    """`EplbModelState`: the maps, counts and weights of one model."""

    physical_to_logical_map: Tensor
    """(L, S) int64."""
    expert_load_pass: Tensor
    """(L, S) int32 tokens this rank routed to each slot in this step, without padding."""
    rebalanced: bool
    """True while a rearrangement runs."""
    pending_result: Any
    model: Any


class VllmState(Protocol):
    """`EplbState`: all models of one rank."""

    parallel_config: Any
    policy: Any
    model_states: dict[str, Any]
    is_async: bool
    async_worker: Any
    expert_rearrangement_step: int
    expert_rearrangement_step_interval: int

    def rearrange(self) -> Any:
        """Ask the planner, and copy or start the asynchronous worker; collective."""
        ...

    def _update_layer_should_record(self) -> None: ...


def counting_side(state: VllmState) -> CountingSide:
    """Return SOURCE if `expert_load_pass` has what this rank routed, DESTINATION if its slots got.

    vllm-ascend's `AscendEplbState` has what the slots of this rank computed, and 0 for all others.
    """
    bases = {base.__module__.partition(".")[0] for base in type(state).__mro__}
    return CountingSide.DESTINATION if ASCEND in bases else CountingSide.SOURCE


def rates_maps(state: VllmState) -> bool:
    """Return True if vLLM rates each new map itself, which fails at a slot without an expert."""
    return torch.version.hip is not None and not state.is_async


def read_map(state: VllmModelState) -> NDArray[np.int64]:
    """Return the (L, S) int64 map in use; waits for the device."""
    return np.asarray(state.physical_to_logical_map.cpu().numpy(), np.int64)


def read_shape(state: VllmModelState, num_ranks: int) -> ModelShape:
    """Return the deployment's shape, read from the model.

    Raises:
        InvalidInput: the sizes do not fit together, or the model has no top-k.
    """
    model = state.model
    slots = int(model.num_physical_experts)
    if words := undivided(slots, "slots", num_ranks, "ranks"):
        raise InvalidInput(words)
    if len(model.expert_weights) != int(model.num_moe_layers):
        raise InvalidInput(
            f"the model has weights of {len(model.expert_weights)} MoE layers here and maps of"
            f" {int(model.num_moe_layers)}: vLLM itself cannot move experts of this pipeline stage"
        )
    layer = next(iter(model.moe_layers))
    owners = (layer, getattr(layer, "moe_config", None), getattr(layer, "router", None))
    return ModelShape(
        num_layers=int(model.num_moe_layers),
        num_logical_experts=int(model.num_logical_experts),
        num_ranks=num_ranks,
        slots_per_rank=slots // num_ranks,
        top_k=top_k(owners, ("top_k", "experts_per_token", "num_experts_per_tok")),
        bytes_per_expert=widest_expert(model.expert_weights),
        num_expert_groups=int(model.num_expert_groups) or 1,
        shared_experts=shared_experts(getattr(model, "config", None)),
    )


def is_draft(model_config: Any, model_name: str | None = None) -> bool:
    """Return True if `add_model` got a draft model; vLLM 0.31 gives it no name."""
    if model_name is not None and not isinstance(model_name, str):
        raise InvalidInput(f"model_name is {type(model_name).__name__}")
    named = model_name is not None and model_name.endswith("(draft)")
    return named or getattr(model_config, "runner_type", None) == "draft"
