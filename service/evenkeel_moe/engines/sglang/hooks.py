"""The parts of SGLang that the plugin hooks or reads, and how they must look."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping

from evenkeel_moe.engines.guest.guards import (
    OR,
    EngineReport,
    Hook,
    check_version,
    compare_fields,
    compare_signatures,
    refuse_differences,
)

KNOWN_VERSIONS: tuple[str, ...] = ("0.5.21", "0.5.22", "0.5.23")
_EPLB = "sglang.srt.eplb"
MANAGER = f"{_EPLB}.eplb_manager"
RECORDER = f"{_EPLB}.expert_distribution"
LOCATION = f"{_EPLB}.expert_location"
UPDATER = f"{_EPLB}.expert_location_updater"
ALGORITHMS = f"{_EPLB}.eplb_algorithms"
CONTEXT = "sglang.srt.runtime_context"
RUNNER = "sglang.srt.model_executor.model_runner"

SIGNATURES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    MANAGER: {
        "EPLBManager": {
            "on_forward_pass_end": "self",
            "_entrypoint": "self",
            "rebalance": "self",
            "_check_rebalance_needed": "self average_utilization_rate_over_window",
        }
    },
    RECORDER: {
        "_Accumulator": {
            "append": "self forward_pass_id gatherer_key single_pass_data outputs",
        },
        "_ExpertDistributionRecorderReal": {"_on_forward_pass_start": "self forward_batch"},
        "": {"get_global_expert_distribution_recorder": ""},
    },
    LOCATION: {"": {"get_global_expert_location_metadata": ""}},
    UPDATER: {
        "ExpertLocationUpdater": {
            "update": "self routed_experts_weights_of_layer new_expert_location_metadata"
            " update_layer_ids nnodes rank use_flat_topology"
        }
    },
    ALGORITHMS: {
        "": {
            "rebalance_experts": "tokens_per_expert num_physical_experts"
            " num_local_physical_experts num_groups num_nodes algorithm"
        }
    },
    CONTEXT: {"": {"get_exec": "", "get_parallel": "", "get_serving": ""}},
}
"""Module -> class, or empty for the module -> its functions -> their parameters."""
_RUNNER_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
LOADERS: Mapping[tuple[str, str], Mapping[str, str]] = {
    (_RUNNER_UPDATER, "WeightUpdater"): {
        "update_weights_from_disk": "self model_path load_format weight_name_filter"
        " recapture_cuda_graph",
        "update_weights_from_tensor": "self named_tensors load_format",
        "update_weights_from_ipc": "self recv_req",
        "load_weights_from_distributed": "self named_tensors",
    },
    (_SCHEDULER_UPDATER, "SchedulerWeightUpdaterManager"): {
        "begin_weight_update": "self recv_req",
        "end_weight_update": "self recv_req",
        "release_memory_occupation": "self recv_req",
    },
    (RUNNER, "ModelRunner"): {
        "alloc_memory_pool": f"self memory_pool_config draft_parallel_layout{OR}"
        "self memory_pool_config",
    },
}
"""(module, class) -> its functions that replace weights or allocate the KV cache -> their
parameters."""
_BATCH = "sglang.srt.model_executor.forward_batch_info"


def check_engine(version: str) -> None:
    """Compare SGLang with the versions that this plugin was written for.

    Raises:
        Unsupported: another version, or a part that differs.
    """
    check_version("sglang", version, KNOWN_VERSIONS)
    refuse_differences(compare())


def compare() -> Iterator[Hook]:
    """Return every part with its difference, if it has one."""
    for module, owners in SIGNATURES.items():
        loaded = importlib.import_module(module)
        for owner, wanted in owners.items():
            yield from compare_signatures(getattr(loaded, owner) if owner else loaded, wanted)


def compare_loaders() -> Iterator[Hook]:
    """Return the parts whose modules import most of SGLang: `LOADERS` and what a pass tells."""
    for (module, owner), wanted in LOADERS.items():
        yield from compare_signatures(getattr(importlib.import_module(module), owner), wanted)
    batch = importlib.import_module(_BATCH).ForwardBatch
    yield compare_fields(batch, ("input_ids", "rids", "global_num_token_non_padded_cpu"))


def report() -> EngineReport | None:
    """Compare the installed SGLang, and change nothing of it; None if there is none."""
    if importlib.util.find_spec("sglang") is None:
        return None
    version = "of unknown version"
    try:
        version = str(importlib.import_module("sglang.version").__version__)
        hooks = [*compare(), *compare_loaders()]
    except (ImportError, AttributeError) as error:
        hooks = [Hook("import", f"SGLang's modules cannot be imported: {error!s:.300}")]
    return EngineReport("sglang", version, KNOWN_VERSIONS, tuple(hooks))
