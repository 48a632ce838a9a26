"""vllm-ascend's own reader of expert maps, from its wheel; the NPU is a stand-in."""

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.wheels import empty_modules, engine_root, stand_in

VERSION = "0.23.0"
WHEEL = "vllm-ascend", VERSION, ("vllm_ascend/eplb/core/eplb_utils.py",)


def expert_maps(rank: int, size: int, *, path: str, layers: int, experts: int, ranks: int) -> Any:
    """Return, for each layer, the slots of each rank's experts, and the replica a rank uses."""
    del rank, size
    root = engine_root(*WHEEL)
    stand_in("vllm")
    stand_in("vllm.logger", logger=logging.getLogger("vllm"))
    stand_in("vllm_ascend", root / "vllm_ascend")
    torch.Tensor.npu = lambda self: self  # type: ignore[attr-defined]
    with empty_modules("vllm"):
        utils = importlib.import_module("vllm_ascend.eplb.core.eplb_utils")
    config = SimpleNamespace(expert_map_path=path, dynamic_eplb=False, num_redundant_experts=0)
    found = []
    for layer in range(layers):
        log2phy = []
        for ep_rank in range(ranks):
            moe = SimpleNamespace(num_experts=experts, ep_size=ranks, ep_rank=ep_rank)
            every, local, replicas, redundant = utils.init_eplb_config(config, layer, moe)
            assert torch.equal(every[ep_rank], local)
            log2phy.append(replicas.tolist())
        found.append({"maps": every.tolist(), "log2phy": log2phy, "redundant": redundant})
    return found
