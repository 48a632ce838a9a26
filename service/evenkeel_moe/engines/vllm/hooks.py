"""The parts of vLLM that the plugin wraps, replaces or reads, and how they must look."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from types import ModuleType

from evenkeel_moe.engines.guest.guards import (
    EngineReport,
    Hook,
    Parts,
    compare_fields,
    compare_parts,
    compare_signatures,
    report_of,
)

KNOWN_VERSIONS: tuple[str, ...] = ("0.31.0", "0.32.0", "0.33.0")
STATE = "vllm.distributed.eplb.eplb_state"
POLICIES = "vllm.distributed.eplb.policy"
GROUPS = "vllm.distributed.parallel_state"
CONFIG = "vllm.config"
WORKERS = "vllm.v1.worker.worker_base"
ELASTIC = "vllm.distributed.elastic_ep.elastic_execute"
_WORKER = "vllm.v1.worker.gpu_worker"
ASCEND = "vllm_ascend"
_OLDER_ASCEND = (
    "vllm-ascend runs its older model runner (version 1), which balances by an EPLB of its own that"
    " this plugin does not know: set VLLM_USE_V2_MODEL_RUNNER=1, or write its expert_map_path with"
    " `evenkeel offline -f ascend`"
)

_PARTS: Parts = {
    STATE: {
        "EplbState": {
            "add_model": "self model model_config model_name | self model model_config",
            "prepare_forward": "self model_config num_unpadded_tokens ubatch_slices",
            "step": "self is_dummy is_profile log_stats",
            "_should_record_current_step": "self log_stats",
            "rearrange": "self is_profile rank_mapping use_last_expert_load",
            "build_initial_global_physical_to_logical_map": "num_routed_experts"
            " num_redundant_experts",
            "_update_layer_should_record": "self log_stats",
        },
        "": {
            "_move_to_workspace": "model_state ep_rank",
            "_commit_eplb_maps": "model_state new_physical_to_logical_map",
            "rearrange_expert_weights_inplace": "old_global_expert_indices"
            " new_global_expert_indices expert_weights expert_buffer ep_group communicator"
            " is_profile rank_mapping",
        },
    },
    GROUPS: {"": {f"get_{kind}_group": "" for kind in ("ep", "eplb", "tp", "pp")}},
    CONFIG: {"": {"get_current_vllm_config": ""}},
    WORKERS: {"WorkerWrapperBase": {"initialize_from_config": "self kv_cache_configs"}},
}
ELASTIC_PARTS: Parts = {
    ELASTIC: {
        "ElasticEPScalingExecutor": {
            "commit_scale_up": "self is_existing_worker",
            "commit_scale_down": "self new_dp_size removing",
        }
    }
}
_PLANNER = "cls weight num_replicas num_groups num_nodes num_ranks old_global_expert_indices"
_FIELDS = (
    "physical_to_logical_map",
    "expert_load_pass",
    "expert_load_pass_buffer",
    "expert_load_window",
    "last_expert_load",
    "model",
    "model_name",
    "expert_buffer",
    "rebalanced",
    "communicator",
    "pending_result",
)
WARM_UP = "compile_or_warm_up_model"
_OF_A_WORKER = {
    WARM_UP: "self",
    "reload_weights": "self args kwargs",
    "reset_weights": "self",
    "start_weight_update": "self",
    "finish_weight_update": "self",
    "sleep": "self level",
    "wake_up": "self tags",
    "discard": "self tags",
}
"""The warm-up of a worker, and all its functions that replace weights."""


def worker_functions(version: str, worker: type | None = None) -> Mapping[str, str]:
    """Return the functions of a worker that the plugin wraps, with their parameters.

    Args:
        version: of vLLM.
        worker: its class; None for vLLM's own. That of vllm-ascend has not all of them.
    """
    missing = {"reset_weights"} if version.startswith("0.31.") else set()
    if worker is not None and worker.__module__.partition(".")[0] == ASCEND:
        missing = {name for name in ("reset_weights", "discard") if not hasattr(worker, name)}
    return {name: taken for name, taken in _OF_A_WORKER.items() if name not in missing}


def compare(version: str) -> Iterator[Hook]:
    """Return every part with its difference, if it has one; changes nothing."""
    try:
        if importlib.util.find_spec(ASCEND) is not None:
            yield Hook("vllm-ascend", "" if _ascend_balances_by_vllm() else _OLDER_ASCEND)
        yield from _compare_modules(version)
    except (ImportError, AttributeError) as error:
        yield Hook("import", f"a part of vLLM cannot be read: {error!s:.300}")


def _ascend_balances_by_vllm() -> bool:
    """Return True if vllm-ascend runs its newer model runner, which uses vLLM's `EplbState`."""
    return bool(importlib.import_module("vllm.envs").VLLM_USE_V2_MODEL_RUNNER)


def _compare_modules(version: str) -> Iterator[Hook]:
    yield from compare_parts({**_PARTS, _WORKER: {"Worker": worker_functions(version)}})
    state, policies = importlib.import_module(STATE), importlib.import_module(POLICIES)
    yield compare_fields(state.EplbModelState, _FIELDS)
    yield compare_fields(state.AsyncEplbLayerResult, ("layer_idx",))
    yield from _compare_planner(state, policies)


def _compare_planner(state: ModuleType, policies: ModuleType) -> Iterator[Hook]:
    if hasattr(policies, "EplbRebalanceContext"):
        yield Hook(
            "EplbRebalanceContext",
            "policies plan from an EplbRebalanceContext (vLLM pull request 49700), which was in no"
            " release when this plugin was written",
        )
        return
    known = getattr(policies, "EPLB_POLICIES", None)
    if not isinstance(known, dict) or set(known) != {"default"}:
        yield Hook("EPLB_POLICIES", f"EPLB_POLICIES is {known!r}, not one policy called default")
        return
    shared = getattr(state, "EPLB_POLICIES", None) is known
    detail = "eplb_state no longer shares EPLB_POLICIES with the policy package"
    yield Hook("EPLB_POLICIES", "" if shared else detail)
    yield from compare_signatures(known["default"], {"rebalance_experts": _PLANNER})


def report() -> EngineReport | None:
    """Compare the installed vLLM; see `report_of`."""
    return report_of("vllm", "vLLM", "vllm", KNOWN_VERSIONS, compare)
