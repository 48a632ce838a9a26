"""SGLang's own functions from the dispatch of a layer to its combine, around toy experts.

The module of `FusedMoE` imports most of SGLang. So the class is built from the source of three of
its methods, and what they call outside is replaced.
"""

import ast
import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.spent import Spent

SOURCE = "sglang/srt/layers/moe/fused_moe_triton/layer.py"
LAZY_SOURCE = "sglang/srt/utils/common.py"
_METHODS = ("forward_impl", "_dispatch_with_pre_quant", "run_moe_core")


def fused_moe(root: Path) -> Any:
    """Return a class with the methods of `FusedMoE` that a forward pass runs."""
    parsed = ast.parse((root / SOURCE).read_text())
    (owner,) = [
        node for node in parsed.body if isinstance(node, ast.ClassDef) and node.name == "FusedMoE"
    ]
    owner.bases = []
    owner.body = [
        node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name in _METHODS
    ]
    # Without it the annotations would be evaluated.
    parsed.body = [*ast.parse("from __future__ import annotations").body, owner]
    names: dict[str, Any] = {
        "torch": torch,
        "get_parallel": lambda: SimpleNamespace(tp_group=None),
        "is_allocation_symmetric": lambda: False,
        "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
    }
    exec(compile(parsed, str(root / SOURCE), "exec"), names)
    return names["FusedMoE"]


def lazy_value(root: Path) -> Any:
    """Return the class `LazyValue`, in which models such as Qwen3-MoE hold their weights."""
    parsed = ast.parse((root / LAZY_SOURCE).read_text())
    parsed.body = [
        node for node in parsed.body if isinstance(node, ast.ClassDef) and node.name == "LazyValue"
    ]
    names: dict[str, Any] = {"Callable": Callable}
    exec(compile(parsed, str(root / LAZY_SOURCE), "exec"), names)
    return names["LazyValue"]


def make_layer(kind: Any, layer_id: int, spent: Spent) -> Any:
    """Return a `FusedMoE` of a hidden layer, with a toy dispatcher and toy experts."""

    def dispatch(hidden_states, topk_output):
        spent.dispatch()
        return hidden_states

    def apply(layer, dispatch_output):
        spent.compute(len(dispatch_output))
        return 2 * dispatch_output

    def combine(combine_input):
        spent.combine()
        return combine_input

    made = kind()
    made.layer_id = layer_id
    made.dispatcher = SimpleNamespace(dispatch=dispatch, combine=combine)
    made.quant_method = SimpleNamespace(apply=apply)
    made.reduce_results, made._dwdp_bound = False, False
    return made


def set_weights(layer: Any, matrix: torch.Tensor) -> None:
    """Let a layer compute single experts by SGLang's own torch kernel, over views of (S, 6, 4).

    `alpha` is a scale for each slot that nobody declares.
    """
    compute = layer.quant_method.apply

    def apply(layer, dispatch_output):
        if isinstance(dispatch_output, torch.Tensor):
            return compute(layer, dispatch_output)
        native = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
        combined = native.fused_moe_forward_native(layer, dispatch_output)
        slots = dispatch_output.topk_output.topk_ids[:, 0]
        return combined._replace(hidden_states=combined.hidden_states * layer.alpha[slots][:, None])

    layer.quant_method = SimpleNamespace(apply=apply)
    layer.hidden_size, layer.params_dtype = matrix.shape[-1], matrix.dtype
    layer.moe_runner_config = SimpleNamespace(apply_router_weight_on_input=False, activation="silu")
    layer.w13_weight, layer.w2_weight = matrix[:, :4], matrix[:, 4:].mT
    layer.alpha = torch.ones(len(matrix))
