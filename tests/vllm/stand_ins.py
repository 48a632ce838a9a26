"""What vLLM 0.32.0 lacks on a CPU to run EPLB over several ranks. vLLM loads it as a plugin.

Each function stands in for the lines of vLLM that its docstring names; `...` is
`model_executor/layers/fused_moe`. All other code is vLLM's own: scheduler, engine core, executors,
API server, loaders, `EplbState`, its planner, its asynchronous worker and its copies over Gloo.

Because of the stand-ins, runs with them do not show:

- that a GPU kernel routes by the map in use and counts each token (`route_by_the_map`);
- that copies and forward passes are ordered by streams and events of a device (`no_streams`): on a
  CPU every tensor operation has ended when the call returns;
- the all-to-all of data-parallel ranks (`gather_over_gloo`);
- CUDA graphs, NCCL, NIXL and quantised experts, which nothing here replaces.
"""

import os
import time
from importlib import import_module
from typing import Any

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_done: list[bool] = []


def register() -> None:
    """Replace what is missing; vLLM calls it once or more in each of its processes."""
    if _done:
        return
    _done.append(True)
    accept_the_platform()
    keep_the_start_method()
    route_by_the_map()
    leave_out_other_ranks_experts()
    no_streams()
    make_the_balancer()
    warm_up_the_kernels()
    gather_over_gloo()


def accept_the_platform() -> None:
    """`config/parallel.py:560`: EPLB is only accepted on GPUs."""
    import vllm.config.parallel as parallel

    class LikeCuda:
        def __init__(self, platform: Any) -> None:
            self._platform = platform

        def __getattr__(self, name: str) -> Any:
            return getattr(self._platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    parallel.current_platform = LikeCuda(parallel.current_platform)


def keep_the_start_method() -> None:
    """`platforms/cpu.py:409`: on a CPU, processes are spawned whatever the environment says.

    A process that is forked does not import vLLM again, which takes 14 s of a core.
    """
    from vllm.platforms.cpu import CpuPlatform

    chosen = os.environ[START_METHOD]
    update = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        update(cls, vllm_config)
        os.environ[START_METHOD] = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def route_by_the_map() -> None:
    """`.../router/base_router.py:144`: a Triton kernel on GPUs, the identity elsewhere.

    Does what the kernel above that line does, with torch: maps logical experts to slots, spreads
    the tokens over replicas by the same hash, and counts the tokens that are not padding.
    """
    import torch
    import vllm.model_executor.layers.fused_moe.router.base_router as router

    def map_and_record(
        topk_ids: Any,
        expert_load_view: Any,
        logical_to_physical_map: Any,
        logical_replica_count: Any,
        record_enabled: Any,
        num_unpadded_tokens: Any = None,
    ) -> Any:
        experts = topk_ids.long()
        known = (experts >= 0) & (experts < len(logical_replica_count))
        experts = experts.where(known, experts.new_zeros(()))
        token_hash = (torch.arange(len(experts)) * 2654435769) & 0xFFFFFFFF
        replica = token_hash[:, None] % logical_replica_count[experts].clamp(min=1)
        slots = logical_to_physical_map[experts, replica]
        slots = slots.where(known, slots.new_full((), -1))
        if bool(record_enabled):
            real = slots if num_unpadded_tokens is None else slots[: int(num_unpadded_tokens)]
            counted = torch.bincount(real[real >= 0].flatten(), minlength=len(expert_load_view))
            expert_load_view += counted[: len(expert_load_view)].to(expert_load_view.dtype)
        return slots.to(topk_ids.dtype)

    router.eplb_map_to_physical_and_record = map_and_record


def leave_out_other_ranks_experts() -> None:
    """`.../experts/cpu_moe.py:303`: the CPU kernel takes slots of all ranks, and no `expert_map`.

    Gives it the pairs of token and expert whose expert is on this rank, as a dispatch would, so
    that the time of a rank is that of its own experts.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply_all = CPUUnquantizedExperts.apply

    def apply(self: Any, output: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> None:
        expert_map = kwargs["expert_map"]
        if expert_map is None:
            apply_all(self, output, hidden_states, *args, **kwargs)
            return
        slots = kwargs["topk_ids"]
        row = expert_map[slots.long().clamp(min=0)].where(slots >= 0, -1).to(torch.int32)
        token, choice = (row >= 0).nonzero(as_tuple=True)
        output.zero_()
        if not len(token):
            return
        kwargs["topk_ids"] = row[token, choice][:, None]
        kwargs["topk_weights"] = kwargs["topk_weights"][token, choice][:, None]
        computed = output.new_empty((len(token), output.shape[1]))
        apply_all(self, computed, hidden_states[token], *args, **kwargs)
        output.index_add_(0, token, computed)

    CPUUnquantizedExperts.apply = apply


def no_streams() -> None:
    """`distributed/eplb/eplb_utils.py:25,49`, `async_worker.py:33`, `eplb_state.py:783`.

    torch has events and streams of accelerators only. These do nothing. `v1/worker/cpu/shm.py:61`
    puts an event without times in place when it is imported, so it is imported before.
    """
    import torch

    import_module("vllm.v1.worker.cpu.shm")

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._at = 0.0

        def record(self, stream: Any = None) -> None:
            self._at = time.perf_counter()

        def wait(self, stream: Any = None) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: "Event") -> float:
            return 1000 * (other._at - self._at)

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

    torch.Event, torch.Stream = Event, Stream  # type: ignore[assignment,misc]
    torch.accelerator.current_stream = lambda *_: Stream()  # type: ignore[assignment,return-value]
    torch.accelerator.set_stream = lambda *_: None  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda *_: None  # type: ignore[assignment]


def make_the_balancer() -> None:
    """`v1/worker/cpu_model_runner.py:60`: `load_model` leaves out EPLB.

    Does what `gpu_model_runner.py:5045`, `5129` and `5172` do: makes `EplbState`, adds the model,
    and starts the asynchronous worker.
    """
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load_only = CPUModelRunner.load_model

    def load_model(self: Any, load_dummy_weights: bool = False) -> None:
        if not self.parallel_config.enable_eplb:
            load_only(self, load_dummy_weights)
            return
        self.eplb_state = EplbState(self.parallel_config, self.device)
        self.eplb_state.device_index = 0
        load_only(self, load_dummy_weights)
        self._moe_model = get_mixture_of_experts_model(self.model)
        self.eplb_state.add_model(self._moe_model, self.model_config)
        if self.eplb_state.is_async:
            self.eplb_state.start_async_loop()

    CPUModelRunner.load_model = load_model


def warm_up_the_kernels() -> None:
    """`v1/worker/cpu_worker.py:264`: leaves out the warm-up of kernels.

    Runs what `model_executor/warmup/attention_warmup.py:33` runs on GPUs: requests that no client
    sent, through the worker's own `execute_model`. The older model runner, which the CPU uses,
    lacks three attributes for it.
    """
    from types import SimpleNamespace

    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    compile_only = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: Any) -> Any:
        answer, runner = compile_only(self), self.model_runner
        if runner.parallel_config.enable_eplb:
            runner.num_speculative_steps, runner.model_state = 0, None
            runner.kv_connector = SimpleNamespace(set_disabled=lambda _off: None)
            assert run_mixed_prefill_decode_warmup(
                runner, self.execute_model, self.sample_tokens, 24
            )
        return answer

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def gather_over_gloo() -> None:
    """`distributed/device_communicators/base_device_communicator.py:290,331`: not implemented.

    Data-parallel ranks gather their tokens, of which each has another number, and add up the
    outputs of all experts.
    """
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self: Any, mine: Any, sizes: list[int]) -> Any:
        padded = mine.new_zeros((max(sizes), *mine.shape[1:]))
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
        tensors = input_ if isinstance(input_, list) else [input_]
        sizes = sizes or [len(tensors[0])] * self.world_size
        gathered = [gather(self, tensor, sizes) for tensor in tensors]
        return gathered if isinstance(input_, list) else gathered[0]

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: Any = None) -> Any:
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=self.device_group)
        sizes = sizes or [len(total) // self.world_size] * self.world_size
        return total.split(sizes)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
