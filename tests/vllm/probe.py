"""What the tests read inside the engine: a trace of the maps, the bytes of the slots, pids.

vLLM loads `register` as a plugin and `Probe` as the extension of its worker. Each rank writes its
own files, because vLLM returns the answers of one data-parallel rank only.
"""

import functools
import hashlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

FOLDER = "EVENKEEL_TEST_PROBE"
"""Variable with the folder of the files."""

_copies = {"delay_s": 0.0}
_experts = {"repeated": 0.0}
_computed: dict[str, Any] = {"tokens": 0, "pairs": [], "seconds": []}
"""Of the step under way: its tokens, and for each layer the pairs of token and expert that this
rank computed, and the seconds it took."""


def register() -> None:
    """Trace every step of the balancer, and let the tests make copies or experts slow."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    import vllm.distributed.eplb.async_worker as async_worker
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernelModularImpl

    if getattr(EplbState, "_evenkeel_traced", False):
        return
    EplbState._evenkeel_traced = True
    step, transfer = EplbState.step, async_worker.transfer_layer
    lines: list[Any] = []

    @functools.wraps(step)
    def traced(
        state: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        step(state, is_dummy, is_profile, log_stats)
        if not lines:
            path = Path(folder) / f"trace.{_rank()}.{os.getpid()}"
            lines.append(path.open("w", buffering=1, encoding="utf-8"))
        table = _model_state(state).physical_to_logical_map.numpy()
        maps = [zlib.crc32(row.tobytes()) for row in table]
        line = {"at": time.time(), "maps": maps, **_computed}
        lines[0].write(json.dumps(line) + "\n")
        _computed.update(tokens=0, pairs=[], seconds=[])

    @functools.wraps(transfer)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_copies["delay_s"])
        return transfer(*args, **kwargs)

    experts = FusedMoEKernelModularImpl._fused_experts

    @functools.wraps(experts)
    def repeated(self: Any, *args: Any, **kwargs: Any) -> Any:
        began, tokens = time.thread_time(), len(kwargs["a1q"])
        rows = round(_experts["repeated"] * tokens)
        if rows:
            some = {name: kwargs[name][:rows] for name in ("a1q", "topk_weights", "topk_ids")}
            experts(self, *args, **kwargs | some | {"output_alias": None})
        output = experts(self, *args, **kwargs)
        _computed["tokens"] = tokens
        mine = kwargs["expert_map"][kwargs["topk_ids"].long().clamp(min=0)] >= 0
        _computed["pairs"].append(int(mine.sum()))
        _computed["seconds"].append(time.thread_time() - began)
        return output

    EplbState.step, async_worker.transfer_layer = traced, slow
    FusedMoEKernelModularImpl._fused_experts = repeated


class Probe:
    """Calls of the tests through vLLM's `collective_rpc`."""

    model_runner: Any

    def slow_copies(self, seconds: float) -> None:
        """Let the asynchronous worker wait before each layer, as on a slow link."""
        _copies["delay_s"] = seconds

    def scale_layer(self, rank: int, layer: int, factor: float) -> None:
        """Let the kernel of a rank scale what the experts in the slots of a layer compute."""
        if _rank() != rank:
            return
        layers = list(_model_state(self.model_runner.eplb_state).model.moe_layers)
        experts = layers[layer].routed_experts.quant_method.moe_kernel.fused_experts
        apply = experts.apply

        def scaled(*args: Any, **kwargs: Any) -> None:
            kwargs["topk_weights"] = kwargs["topk_weights"] * factor
            apply(*args, **kwargs)

        experts.apply = scaled

    def repeat_experts(self, rank: int, share: float) -> None:
        """Let a rank compute its experts twice for a share of the tokens."""
        if _rank() == rank:
            _experts["repeated"] = share

    def write_slots(self, name: str) -> None:
        """Write the map, and the digest of the bytes in each slot of this rank."""
        state = _model_state(self.model_runner.eplb_state)
        digests = []
        for layer in state.model.expert_weights:
            rows = range(len(layer[0]))
            digests.append([_digest([tensor[row] for tensor in layer]) for row in rows])
        found = {"map": state.physical_to_logical_map.tolist(), "digests": digests}
        path = Path(os.environ[FOLDER]) / f"{name}.{_rank()}"
        path.write_text(json.dumps(found), encoding="utf-8")


def _digest(tensors: list[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _model_state(state: Any) -> Any:
    return next(iter(state.model_states.values()))


def _rank() -> int:
    from vllm.distributed.parallel_state import get_ep_group

    return int(get_ep_group().rank_in_group)
