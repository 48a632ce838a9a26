"""The parts of SGLang that the plugin reads: layers, slots, weights and counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.model_facts import shared_experts, top_k, widest_expert
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape

_DISPATCH = {
    "static": DispatchModel.NEAREST.value,
    "dynamic": DispatchModel.EVEN.value,
    "lp": DispatchModel.OPTIMAL.value,
}
"""Our names of `--ep-dispatch-algorithm`: a table for each rank that prefers its own replica, a
random replica for each token, and LPLB."""


def dispatcher(moe_config: Any) -> str:
    """Return the name of SGLang's dispatcher, from `get_exec().moe`.

    Waterfill moves shared experts besides what the algorithm does with routed ones; it is named
    where it is on. An algorithm that has no name here keeps SGLang's; none at all is empty.
    """
    if getattr(moe_config, "enable_waterfill", False):
        return "waterfill"
    algorithm = getattr(moe_config, "ep_dispatch_algorithm", None)
    return "" if algorithm is None else _DISPATCH.get(str(algorithm), str(algorithm))


@dataclass(frozen=True, slots=True)
class MoeRows:
    """Converts SGLang's maps, with a row per hidden layer, to ours, with a row per MoE layer."""

    layer_ids: tuple[int, ...]
    """(L,) hidden layer of each MoE layer, ascending."""

    def moe(self, hidden: NDArray[np.generic]) -> NDArray[np.int64]:
        """Return the MoE layers: (hidden layers, S) -> (L, S)."""
        return np.asarray(hidden[list(self.layer_ids)], np.int64)

    def hidden(self, moe: NDArray[np.generic], before: NDArray[np.generic]) -> NDArray[np.int64]:
        """Return `before` with new MoE layers: (L, S) -> (hidden layers, S)."""
        rows = np.array(before, np.int64)
        rows[list(self.layer_ids)] = moe
        return rows


def routed_weights(model: Any) -> dict[int, Sequence[Tensor]]:
    """Return the tensors of the experts of each MoE layer, by hidden layer, ascending.

    Some models hold them in SGLang's `LazyValue`, which is no mapping: it has keys and items only.

    Raises:
        Unsupported: the model does not list them.
    """
    found = getattr(model, "routed_experts_weights_of_layer", None)
    if found is None:
        raise Unsupported(
            f"{type(model).__name__} does not list the tensors of its experts, without which SGLang"
            " moves none: a plan, or its own rebalancing, would end the server"
        )
    return {layer: found[layer] for layer in sorted(found.keys())}


def unserved(model: Any, weights: Mapping[int, Sequence[Tensor]]) -> str:
    """Return why `routed_weights` are not those the model computes with; empty if they are.

    Some models list their tensors while they load, and the quantization replaces them afterwards.
    """
    served = {parameter.data_ptr() for parameter in model.parameters()}
    for layer, tensors in weights.items():
        others = sum(tensor.data_ptr() not in served for tensor in tensors)
        if others:
            return (
                f"{others} of {len(tensors)} tensors that SGLang would move in layer {layer} are no"
                " parameters of the model: SGLang replaced them after it had listed them"
            )
    return ""


def read_shape(
    metadata: Any, by_layer: Mapping[int, Sequence[Tensor]], hf_config: Any
) -> ModelShape:
    """Return the deployment's shape.

    Raises:
        InvalidInput: the sizes do not fit together, or the model has no top-k.
    """
    choices = top_k([hf_config], ("num_experts_per_tok", "moe_topk", "top_k"))
    if not by_layer:
        raise InvalidInput("the model has no routed experts whose weights SGLang can move")
    slots, ranks = int(metadata.num_physical_experts), int(metadata.ep_size)
    return ModelShape(
        num_layers=len(by_layer),
        num_logical_experts=int(metadata.num_logical_experts),
        num_ranks=ranks,
        slots_per_rank=slots // ranks,
        top_k=choices,
        bytes_per_expert=widest_expert(by_layer.values()),
        num_expert_groups=int(getattr(hf_config, "n_group", None) or 1),
        shared_experts=shared_experts(hf_config),
    )


def counting_side(gatherer: Any) -> CountingSide:
    """Return SOURCE if the recorder counts routed tokens, DESTINATION if received ones.

    Raises:
        Unsupported: the gatherer does not tell which.
    """
    name = type(gatherer).__name__
    if name == "_DeepepNormalSinglePassGatherer":  # It counts what DeepEP delivers, on the host.
        return CountingSide.DESTINATION
    everywhere = getattr(gatherer, "_enable_global_physical_experts", None)
    if not isinstance(everywhere, bool):
        raise Unsupported(
            f"SGLang's recorder gathers with {name}, whose _enable_global_physical_experts is"
            f" {everywhere!r}: this plugin cannot tell routed tokens from received ones"
        )
    return CountingSide.SOURCE if everywhere else CountingSide.DESTINATION


def is_health_check(rids: Sequence[str] | None) -> bool:
    """Return True if all requests of a pass are SGLang's own health checks.

    Args:
        rids: names of the requests; None or empty if there are none.
    """
    return bool(rids) and all(rid.startswith("HEALTH_CHECK") for rid in rids or ())


class WarmUp:
    """The request that SGLang's server sends itself at the start; nothing else marks it.

    Args:
        expected: False if SGLang was started with `--skip-server-warmup`.
    """

    def __init__(self, expected: bool) -> None:
        self._rid = None if expected else ""

    def has(self, rids: Sequence[str] | None) -> bool:
        """Return True if a pass is of that request alone, which is the first one of this rank.

        Args:
            rids: names of the requests of the pass; the passes in their order.
        """
        if not rids or is_health_check(rids):
            return False
        if self._rid is None:
            self._rid = rids[0] if len(rids) == 1 else ""
        return all(rid == self._rid for rid in rids)


def initial_placement(metadata: Any, rows: MoeRows) -> Placement:
    """Return the placement SGLang starts with."""
    hidden = metadata.physical_to_logical_map_cpu.numpy()
    return Placement(
        rows.moe(hidden).astype(np.int32), int(metadata.ep_size), int(metadata.num_logical_experts)
    )
