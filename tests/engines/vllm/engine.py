"""vLLM's real EPLB modules on a machine without a GPU and without vLLM.

All of `vllm/distributed/eplb` is real, from the wheel. Modules whose import would load the engine
are stand-ins: configuration, process groups (real Gloo groups under vLLM's names), logging,
platform, and the protocols for type hints. CPU torch has neither events nor streams, so both do
nothing here.
"""

import contextlib
import importlib
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from evenkeel_moe.engines.vllm import hooks
from tests.engines.driving import expert_rows
from tests.engines.spent import Spent
from tests.engines.vllm import kernels
from tests.engines.wheels import empty_modules, engine_root, stand_in, version_of

VERSION = version_of("vllm", "0.33.0")
EPLB = "vllm.distributed.eplb"
LOADERS = (
    "vllm/v1/worker/gpu_worker.py",
    "vllm/model_executor/layers/fused_moe/routed_experts.py",
)
"""Sources that tests read; they are not imported."""
ELASTIC = (
    "vllm/distributed/elastic_ep/",
    "vllm/distributed/stateless_coordinator.py",
    "vllm/distributed/utils.py",
)
"""See `elastic.load`."""


class InertEvent:
    """torch.Event on a machine without an accelerator: it has always passed."""

    def __init__(self, **_: Any):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.0


class InertStream:
    def synchronize(self):
        pass


class _Logger(logging.Logger):
    def info_once(self, *args, **_):
        self.info(*args)

    def warning_once(self, *args, **_):
        self.warning(*args)


class Groups:
    """The groups of `vllm.distributed.parallel_state` in this process."""

    def __init__(self):
        self.world: Any = None
        self.dp: Any = None
        self.ep: Any = None
        self.eplb: Any = None
        self.tp = SimpleNamespace(rank_in_group=0, world_size=1)
        self.pp = SimpleNamespace(rank_in_group=0, world_size=1)
        self.nodes = 1


GROUPS = Groups()
CONFIG = SimpleNamespace(
    use_v2_model_runner=True,
    model_config=SimpleNamespace(runner_type="generate"),
    parallel_config=SimpleNamespace(distributed_executor_backend=None),
)
"""The part of `VllmConfig` that the plugin reads."""
KV_CACHE = SimpleNamespace(
    num_blocks=50,
    kv_cache_groups=[
        SimpleNamespace(
            layer_names=["a", "b", "c"],
            kv_cache_spec=SimpleNamespace(block_size=16, page_size_bytes=16 * 40, dcp_sharded=True),
        )
    ],
)
"""A `KVCacheConfig`: 50 blocks of 16 tokens, each of 40 bytes in three layers."""


class Worker:
    """How `vllm.v1.worker.gpu_worker.Worker` warms up, and the ways in which it replaces weights.

    Each of them loads through `model.load_weights`, as the original does.
    """

    def __init__(self, state: Any):
        self.model_runner = SimpleNamespace(eplb_state=state)
        self.warm_up: Any = None

    def compile_or_warm_up_model(self) -> None:
        self.warm_up()

    @property
    def model_state(self) -> Any:
        return self.model_runner.eplb_state.model_states["toy-hash"]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_state.model.load_weights(*args, **kwargs)

    def reset_weights(self) -> None:
        for tensors in self.model_state.model.expert_weights:
            for tensor in tensors:
                tensor.zero_()

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        self.model_state.model.load_weights(update_info)

    def finish_weight_update(self) -> None:
        pass

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            state = self.model_runner.eplb_state
            for tensors in self.model_state.model.expert_weights:
                for tensor in tensors:
                    tensor.fill_(3)
            # `add_model` allocates these in the pool of the weights, which level 2 discards.
            for model_state in state.model_states.values():
                for tensor in (
                    model_state.physical_to_logical_map_buffer,
                    model_state.logical_to_physical_map,
                    model_state.logical_replica_count,
                    model_state.expert_load_pass_buffer,
                    model_state.expert_load_window,
                    model_state.last_expert_load,
                ):
                    tensor.fill_(77)
            state.should_record_tensor.fill_(False)

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def discard(self, tags: tuple[str, ...]) -> None:
        pass


class WorkerWrapper:
    """`WorkerWrapperBase` of one rank; its worker allocates nothing."""

    def __init__(self, rank: int, state: Any):
        self.global_rank = rank
        self.worker = Worker(state)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        assert kv_cache_configs[self.global_rank] is KV_CACHE


def group_of(device_group: Any, cpu_group: Any) -> SimpleNamespace:
    return SimpleNamespace(
        device_group=device_group,
        cpu_group=cpu_group,
        world_size=cpu_group.size(),
        rank_in_group=cpu_group.rank(),
        device_communicator=None,
    )


def root_folder() -> Path:
    wanted = ("vllm/distributed/eplb/", *ELASTIC, *LOADERS, *kernels.SOURCES)
    return engine_root("vllm", VERSION, wanted)


def load() -> SimpleNamespace:
    """Import the wheel's modules in this process: (state, worker, execute, policies).

    A version that the plugin does not know yet is tested like one that it knows.
    """
    if "vllm" not in sys.modules:
        hooks.KNOWN_VERSIONS = tuple(sorted({*hooks.KNOWN_VERSIONS, VERSION}))
        torch.Event = InertEvent  # type: ignore[misc, assignment]
        with empty_modules("vllm"):
            _stand_ins()
            kernels.load()
            importlib.import_module(f"{EPLB}.eplb_state")
            for name in ("eplb_communicator", "rebalance_execute", "async_worker"):
                module: Any = importlib.import_module(f"{EPLB}.{name}")
                module.device_stream = lambda _stream: contextlib.nullcontext()
    return SimpleNamespace(
        state=importlib.import_module(f"{EPLB}.eplb_state"),
        worker=importlib.import_module(f"{EPLB}.async_worker"),
        execute=importlib.import_module(f"{EPLB}.rebalance_execute"),
        policies=importlib.import_module(f"{EPLB}.policy"),
        kernels=importlib.import_module(f"{kernels.FUSED_MOE}.modular_kernel"),
        groups=GROUPS,
    )


def _stand_ins() -> None:
    logging.setLoggerClass(_Logger)
    other = type("Other", (), {})
    stand_in("vllm", root_folder() / "vllm", __version__=VERSION)
    stand_in("vllm.v1.worker.worker_base", WorkerWrapperBase=WorkerWrapper)
    stand_in("vllm.v1.worker.gpu_worker", Worker=Worker)
    config: Any = importlib.import_module("vllm.config")
    config.get_current_vllm_config = lambda: CONFIG
    stand_in("vllm.config.utils", compute_hash_cached=lambda config: config.compute_hash())
    stand_in("vllm.config.parallel", EPLBPolicyOption=Literal["default"])
    stand_in("vllm.logger", init_logger=logging.getLogger)
    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda_alike=lambda: False)
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    stand_in("vllm.utils.torch_utils", PIN_MEMORY=False)
    stand_in("vllm.distributed.stateless_coordinator", StatelessGroupCoordinator=other)
    stand_in(
        "vllm.distributed.utils",
        StatelessProcessGroup=other,
        is_weak_contiguous=lambda _: True,
    )
    stand_in("vllm.distributed.nixl_utils", NixlWrapper=None)
    stand_in(
        "vllm.distributed.parallel_state",
        GroupCoordinator=object,
        get_ep_group=lambda: GROUPS.ep,
        get_eplb_group=lambda: GROUPS.eplb,
        get_tp_group=lambda: GROUPS.tp,
        get_pp_group=lambda: GROUPS.pp,
        get_node_count=lambda: GROUPS.nodes,
        in_the_same_node_as=lambda *_: [True],
        is_local_first_rank=lambda: True,
    )


class Config:
    """The part of ParallelConfig that EPLB reads."""

    def __init__(self, *, use_async: bool, step_interval: int = 1000, window_size: int = 8):
        self.eplb_config = SimpleNamespace(
            use_async=use_async,
            step_interval=step_interval,
            window_size=window_size,
            policy="default",
            communicator="torch_nccl",
            log_balancedness=False,
            log_balancedness_interval=1,
            migration_batching_enabled=False,
        )
        self.enable_elastic_ep = False
        self.elastic_ep_max_dp_size = 1
        self.enable_eplb = True
        self.num_ubatches = 0
        self.data_parallel_size = self.decode_context_parallel_size = 1


class ModelConfig:
    model = "toy"

    def compute_hash(self):
        return "toy-hash"


class DraftConfig(ModelConfig):
    runner_type = "draft"

    def compute_hash(self):
        return "draft-hash"


class Model:
    """A MixtureOfExperts for vLLM; the weights of an expert tell which expert it is."""

    def __init__(
        self, modules: Any, rank: int, ranks: int, *, layers=3, experts=6, redundant=2, top_k=2
    ):
        self.num_moe_layers, self.num_logical_experts = layers, experts
        self.num_routed_experts, self.num_redundant_experts = experts, redundant
        self.num_physical_experts = experts + redundant
        self.num_local_physical_experts = self.num_physical_experts // ranks
        self.num_expert_groups, self.num_shared_experts = 1, 0
        initial = modules.state.EplbState.build_initial_global_physical_to_logical_map(
            experts, redundant
        )
        local = slice(
            rank * self.num_local_physical_experts, (rank + 1) * self.num_local_physical_experts
        )
        self.expert_weights = []
        self.moe_layers = []
        self.spent = Spent()
        for layer in range(layers):
            rows = [expert_rows(layer, expert) for expert in initial[local]]
            self.expert_weights.append([torch.stack(column) for column in zip(*rows, strict=True)])
            runner = kernels.make_layer(
                modules.kernels, self.spent, is_monolithic=layer == layers - 1
            )
            runner.top_k, runner.eplb_state = top_k, modules.state.EplbLayerState()
            self.moe_layers.append(runner)

        self._initial, self._first = initial, local.start
        self.version = 0

    def load_weights(self, weights: Any) -> None:
        """Load ((layer, expert), rows) as vLLM does: into the slots of the initial map."""
        for (layer, expert), rows in weights:
            for local in range(self.num_local_physical_experts):
                if self._initial[self._first + local] == expert:
                    for tensor, row in zip(self.expert_weights[layer], rows, strict=True):
                        tensor[local].copy_(row)

    def checkpoint(self, version: int) -> Any:
        """Yield all experts of a version; from now on the slots must hold this version."""
        self.version = version
        for layer in range(self.num_moe_layers):
            for expert in range(self.num_logical_experts):
                yield (layer, expert), expert_rows(layer, expert, version)

    def set_eplb_state(self, expert_load_view, logical_to_physical_map, logical_replica_count):
        for index, layer in enumerate(self.moe_layers):
            layer.eplb_state.set_layer_state(
                index, expert_load_view, logical_to_physical_map, logical_replica_count
            )

    def forward(self, chosen: torch.Tensor) -> None:
        """Route (tokens, k) experts to slots, count them as vLLM's kernel does, and compute."""
        for layer in self.moe_layers:
            state = layer.eplb_state
            unpadded = int(state.num_unpadded_tokens_tensors[0])
            index = torch.arange(chosen.numel()).view_as(chosen) // chosen.shape[1]
            replica = (index * 2654435769 & 0xFFFFFFFF) % state.logical_replica_count[chosen]
            slots = state.logical_to_physical_map[chosen, replica]
            if bool(state.should_record_tensor):
                real = slots[:unpadded].reshape(-1)
                state.expert_load_view.scatter_add_(
                    0, real, torch.ones_like(real, dtype=torch.int32)
                )
            rows = chosen[:, :1].float().expand(-1, 8).contiguous()
            assert torch.equal(kernels.compute(layer, rows), 2 * rows)

    def wrong_slots(self, rank: int, phy2log: torch.Tensor) -> list[tuple[int, int]]:
        """Return each filled (layer, local slot) whose bytes are not those of its expert."""
        wrong = []
        for layer, tensors in enumerate(self.expert_weights):
            for local in range(self.num_local_physical_experts):
                expert = int(phy2log[layer, rank * self.num_local_physical_experts + local])
                if expert < 0:
                    continue
                want = expert_rows(layer, expert, self.version)
                if not all(
                    torch.equal(have[local], must) for have, must in zip(tensors, want, strict=True)
                ):
                    wrong.append((layer, local))
        return wrong


def start_worker(modules: Any, state: Any, fail: threading.Event | None = None) -> threading.Thread:
    """Run vLLM's asynchronous worker on a thread, as vLLM does on a machine with a device."""

    def run():
        try:
            modules.worker.transfer_run_periodically(state, InertStream())
        except Exception as error:
            logging.getLogger("vllm").warning(
                "async loop error (Rank %d): %s", GROUPS.ep.rank_in_group, error
            )
            if fail is not None:
                fail.set()

    state.async_worker = threading.Thread(target=run, daemon=True)
    state.async_worker.start()
    return state.async_worker


def be_rocm(state: Any) -> None:
    """Let vLLM's EPLB state and the plugin believe that they run on ROCm; the kernels do not."""
    torch.version.hip = "7.0"  # type: ignore[assignment]
    platform = state.current_platform
    state.current_platform = SimpleNamespace(**{**vars(platform), "is_rocm": lambda: True})
