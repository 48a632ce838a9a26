"""What this plugin reads of vLLM's EPLB state, as Protocols: the engine itself is never imported by name here."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import ModelShape

__all__ = ["VllmModelState", "VllmState", "VllmWeights", "read_map", "read_shape"]


class VllmModelState(Protocol):
    """`EplbModelState`: one model's maps, counts and weights."""

    physical_to_logical_map: Tensor
    """(L, S) int64."""
    expert_load_pass: Tensor
    """(L, S) int32 tokens this rank routed to each slot in this step, padding left out."""
    rebalanced: bool
    """A rearrangement is under way."""
    pending_result: Any
    model: Any
    model_name: str


class VllmState(Protocol):
    """`EplbState`: all models of one rank."""

    model_states: dict[str, Any]
    parallel_config: Any
    device: Any
    policy: Any
    is_async: bool
    async_worker: Any
    expert_rearrangement_step: int
    expert_rearrangement_step_interval: int
    expert_load_window_size: int


class VllmWeights:
    """ExpertWeights over `model.expert_weights`: a row of each of the layer's tensors; never written here."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        """Every tensor of the expert in a slot: weights, and scales where the format has them."""
        return [tensor[local_slot] for tensor in self._model.expert_weights[layer]]

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Slots own their memory."""
        del slots
        return True

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Slots own their memory."""


def read_map(state: VllmModelState) -> NDArray[np.int64]:
    """(L, S) int64 the map in use; waits for the device."""
    return np.asarray(state.physical_to_logical_map.cpu().numpy(), np.int64)


def read_shape(state: VllmModelState, num_ranks: int) -> ModelShape:
    """The deployment's shape, from the model itself.

    Raises:
        InvalidInput: sizes that do not fit together, or a model that does not say how many experts a token takes.
    """
    model = state.model
    slots = int(model.num_physical_experts)
    if slots % num_ranks:
        raise InvalidInput(f"{slots} slots do not divide over {num_ranks} ranks")
    widest = max(sum(tensor[0].nbytes for tensor in layer) for layer in model.expert_weights)
    return ModelShape(
        num_layers=int(model.num_moe_layers),
        num_logical_experts=int(model.num_logical_experts),
        num_ranks=num_ranks,
        slots_per_rank=slots // num_ranks,
        top_k=_top_k(model),
        bytes_per_expert=widest,
        num_expert_groups=int(model.num_expert_groups) or 1,
    )


def _top_k(model: Any) -> int:
    """From the first MoE layer, under the names that vLLM's runner and its configuration use."""
    layer = next(iter(model.moe_layers))
    for owner in (layer, getattr(layer, "moe_config", None), getattr(layer, "router", None)):
        for name in ("top_k", "experts_per_token", "num_experts_per_tok"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise InvalidInput(f"{type(layer).__name__} does not say how many experts a token takes")
