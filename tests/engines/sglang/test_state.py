"""SGLang's maps, which also have rows for dense layers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.sglang.experts import left_behind
from evenkeel_moe.engines.sglang.state import (
    MoeRows,
    WarmUp,
    counting_side,
    dispatcher,
    routed_weights,
)


def test_dense_layers_keep_their_rows():
    rows = MoeRows((1, 3))
    hidden = np.arange(16).reshape(4, 4)
    assert np.array_equal(rows.moe(hidden), hidden[[1, 3]])
    new = rows.hidden(np.zeros((2, 4)), hidden)
    assert not new[[1, 3]].any()
    assert np.array_equal(new[[0, 2]], hidden[[0, 2]])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ep_dispatch_algorithm": "static", "enable_waterfill": False}, "nearest"),
        ({"ep_dispatch_algorithm": "dynamic"}, "even"),
        ({"ep_dispatch_algorithm": "lp"}, "optimal"),
        ({"ep_dispatch_algorithm": "fake"}, "fake"),
        ({"ep_dispatch_algorithm": None}, ""),
        ({}, ""),
        ({"ep_dispatch_algorithm": "static", "enable_waterfill": True}, "waterfill"),
    ],
)
def test_the_dispatcher_has_the_planners_name_where_it_has_one(options, name):
    assert dispatcher(SimpleNamespace(**options)) == name


def gatherer(name, **attributes):
    return type(name, (), attributes)()


@pytest.mark.fault(
    "who serves with an SGLang that renamed a part of its recorder",
    "routed tokens were taken for received ones",
)
def test_a_recorder_that_does_not_tell_what_it_counts_is_refused_by_name():
    everywhere = "_enable_global_physical_experts"
    assert counting_side(gatherer("_SelectExperts", **{everywhere: True})) == "source"
    assert counting_side(gatherer("_DeepepLowLatency", **{everywhere: False})) == "destination"
    assert counting_side(gatherer("_DeepepNormalSinglePassGatherer")) == "destination"
    for renamed in ({}, {"_all_physical_experts": True}, {everywhere: None}):
        with pytest.raises(Unsupported, match=f"gathers with _Renamed, whose {everywhere} is None"):
            counting_side(gatherer("_Renamed", **renamed))


def test_a_model_that_does_not_list_the_tensors_of_its_experts_is_refused_by_name():
    class MiniMaxM2ForCausalLM(torch.nn.Module):
        pass

    with pytest.raises(Unsupported, match="MiniMaxM2ForCausalLM does not list the tensors"):
        routed_weights(MiniMaxM2ForCausalLM())


MOVED, COPIED = torch.rand(4, 6), torch.rand(4, 2)


@pytest.mark.parametrize(
    ("attributes", "left"),
    [
        ({"mega_l1_weights": (MOVED, COPIED)}, "mega_l1_weights"),
        ({"hpc_ops_w2_weight_scale": COPIED.to(torch.float8_e4m3fn)}, "hpc_ops_w2_weight_scale"),
        ({"w13": MOVED[:, :3], "w2": MOVED.T, "gemm1_alpha": torch.ones(4, 1)}, ""),
        ({"bias": torch.rand(8), "scale": torch.rand(()), "name": "experts"}, ""),
    ],
)
def test_what_a_kernel_reads_besides_the_moved_tensors_is_named(attributes, left):
    experts = SimpleNamespace(layer_id=3, run_moe_core=len, **attributes)
    model: Any = SimpleNamespace(modules=lambda: [SimpleNamespace(layer_id=3), experts])
    found = left_behind(model, {3: [MOVED], 4: [COPIED]})
    assert found.startswith(f"SGLang does not move {left} of layer 3 with its 4" if left else "")
    assert bool(found) == bool(left)


def test_the_warm_up_is_the_first_request_alone():
    warm_up = WarmUp(expected=True)
    passes = [None, [], ["HEALTH_CHECK_1"], ["a"], ["a"], ["a", "b"], ["b"], ["a"]]
    assert [warm_up.has(rids) for rids in passes] == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    clients = WarmUp(expected=True)
    assert not clients.has(["a", "b"]) and not clients.has(["a"]), "two clients came first"
    assert not WarmUp(expected=False).has(["a"])
