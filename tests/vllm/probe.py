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


def register() -> None:
    """Trace every step of the balancer, and let the tests make copies slow."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    import vllm.distributed.eplb.async_worker as async_worker
    from vllm.distributed.eplb.eplb_state import EplbState

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
        lines[0].write(json.dumps({"at": time.time(), "maps": maps}) + "\n")

    @functools.wraps(transfer)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_copies["delay_s"])
        return transfer(*args, **kwargs)

    EplbState.step, async_worker.transfer_layer = traced, slow


class Probe:
    """Calls of the tests through vLLM's `collective_rpc`."""

    model_runner: Any

    def slow_copies(self, seconds: float) -> None:
        """Let the asynchronous worker wait before each layer, as on a slow link."""
        _copies["delay_s"] = seconds

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
