"""SGLang's real EPLB modules on a machine without a GPU and without SGLang.

Real, from the wheel: `srt/eplb` (manager, recorder, location, updater, algorithms) and
`srt/plugins/hook_registry`. Stand-ins: the runtime context (its configuration), elastic EP
(switched off), environment, metrics, model loading.
"""

import contextlib
import importlib
import logging
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from evenkeel_moe.engines.sglang import hooks as known
from tests.engines.driving import expert_rows
from tests.engines.sglang import experts
from tests.engines.spent import Spent
from tests.engines.wheels import empty_modules, engine_root, stand_in, version_of

VERSION = version_of("sglang", "0.5.23")
LOADERS = (
    "sglang/srt/model_executor/model_runner_components/weight_updater.py",
    "sglang/srt/managers/scheduler_components/weight_updater.py",
    experts.SOURCE,
    experts.LAZY_SOURCE,
    "sglang/srt/layers/moe/utils.py",
    "sglang/srt/model_executor/model_runner.py",
    "sglang/srt/model_executor/forward_batch_info.py",
)
"""Sources that tests read; they are not imported."""
LAYERS, DENSE, EXPERTS, REDUNDANT, TOP_K = 8, 2, 6, 2, 2
MOE_LAYERS = tuple(range(DENSE, LAYERS))

EXEC = SimpleNamespace(
    moe=SimpleNamespace(
        eplb_rebalance_layers_per_chunk=None,
        eplb_rebalance_num_iterations=10_000,
        eplb_min_rebalancing_utilization_threshold=1.0,
        expert_distribution_recorder_buffer_size=16,
        expert_distribution_recorder_mode="stat",
        expert_balancedness_report_mode="off",
        ep_dispatch_algorithm="static",
        enable_waterfill=False,
        ep_num_redundant_experts=REDUNDANT,
        eplb_algorithm="auto",
        ep_join_mode="none",
        moe_a2a_backend="deepep",
        deepep_mode="normal",
        elastic_ep_backend=None,
        init_expert_location="trivial",
    ),
    overlap=SimpleNamespace(enable_two_batch_overlap=False),
    graph=SimpleNamespace(
        cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    ),
)
PARALLEL = SimpleNamespace(
    ep_size=2,
    tp_rank=0,
    tp_size=2,
    attn_tp_rank=0,
    attn_dp_size=1,
    dp_size=1,
    dp_rank=None,
    gathers_fp4=False,
    nnodes=1,
    elastic_ep_initial_size=None,
    ep_join_rank_offset=0,
)
DEVICE = SimpleNamespace(device="cpu", watchdog_timeout=300.0)
DISAGG = SimpleNamespace(disaggregation_mode="null")
SERVING = SimpleNamespace(skip_server_warmup=True)
RESOURCES = SimpleNamespace(expert_distribution_recorder=None, expert_location_metadata=None)


class _Withable:
    def __init__(self):
        self.value = None

    @contextlib.contextmanager
    def with_value(self, value):
        self.value = value
        yield value
        self.value = None


class ModelClass:
    @staticmethod
    def get_model_config_for_expert_location(config):
        location = sys.modules["sglang.srt.eplb.expert_location"].ModelConfigForExpertLocation
        return location(num_layers=LAYERS, num_logical_experts=EXPERTS, num_groups=None)


class _Elastic:
    @staticmethod
    def instance():
        return None

    @staticmethod
    def healthy_rank_state():
        return torch.ones(2)


class _Variable:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


ENVIRONMENT: dict[str, Any] = {}
"""SGLang's environment variables that a scenario sets."""


class _Environment:
    def __getattr__(self, name):
        return _Variable(ENVIRONMENT.get(name, 32 if "CHUNK" in name else None))


def root_folder() -> Path:
    return engine_root(
        "sglang",
        VERSION,
        (
            "sglang/srt/eplb/",
            "sglang/srt/plugins/",
            "sglang/srt/elastic_ep/",
            "sglang/srt/runtime_context",
            "sglang/srt/layers/moe/fused_moe_native.py",
            *LOADERS,
        ),
    )


def load(rank: int) -> SimpleNamespace:
    """Import the wheel's modules in this process.

    A version that the plugin does not know yet is tested like one that it knows.
    """
    if "sglang" not in sys.modules:
        known.KNOWN_VERSIONS = tuple(sorted({*known.KNOWN_VERSIONS, VERSION}))
        PARALLEL.tp_rank = rank
        with empty_modules("sglang"):
            _stand_ins(root_folder() / "sglang" / "srt")
            return _loaded()
    return _loaded()


def _loaded() -> SimpleNamespace:
    names = (
        "eplb_manager",
        "expert_distribution",
        "expert_location",
        "expert_location_updater",
        "eplb_algorithms",
    )
    modules = {name: importlib.import_module(f"sglang.srt.eplb.{name}") for name in names}
    importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    return SimpleNamespace(**modules, hooks=hooks)


def _stand_ins(srt: Path) -> None:
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]
    stand_in("einops")
    stand_in("sglang")
    stand_in("sglang.version", __version__=VERSION)
    stand_in("sglang.srt", srt)
    stand_in("sglang.srt.environ", envs=_Environment())
    stand_in(
        "sglang.srt.runtime_context",
        get_exec=lambda: EXEC,
        get_parallel=lambda: PARALLEL,
        get_serving=lambda: SERVING,
        get_device=lambda: DEVICE,
        get_disagg=lambda: DISAGG,
        get_resources=lambda: RESOURCES,
        get_model=lambda: SimpleNamespace(model_path="", load_format=""),
        get_schedule=lambda: SimpleNamespace(chunked_prefill_size=0),
        get_platform=lambda: SimpleNamespace(is_hip=False),
        logs_expert_balancedness_to_server_log=lambda: False,
        reports_expert_balancedness=lambda: False,
    )
    stand_in(
        "sglang.srt.elastic_ep.elastic_ep",
        ElasticEPStateManager=_Elastic,
        elastic_expanded_world_enabled=lambda: False,
    )
    executor = "sglang.srt.model_executor"
    stand_in(f"{executor}.forward_batch_info", ForwardBatch=ForwardBatch, ForwardMode=object)
    stand_in(f"{executor}.model_runner", ModelRunner=ModelRunner)
    components = f"{executor}.model_runner_components"
    stand_in(f"{components}.weight_updater", WeightUpdater=WeightUpdater)
    stand_in(f"{components}.moe_ep_setup", init_lplb_solvers=lambda **_: None)
    stand_in("sglang.srt.managers.io_struct", BeginWeightUpdateReqOutput=SimpleNamespace)
    stand_in(
        "sglang.srt.managers.scheduler_components.weight_updater",
        SchedulerWeightUpdaterManager=SchedulerUpdater,
    )
    stand_in(
        "sglang.srt.utils",
        Withable=_Withable,
        get_device=lambda: "cpu",
        get_int_env_var=lambda _name, default=0: default,
        get_bool_env_var=lambda _name, default="false": False,
    )
    stand_in("sglang.srt.model_loader", get_model_architecture=lambda _config: (ModelClass, None))
    world = SimpleNamespace(cpu_group=dist.group.WORLD)
    stand_in("sglang.srt.distributed.parallel_state", get_world_group=lambda: world)
    moe = "sglang.srt.layers.moe"
    backend = SimpleNamespace(is_megamoe=lambda: False)
    stand_in(moe, srt / "layers" / "moe", get_moe_a2a_backend=lambda: backend)
    stand_in(f"{moe}.utils", is_moe_input_scattered_across_dp_ranks=routes_own_tokens)
    StandardDispatchOutput = namedtuple("StandardDispatchOutput", "hidden_states scale topk_output")
    StandardCombineInput = namedtuple("StandardCombineInput", "hidden_states")
    stand_in(
        f"{moe}.token_dispatcher",
        StandardDispatchOutput=StandardDispatchOutput,
        StandardCombineInput=StandardCombineInput,
    )
    stand_in(f"{moe}.token_dispatcher.standard", StandardDispatchOutput=StandardDispatchOutput)
    StandardTopKOutput = namedtuple("StandardTopKOutput", "topk_weights topk_ids router_logits")
    stand_in(f"{moe}.topk", StandardTopKOutput=StandardTopKOutput)
    logging.getLogger("sglang").setLevel(logging.WARNING)


def routes_own_tokens() -> bool:
    """Return True with an all-to-all, and where NVFP4 tokens are gathered after they are routed."""
    return EXEC.moe.moe_a2a_backend != "none" or PARALLEL.gathers_fp4


@dataclass
class ForwardBatch:
    """What a pass tells: its tokens with and without padding, and the names of its requests."""

    input_ids: torch.Tensor
    rids: list[str]
    global_num_token_non_padded_cpu: int
    global_num_tokens_cpu: list[int] | None = None
    """The tokens of each group of attention data parallelism."""


class ModelRunner:
    """The part of SGLang's runner that allocates the KV cache: 900 tokens of 128 bytes.

    As with `SGLANG_ENABLE_POST_CAPTURE_KV_SIZING` it first has a bound, and tensors of its size.
    """

    is_hybrid_swa = False
    max_total_num_tokens = 1800
    context_ranks = 1

    def __init__(self, manager: Any):
        self.eplb_manager = manager
        self.model: Any = None
        self.token_to_kv_pool: Any = None
        self.token_to_kv_pool_allocator = SimpleNamespace()

    @property
    def logical_max_total_num_tokens(self) -> int:
        return self.max_total_num_tokens * self.context_ranks

    def alloc_memory_pool(self, memory_pool_config: Any = None) -> None:
        del memory_pool_config
        half = self.max_total_num_tokens * 64
        self.token_to_kv_pool = SimpleNamespace(
            get_kv_size_bytes=lambda: (half, half),
            post_capture_active=True,
            post_capture_backed_bytes=0,
        )

    def post_capture_resize_kv_pool(self) -> None:
        self.max_total_num_tokens = 900
        self.token_to_kv_pool.post_capture_backed_bytes = 900 * 128


class WeightUpdater:
    """The ways in which SGLang's `WeightUpdater` of one runner replaces weights."""

    def __init__(self, runner: Any):
        self._runner = runner

    def get_model_runner(self) -> Any:
        return self._runner

    def _load(self, weights: Any) -> tuple[bool, str]:
        self._runner.model.load_weights(weights)
        return True, "Success"

    def update_weights_from_disk(
        self, model_path, load_format, weight_name_filter=None, recapture_cuda_graph=False
    ):
        return self._load(model_path)

    def update_weights_from_tensor(self, named_tensors, load_format=None):
        return self._load(named_tensors)

    def update_weights_from_ipc(self, recv_req):
        return self._load(recv_req)

    def load_weights_from_distributed(self, named_tensors):
        return self._load(named_tensors)


class SchedulerUpdater:
    """`SchedulerWeightUpdaterManager`: sessions, and the memory of the weights."""

    def __init__(self, runner: Any):
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def begin_weight_update(self, recv_req):
        return SimpleNamespace(success=True, message="Success")

    def end_weight_update(self, recv_req):
        return SimpleNamespace(success=True, message="Success")

    def release_memory_occupation(self, recv_req):
        for tensors in self.tp_worker.model_runner.model.routed_experts_weights_of_layer.values():
            for tensor in tensors:
                tensor.fill_(3)


class ModelConfig:
    hf_config = SimpleNamespace(num_experts_per_tok=TOP_K, n_group=None)


class Model:
    """`routed_experts_weights_of_layer` of the MoE layers; the weights tell the expert."""

    def __init__(self, metadata: Any, rank: int):
        self.metadata = metadata
        self.per_rank = metadata.num_local_physical_experts
        self.rank = rank
        self.version = 0
        self.spent = Spent()
        kind = experts.fused_moe(root_folder())
        self.layers = [experts.make_layer(kind, layer, self.spent) for layer in MOE_LAYERS]
        by_layer = {}
        for layer in MOE_LAYERS:
            here = metadata.physical_to_logical_map_cpu[
                layer, rank * self.per_rank : (rank + 1) * self.per_rank
            ]
            rows = [expert_rows(layer, int(expert)) for expert in here]
            by_layer[layer] = [torch.stack(part) for part in zip(*rows, strict=True)]
        self.makes_anew = False
        """Each load of weights makes other tensors, as in SGLang's transformers backend."""
        self._use(experts.lazy_value(root_folder())(lambda: by_layer))

    def _use(self, by_layer: Any) -> None:
        self.routed_experts_weights_of_layer = by_layer
        for layer in self.layers:
            experts.set_weights(layer, by_layer[layer.layer_id][0])
        self.replace_parameters(lambda tensor: tensor)

    def replace_parameters(self, make: Any) -> None:
        """Compute with other tensors than those that SGLang moves, as online quantization does."""
        by_layer = self.routed_experts_weights_of_layer
        self.served = [make(tensor) for tensors in by_layer.values() for tensor in tensors]

    def parameters(self) -> list[torch.Tensor]:
        """Return the tensors that the model computes with, as `torch.nn.Module` does."""
        return self.served

    def modules(self) -> list[Any]:
        """Return the modules of the model, as `torch.nn.Module` does."""
        return [self, *self.layers]

    def checkpoint(self, version: int) -> Any:
        """Yield all experts of a version; from now on the slots must hold this version."""
        self.version = version
        for layer in MOE_LAYERS:
            for expert in range(EXPERTS):
                yield (layer, expert), expert_rows(layer, expert, version)

    def load_weights(self, weights: Any) -> None:
        """Load ((layer, expert), rows) into the slots that SGLang's real metadata names."""
        if self.makes_anew:
            by_layer = self.routed_experts_weights_of_layer.items()
            self._use({layer: [part.clone() for part in parts] for layer, parts in by_layer})
        for (layer, expert), rows in weights:
            for slot in self.metadata.logical_to_all_physical(layer, expert):
                local = slot - self.rank * self.per_rank
                if 0 <= local < self.per_rank:
                    tensors = self.routed_experts_weights_of_layer[layer]
                    for tensor, row in zip(tensors, rows, strict=True):
                        tensor[local].copy_(row)

    def wrong_slots(self, hidden_map: torch.Tensor) -> list[tuple[int, int]]:
        wrong = []
        for layer, tensors in self.routed_experts_weights_of_layer.items():
            for local in range(self.per_rank):
                expert = int(hidden_map[layer, self.rank * self.per_rank + local])
                want = expert_rows(layer, expert, self.version)
                if not all(
                    torch.equal(have[local], must) for have, must in zip(tensors, want, strict=True)
                ):
                    wrong.append((layer, local))
        return wrong
