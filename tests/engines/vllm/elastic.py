"""vLLM's real elastic expert parallelism on a machine without a GPU and without Ray.

Real, from the wheel: `elastic_execute` (its executor), `standby_state`, `stateless_coordinator` and
`distributed/utils`, so the groups are vLLM's own, over Gloo. Stand-ins: what its imports load
besides; PyNCCL, which copies over a Gloo group here; the kernels and the all-to-all, of which none
is made again (`nixl_ep` keeps them); the copies of weights that are not experts.
"""

import contextlib
import importlib
import itertools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.vllm import engine
from tests.engines.vllm.kernels import FUSED_MOE
from tests.engines.wheels import empty_modules

HOST = "127.0.0.1"
_DISTRIBUTED = "vllm.distributed"
_ELASTIC = f"{_DISTRIBUTED}.elastic_ep"
_NUMBERS = itertools.count()


class GlooPyNccl:
    """`PyNcclCommunicator` over a Gloo group: sends and receives of a group start at its end."""

    disabled, available = False, True

    def __init__(self, group: Any):
        self._group = group
        self._starts: list[Any] = []

    def group_start(self) -> None:
        self._starts = []

    def send(self, tensor, dst, stream=None):
        self._starts.append(lambda: self._group.send([tensor.contiguous()], dst, 0))

    def recv(self, tensor, src, stream=None):
        self._starts.append(lambda: self._group.recv([tensor], src, 0))

    def group_end(self) -> None:
        for work in [start() for start in self._starts]:
            work.wait()


class DeviceCommunicator:
    """`CudaCommunicator`."""

    def __init__(self, cpu_group: Any, **_: Any):
        self.pynccl_comm = GlooPyNccl(cpu_group)

    def destroy(self) -> None:
        pass


@dataclass(frozen=True)
class MoeConfig:
    num_local_experts: int
    num_experts: int = 0
    moe_parallel_config: Any = None


class MoeModule:
    """A layer as `switch_and_prepare` sees it."""

    def __init__(self, num_local_experts: int):
        self.moe_config = MoeConfig(num_local_experts)
        self._quant_method = SimpleNamespace()

    def _set_moe_config(self, config: MoeConfig) -> None:
        self.moe_config = config


class Model(engine.Model):
    """A model whose number of ranks changes."""

    def __init__(self, modules: Any, rank: int, ranks: int, *, joins: bool, **sizes: Any):
        super().__init__(modules, rank, ranks, **sizes)
        self._slots = list(self.expert_weights)
        self._layers = [MoeModule(self.num_local_physical_experts) for _ in self.moe_layers]
        if joins:  # vLLM loads dummy weights.
            for tensor in (tensor for layer in self.expert_weights for tensor in layer):
                tensor.zero_()

    def modules(self) -> list[MoeModule]:
        return self._layers

    def set_eplb_state(self, *buffers: Any) -> None:
        super().set_eplb_state(*buffers)
        self.expert_weights = list(self._slots)

    def update_physical_experts_metadata(
        self, num_physical_experts: int, num_local_physical_experts: int
    ) -> None:
        assert self.num_local_physical_experts == num_local_physical_experts
        self.num_physical_experts = num_physical_experts
        self.num_redundant_experts = num_physical_experts - self.num_logical_experts


class Worker:
    """The worker of one rank: what its `ElasticEPScalingExecutor` uses."""

    device = torch.device("cpu")
    use_v2_model_runner = False

    def __init__(self, state: Any, model: Model, model_config: Any, config: Any):
        self.vllm_config = SimpleNamespace(parallel_config=config)
        self.model_runner = SimpleNamespace(
            eplb_state=state,
            model=model,
            model_config=model_config,
            eep_eplb_suppressed=False,
            get_model=lambda: model,
            setup_eplb_from_mapping=lambda mapping: state.update_mapping(model_config, mapping),
        )


def load() -> Any:
    """Import the wheel's modules in this process, after `engine.load`."""
    modules = engine.load()
    if not hasattr(modules.state, "_toy_elastic"):
        with empty_modules("vllm"):
            _stand_ins(modules)
            importlib.import_module(f"{_ELASTIC}.elastic_execute")
        modules.state._toy_elastic = True
    modules.elastic = importlib.import_module(f"{_ELASTIC}.elastic_execute")
    modules.standby = importlib.import_module(f"{_ELASTIC}.standby_state")
    return modules


def _real(name: str) -> Any:
    """Import a module of the wheel in place of its stand-in."""
    del sys.modules[name]
    return importlib.import_module(name)


def _stand_ins(modules: Any) -> None:
    groups = sys.modules[f"{_DISTRIBUTED}.parallel_state"]
    groups.__dict__.update(
        TensorMetadata=object,
        _get_unique_name=lambda name: f"{name}:{next(_NUMBERS)}",
        _register_group=lambda _: None,
        _split_tensor_dict=None,
        _WORLD=SimpleNamespace(device_index=0),
        _init_stateless_group=_init_stateless_group,
        _node_count=lambda _: 1,
        _replace_active_groups=_replace_active_groups,
        get_world_group=lambda: engine.GROUPS.world,
        get_dp_group=lambda: engine.GROUPS.dp,
        get_pcp_group=lambda: SimpleNamespace(world_size=1),
        in_the_same_node_as=lambda group, *_: [True] * group.world_size,
    )
    for name in ("dp", "ep", "pcp", "tp", "world"):
        getter = getattr(groups, f"get_{name}_group")
        setattr(sys.modules[_DISTRIBUTED], f"get_{name}_group", getter)
    platform = sys.modules["vllm.platforms"].current_platform
    platform.is_xpu = platform.is_tpu = platform.is_out_of_tree = lambda: False
    platform.get_device_communicator_cls, platform.set_device = lambda: "", lambda _: None
    _stand_ins_of_imports()
    _real(f"{_DISTRIBUTED}.utils")
    coordinator = _real(f"{_DISTRIBUTED}.stateless_coordinator").StatelessGroupCoordinator
    communicators: Any = sys.modules[f"{engine.EPLB}.eplb_communicator"]
    owners: tuple[Any, ...] = (modules.state, communicators)
    for module in owners:
        module.StatelessGroupCoordinator = coordinator
    # vLLM itself makes none for tensors on a CPU.
    modules.state.create_eplb_communicator = lambda group_coordinator, *_, **__: (
        communicators.PyNcclEplbCommunicator(group_coordinator.device_communicator.pynccl_comm)
    )
    modules.state.start_async_worker = lambda state, **_: engine.start_worker(modules, state)
    for owner, name in (
        (torch.accelerator, "synchronize"),
        (torch.accelerator, "empty_cache"),
        (torch.compiler, "reset"),  # Loads the compiler first.
    ):
        setattr(owner, name, lambda *_: None)


def _add(name: str, **content: Any) -> None:
    """Add content to a stand-in."""
    importlib.import_module(name).__dict__.update(content)


def _stand_ins_of_imports() -> None:
    _add(
        "vllm.config",
        get_current_vllm_config_or_none=lambda: None,
        set_current_vllm_config=lambda _: contextlib.nullcontext(),
    )
    communicators = f"{_DISTRIBUTED}.device_communicators"
    _add(f"{communicators}.cuda_communicator", CudaCommunicator=DeviceCommunicator)
    _add(f"{communicators}.pynccl", defer_comm_warmup_on_rocm=contextlib.nullcontext)
    _add("vllm.utils", is_moe_layer=lambda module: isinstance(module, MoeModule))
    _add("vllm.utils.import_utils", resolve_obj_by_qualname=lambda _: DeviceCommunicator)
    _add("vllm.utils.network_utils", get_tcp_uri=lambda ip, port: f"tcp://{ip}:{port}")
    _add("vllm.utils.system_utils", suppress_stdout=contextlib.nullcontext)
    _add("vllm.compilation.wrapper", reset_compile_wrapper=lambda _: None)
    manager = SimpleNamespace(stage_ep_size=lambda: None, commit_ep_size=lambda: None)
    _add(f"{FUSED_MOE}.all2all_utils", get_ep_all2all_manager=lambda *_: manager)
    _add(f"{FUSED_MOE}.config", FusedMoEParallelConfig=SimpleNamespace(make=lambda **_: None))
    _add(
        "vllm.model_executor.warmup.flashinfer_autotune_cache",
        sync_flashinfer_autotune_cache=lambda *_: None,
    )
    _add(
        "vllm.v1.engine",
        ReconfigureDistributedRequest=SimpleNamespace,
        ReconfigureRankType=SimpleNamespace(KEEP_CURRENT_RANK=-1, SHUTDOWN_CURRENT_RANK=-2),
    )
    _add("vllm.v1.worker.dp_utils", skip_dp_coordination=contextlib.nullcontext)


def _init_stateless_group(
    group_ranks, group_name, host, backend, coord_store, use_device_communicator=True, **_: Any
):
    """As in vLLM's `parallel_state`."""
    return make_group(
        engine.GROUPS.world.rank,
        group_ranks[0],
        group_name,
        coord_store,
        use_device_communicator=use_device_communicator,
    )


def make_group(rank, ranks, name, coord_store, *, use_device_communicator=True):
    """Return a group of vLLM's own class; collective over its ranks."""
    module = sys.modules[f"{_DISTRIBUTED}.stateless_coordinator"]
    return module.StatelessGroupCoordinator(
        group_ranks=[ranks],
        local_rank=0,
        torch_distributed_backend="gloo",
        use_device_communicator=use_device_communicator,
        group_name=name,
        host=HOST,
        coord_store=coord_store,
        global_rank=rank,
        global_world_size=len(ranks),
    )


def join_groups(rank: int, size: int, coord_store: Any) -> None:
    """Make the groups of a process that starts, in the order of `create_standby_groups`."""
    ranks = list(range(size))
    groups = engine.GROUPS
    groups.world = make_group(rank, ranks, "world", coord_store, use_device_communicator=False)
    groups.dp = make_group(rank, ranks, "dp", coord_store)
    groups.ep = make_group(rank, ranks, "ep", coord_store)
    groups.eplb = make_group(rank, ranks, "eplb", coord_store)


def _replace_active_groups(*, world, dp, ep, eplb, node_count):
    """As in vLLM's `parallel_state`."""
    groups: Any = engine.GROUPS
    old = groups.dp, groups.ep, groups.world, groups.eplb
    groups.world, groups.dp, groups.ep, groups.eplb = world, dp, ep, eplb
    return old


def coordinate(rank: int, phase: str) -> tuple[Any, int]:
    """Return the store over which the groups of a phase are made, and its port; by rank 0."""
    distributed: Any = dist
    shared = distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        shared.set(phase, str(store.port))
        return store, store.port
    port = int(shared.get(phase))
    return distributed.TCPStore(HOST, port, is_master=False, wait_for_workers=False), port
