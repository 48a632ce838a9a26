"""vllm-ascend's newer model runner on a machine without its devices.

What differs from vLLM for the plugin, after vllm_ascend/distributed/eplb_state.py,
vllm_ascend/ops/fused_moe/eplb.py and vllm_ascend/worker/worker.py of commit 182b75ea84c.
"""

import importlib.util
import sys

import torch
import torch.distributed as dist

from tests.engines.vllm import engine
from tests.engines.vllm.scenarios import Rank

PACKAGE = "vllm_ascend"


def state_class(base):
    """Return `AscendEplbState`: it rearranges only if some rank has recorded load since."""

    class AscendEplbState(base):  # type: ignore[misc, valid-type]
        def __init__(self, parallel_config, device):
            super().__init__(parallel_config, device)
            self._has_fresh_recorded_load = False

        def step(self, is_dummy=False, is_profile=False, log_stats=False):
            if (
                not is_dummy
                and not is_profile
                and self._should_record_current_step(log_stats=log_stats)
            ):
                self._has_fresh_recorded_load = True
            super().step(is_dummy=is_dummy, is_profile=is_profile, log_stats=log_stats)

        def rearrange(self, is_profile=False, rank_mapping=None):
            if not is_profile:
                flag = torch.tensor([int(self._has_fresh_recorded_load)])
                dist.all_reduce(flag, group=engine.GROUPS.ep.cpu_group)
                if not flag.item():
                    return None
            result = super().rearrange(is_profile=is_profile, rank_mapping=rank_mapping)
            self._has_fresh_recorded_load = False
            return result

    AscendEplbState.__module__ = f"{PACKAGE}.distributed.eplb_state"
    return AscendEplbState


def record_executed(model_state, rank, slots_per_rank, group):
    """Replace what this rank routed by what its slots computed, for all ranks."""
    counts = model_state.expert_load_pass
    dist.all_reduce(counts, group=group)
    counts[:, : rank * slots_per_rank] = 0
    counts[:, (rank + 1) * slots_per_rank :] = 0


def worker_class():
    """Return the worker: without `reset_weights` and `discard`, and of no class of vLLM's own."""
    left_out = ("reset_weights", "discard", "__dict__", "__weakref__")
    kept = {name: value for name, value in vars(engine.Worker).items() if name not in left_out}
    return type("NPUWorker", (), kept | {"__module__": f"{PACKAGE}.worker.worker"})


class AscendRank(Rank):
    """A rank whose engine is vllm-ascend's newer runner."""

    def __init__(self, rank, size, **changes):
        engine.load()
        find_spec = importlib.util.find_spec

        def finds_ascend(name, package=None):
            return find_spec("json") if name == PACKAGE else find_spec(name, package)

        importlib.util.find_spec = finds_ascend
        sys.modules["vllm.envs"].VLLM_USE_V2_MODEL_RUNNER = True  # type: ignore[attr-defined]
        engine.Worker = worker_class()  # type: ignore[misc]

        def use_ascend(one):
            one.modules.state.EplbState = state_class(one.modules.state.EplbState)

        super().__init__(rank, size, use_async=False, before=use_ascend, **changes)
        forward, slots = self.model.forward, self.model.num_local_physical_experts

        def compute(chosen):
            forward(chosen)
            record_executed(self.model_state, self.rank, slots, self.lockstep)

        self.model.forward = compute  # type: ignore[method-assign]


def place(rank, size):
    """Two plans; the second is ordered while no rank records load."""
    one = AscendRank(rank, size)
    one.steps(4)
    metas, counts = one.reported(4)
    before = one.map()
    first = {**one.carry_out(one.target()), "before": before}
    one.state._has_fresh_recorded_load = False
    again = one.target(seed=2)
    one.order(again, "plan-2")
    for _ in range(60):
        one.step(dummy=True)
    waited = one.agent.epoch
    one.until(lambda: one.agent.epoch == 2)
    return {
        "sides": one.sides,
        "tokens": metas["tokens"].tolist(),
        "counts": counts,
        "watched": one.guest.worker_watched,
        "first": first,
        "waited": waited,
        "second": {**one.seen(), "target": again.phy2log},
    }
