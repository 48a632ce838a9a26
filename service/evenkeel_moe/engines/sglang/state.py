"""What this plugin reads of SGLang, by attribute and once: layers, slots, weights, and what the recorder counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape

__all__ = ["Rows", "SglangWeights", "counting_side", "initial", "read_shape"]


@dataclass(frozen=True, slots=True)
class Rows:
    """SGLang's maps have a row for every hidden layer; ours only for MoE layers."""

    layer_ids: tuple[int, ...]
    """(L,) hidden layer of each MoE layer, rising."""

    def moe(self, hidden: NDArray[np.generic]) -> NDArray[np.int64]:
        """(hidden layers, S) -> (L, S)."""
        return np.asarray(hidden[list(self.layer_ids)], np.int64)

    def hidden(self, moe: NDArray[np.generic], before: NDArray[np.generic]) -> NDArray[np.int64]:
        """(L, S) -> (hidden layers, S): rows of dense layers stay as they were.

        Raises:
            ShapeMismatch: other sizes.
        """
        if moe.shape != (len(self.layer_ids), before.shape[1]):
            raise ShapeMismatch(
                f"the plan is for {moe.shape} layers and slots, SGLang has"
                f" {(len(self.layer_ids), before.shape[1])}"
            )
        rows = np.array(before, np.int64)
        rows[list(self.layer_ids)] = moe
        return rows


class SglangWeights:
    """ExpertWeights over `model.routed_experts_weights_of_layer`; never written here."""

    def __init__(self, by_layer: Mapping[int, Sequence[Tensor]], rows: Rows) -> None:
        self._tensors = [list(by_layer[layer]) for layer in rows.layer_ids]

    def tensors(self, layer: int, local_slot: int) -> Sequence[Tensor]:
        """Every tensor of the expert in a slot; numbers of one byte as bytes."""
        found = []
        for tensor in self._tensors[layer]:
            row = tensor[local_slot]
            found.append(row.view(torch.uint8) if row.element_size() == 1 else row)
        return found

    def reserve(self, slots: Sequence[tuple[int, int]]) -> bool:
        """Slots own their memory."""
        del slots
        return True

    def release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Slots own their memory."""


def read_shape(
    metadata: Any, by_layer: Mapping[int, Sequence[Tensor]], hf_config: Any
) -> ModelShape:
    """The deployment's shape.

    Raises:
        InvalidInput: sizes that do not fit together, or a model that does not say how many experts a token takes.
    """
    top_k = next(
        (
            value
            for name in ("num_experts_per_tok", "moe_topk", "top_k")
            if isinstance(value := getattr(hf_config, name, None), int) and value > 0
        ),
        None,
    )
    if top_k is None:
        raise InvalidInput(
            f"{type(hf_config).__name__} does not say how many experts a token takes"
        )
    if not by_layer:
        raise InvalidInput("the model has no routed experts whose weights SGLang can move")
    slots, ranks = int(metadata.num_physical_experts), int(metadata.ep_size)
    widest = max(sum(tensor[0].nbytes for tensor in tensors) for tensors in by_layer.values())
    return ModelShape(
        num_layers=len(by_layer),
        num_logical_experts=int(metadata.num_logical_experts),
        num_ranks=ranks,
        slots_per_rank=slots // ranks,
        top_k=top_k,
        bytes_per_expert=widest,
        num_expert_groups=int(getattr(hf_config, "n_group", None) or 1),
    )


def counting_side(gatherer: Any) -> CountingSide:
    """What the recorder's gatherer counts: the tokens this rank routed to all slots, or those its slots received."""
    everywhere = getattr(gatherer, "_enable_global_physical_experts", False)
    return CountingSide.SOURCE if everywhere else CountingSide.DESTINATION


def initial(metadata: Any, rows: Rows) -> Placement:
    """What SGLang starts on."""
    hidden = metadata.physical_to_logical_map_cpu.numpy()
    return Placement(
        rows.moe(hidden).astype(np.int32), int(metadata.ep_size), int(metadata.num_logical_experts)
    )
