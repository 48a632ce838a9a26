"""Which function of an engine computes the experts, and which engines say that they cannot tell."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.sglang.experts import expert_calls
from evenkeel_moe.engines.vllm.experts import expert_call


def a(name: str, **values: Any) -> Any:
    """Return an object of a class of this name."""
    return type(name, (SimpleNamespace,), {})(**values)


def vllm_layer(kernel: Any = None, *, is_monolithic: bool = False) -> Any:
    method = a("Method", moe_kernel=kernel, is_monolithic=is_monolithic)
    return a("MoERunner", routed_experts=a("RoutedExperts", quant_method=method))


def vllm_kernel(prepare: str, *, is_monolithic: bool = False) -> Any:
    experts = a("Experts")
    impl = a("Impl", fused_experts=experts)
    return a(
        "FusedMoEKernel",
        impl=impl,
        fused_experts=experts,
        prepare_finalize=a(prepare),
        is_monolithic=is_monolithic,
    )


def test_a_kernel_of_vllm_is_timed_between_its_dispatch_and_its_combine():
    kernel = vllm_kernel("DeepEPHTPrepareAndFinalize")
    found = expert_call(vllm_layer(kernel))
    assert (found.owner, found.name) == (kernel.impl, "_fused_experts")


def test_a_monolithic_kernel_of_vllm_is_timed_at_its_experts():
    kernel = vllm_kernel("MoEPrepareAndFinalizeNaiveDPEPMonolithic", is_monolithic=True)
    found = expert_call(vllm_layer(kernel))
    assert (found.owner, found.name) == (kernel.fused_experts, "apply")


@pytest.mark.parametrize(("is_monolithic", "name"), [(False, "apply"), (True, "apply_monolithic")])
def test_a_method_of_vllm_without_a_kernel_communicates_outside(is_monolithic, name):
    layer = vllm_layer(is_monolithic=is_monolithic)
    found = expert_call(layer)
    assert (found.owner, found.name) == (layer.routed_experts.quant_method, name)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (vllm_layer(vllm_kernel("PassThroughPrepareAndFinalize")), "one kernel"),
        (vllm_layer(vllm_kernel("MoonEPPrepareAndFinalize")), "MoonEPPrepareAndFinalize"),
        (a("DeepseekV4MegaMoE"), "DeepseekV4MegaMoE"),
    ],
)
def test_vllms_kernels_that_communicate_are_refused_by_name(layer, named):
    with pytest.raises(Unsupported, match=named):
        expert_call(layer)


class Experts(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.layer_id = layer_id

    def run_moe_core(self, dispatch_output: Any) -> Any:
        return dispatch_output


class Attention(nn.Module):
    layer_id = 1


def sglang_model(*layers: int) -> nn.Module:
    return nn.ModuleList([Attention(), *(nn.ModuleList([Experts(layer)]) for layer in layers)])


def test_sglangs_layers_are_found_in_the_order_of_their_rows():
    found = expert_calls(sglang_model(3, 1, 2, 7), (1, 2, 3), "deepep")
    assert [call.owner.layer_id for call in found] == [1, 2, 3]
    assert {call.name for call in found} == {"run_moe_core"}


@pytest.mark.parametrize(
    ("layers", "backend", "named"),
    [
        ((1, 2), "megamoe", "megamoe"),
        ((1, 2), "flashinfer_megamoe", "one kernel"),
        ((1,), "none", "layer 2 has 0"),
        ((1, 2, 2), "none", "layer 2 has 2"),
    ],
)
def test_a_model_of_sglang_whose_experts_cannot_be_timed_is_refused(layers, backend, named):
    with pytest.raises(Unsupported, match=named):
        expert_calls(sglang_model(*layers), (1, 2), backend)
