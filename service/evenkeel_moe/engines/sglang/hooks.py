"""The parts of SGLang that the plugin hooks or reads, and how they must look."""

import importlib
from collections.abc import Iterator
from itertools import chain

from evenkeel_moe.engines.guest.guards import (
    OR,
    EngineReport,
    Hook,
    Parts,
    compare_fields,
    compare_parts,
    report_of,
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
MOE = "sglang.srt.layers.moe.utils"

PARTS: Parts = {
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
    CONTEXT: {
        "": {f"get_{kind}": "" for kind in ("device", "disagg", "exec", "parallel", "serving")}
    },
}
RUNNER_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
SCHEDULER_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
LOADERS: Parts = {
    RUNNER_UPDATER: {
        "WeightUpdater": {
            "update_weights_from_disk": "self model_path load_format weight_name_filter"
            " recapture_cuda_graph",
            "update_weights_from_tensor": "self named_tensors load_format",
            "update_weights_from_ipc": "self recv_req",
            "load_weights_from_distributed": "self named_tensors",
        }
    },
    SCHEDULER_UPDATER: {
        "SchedulerWeightUpdaterManager": {
            "begin_weight_update": "self recv_req",
            "end_weight_update": "self recv_req",
            "release_memory_occupation": "self recv_req",
        }
    },
    RUNNER: {
        "ModelRunner": {
            "alloc_memory_pool": f"self memory_pool_config draft_parallel_layout{OR}"
            "self memory_pool_config",
        }
    },
    MOE: {"": {"is_moe_input_scattered_across_dp_ranks": ""}},
}
"""The functions that replace weights, allocate the KV cache or tell which tokens a rank routes."""
_BATCH = "sglang.srt.model_executor.forward_batch_info"


def compare() -> Iterator[Hook]:
    """Return every part with its difference, if it has one."""
    return compare_parts(PARTS)


def compare_loaders() -> Iterator[Hook]:
    """Return the parts whose modules import most of SGLang: `LOADERS` and what a pass tells."""
    yield from compare_parts(LOADERS)
    batch = importlib.import_module(_BATCH).ForwardBatch
    wanted = ("input_ids", "rids", "global_num_token_non_padded_cpu", "global_num_tokens_cpu")
    yield compare_fields(batch, wanted)


def report() -> EngineReport | None:
    """Compare the installed SGLang; see `report_of`."""
    return report_of(
        "sglang",
        "SGLang",
        "sglang.version",
        KNOWN_VERSIONS,
        lambda _: chain(compare(), compare_loaders()),
    )
