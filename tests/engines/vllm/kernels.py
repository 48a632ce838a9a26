"""vLLM's real `modular_kernel` around experts and a dispatch that only take time.

Its abstract parts are filled in as vLLM's own kernels fill them in. What its module imports besides
`activation` and `moe_output` is replaced: configuration, micro-batches, workspaces.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.spent import Spent
from tests.engines.wheels import stand_in

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
SOURCES = tuple(
    f"{FUSED_MOE.replace('.', '/')}/{name}.py"
    for name in ("modular_kernel", "moe_output", "activation")
)


def load() -> Any:
    """Import the wheel's `modular_kernel`, once the other stand-ins are there."""
    platform = sys.modules["vllm.platforms"].current_platform
    platform.is_cpu, platform.is_cuda = lambda: True, lambda: False
    stand_in("vllm.envs", VLLM_USE_V2_MODEL_RUNNER=None)
    stand_in(
        f"{FUSED_MOE}.utils",
        _resize_cache=lambda memory, shape: memory[: torch.Size(shape).numel()].view(shape),
    )
    stand_in(
        "vllm.v1.worker.ubatching",
        dbo_enabled=lambda: False,
        dbo_maybe_run_recv_hook=None,
        dbo_register_recv_hook=None,
        dbo_yield=None,
    )
    importlib.import_module(f"{FUSED_MOE}.experts.fused_humming_moe")
    return importlib.import_module(f"{FUSED_MOE}.modular_kernel")


def make_layer(kernels: Any, spent: Spent, *, is_monolithic: bool) -> SimpleNamespace:
    """Return what `moe_layers` holds: a runner whose method has a real `FusedMoEKernel`."""
    if is_monolithic:
        prepare, experts = _monolithic(kernels, spent)
    else:
        prepare, experts = _modular(kernels, spent)
    kernel = kernels.FusedMoEKernel(prepare, experts)
    method = SimpleNamespace(moe_kernel=kernel, is_monolithic=is_monolithic)
    return SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method))


def compute(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Run a layer as the methods of vLLM do."""
    kernel = layer.routed_experts.quant_method.moe_kernel
    weights = torch.ones(2, 4, rows.shape[1])
    common = {
        "activation": None,
        "global_num_experts": 2,
        "expert_map": None,
        "apply_router_weight_on_input": False,
    }
    if kernel.is_monolithic:
        return kernel.apply_monolithic(
            rows, weights, weights, torch.zeros(len(rows), 2), routing_sink=None, **common
        )
    ids = torch.zeros((len(rows), 1), dtype=torch.int64)
    return kernel.apply(rows, weights, weights, torch.ones(len(rows), 1), ids, **common)


def _concrete(base: Any, **methods: Any) -> Any:
    """Return an object of a class that leaves nothing of its base abstract."""
    rest = dict.fromkeys(base.__abstractmethods__)
    standard = sys.modules[base.__module__].FusedMoEActivationFormat.Standard
    rest["activation_format"] = (
        property(lambda _: standard)
        if isinstance(base.__dict__.get("activation_format", property()), property)
        else staticmethod(lambda: standard)
    )
    made = type(f"Toy{base.__name__}", (base,), {**rest, **methods})
    return object.__new__(made)


def _modular(kernels: Any, spent: Spent) -> tuple[Any, Any]:
    def prepare(self, rows, weights, ids, *_, **__):
        spent.dispatch()
        return rows, None, None, None, None

    def finalize(self, output, computed, *_, **__):
        spent.combine()
        output.copy_(computed)

    def apply(self, output, hidden_states, **_):
        spent.compute(len(hidden_states))
        output.copy_(2 * hidden_states)

    def workspace_shapes(self, rows, columns, width, *_):
        return (0,), (0,), (rows, width)

    around = _concrete(
        kernels.FusedMoEPrepareAndFinalizeModular, prepare=prepare, finalize=finalize
    )
    experts = _concrete(
        kernels.FusedMoEExpertsModular,
        apply=apply,
        workspace_shapes=workspace_shapes,
        workspace_dtype=lambda self, dtype: dtype,
        moe_problem_size=lambda self, rows, *_: (2, len(rows), 4, rows.shape[1], 1),
        finalize_weight_and_reduce_impl=lambda self: None,
        activation_format=staticmethod(lambda: kernels.FusedMoEActivationFormat.Standard),
    )
    experts.quant_config = SimpleNamespace(a2_scale=None)
    experts.moe_config = SimpleNamespace(moe_parallel_config=None)
    return around, experts


def _monolithic(kernels: Any, spent: Spent) -> tuple[Any, Any]:
    def prepare(self, rows, router_logits, **_):
        spent.dispatch()
        return rows, None, router_logits

    def finalize(self, computed):
        spent.combine()
        return computed

    def apply(self, hidden_states, **_):
        spent.compute(len(hidden_states))
        return 2 * hidden_states

    around = _concrete(
        kernels.FusedMoEPrepareAndFinalizeMonolithic, prepare=prepare, finalize=finalize
    )
    experts = _concrete(
        kernels.FusedMoEExpertsMonolithic,
        apply=apply,
        activation_format=staticmethod(lambda: kernels.FusedMoEActivationFormat.Standard),
    )
    experts.quant_config = None
    return around, experts
