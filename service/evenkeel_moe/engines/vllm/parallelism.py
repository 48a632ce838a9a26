"""Adapts the plugin to pipeline stages of vLLM, and to groups whose ranks change."""

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.engines.guest.collective_start import RollCall
from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.settings import GuestSettings, settings_of_part
from evenkeel_moe.engines.vllm.hooks import CONFIG
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.schedule.survivors import surviving_placement

STAGE = "{pp}"
"""Stands for the pipeline stage in the paths of the placement to start from and of a recording."""


def refuse_older_runner(stage: int, stages: int) -> None:
    """Refuse what vLLM's older model runner serves without a step of its balancer.

    Args:
        stage: number of this rank's pipeline stage.
        stages: number of stages.

    Raises:
        Unsupported: a pooling model; or not the last stage, unless every stage samples.
    """
    config = importlib.import_module(CONFIG).get_current_vllm_config()
    if config.use_v2_model_runner:
        return
    launcher = config.parallel_config.distributed_executor_backend
    served = "a pooling model" if config.model_config.runner_type == "pooling" else ""
    if stage < stages - 1 and launcher != "external_launcher":
        served = f"pipeline stage {stage} of {stages}"
    if served:
        raise Unsupported(
            f"vLLM's older model runner (version 1) takes no step of its balancer for {served}:"
            " set VLLM_USE_V2_MODEL_RUNNER=1"
        )


def is_elastic(parallel_config: Any) -> bool:
    """Return True if vLLM may change the number of ranks while it serves."""
    return bool(getattr(parallel_config, "enable_elastic_ep", False))


def refuse_elastic(settings: GuestSettings, side: CountingSide) -> None:
    """Refuse what cannot follow elastic expert parallelism, before any collective call.

    Raises:
        Unsupported: the counts are recorded into a folder, or are those of vllm-ascend.
    """
    if settings.record:
        raise Unsupported(
            f"vLLM may change the number of ranks (enable_elastic_ep), and a recording, here"
            f" {settings.record}, holds one number"
        )
    if side is not CountingSide.SOURCE:
        raise Unsupported(
            "vLLM may change the number of ranks (enable_elastic_ep): with vllm-ascend this plugin"
            " supports a fixed number"
        )


def joins_group() -> bool:
    """Return True if vLLM started this process to join a group that serves."""
    return bool(importlib.import_module("vllm.envs").VLLM_ELASTIC_EP_SCALE_UP_LAUNCH)


def roll_call(group: Any) -> RollCall:
    """Return the roll of vLLM's EP group, whose ranks vLLM may change."""
    rank, size = int(group.rank_in_group), int(group.world_size)
    return RollCall(group.tcp_store_group.store, "evenkeel/roll-call", rank, size)


def shrunk_map(current: NDArray[np.int64], shape: ModelShape, num_ranks: int) -> NDArray[np.int64]:
    """Return the (L, M * slots_per_rank) map of a group of which the first M ranks stay.

    They keep their experts, and the fewest slots change for those that live on the others alone.

    Args:
        current: (L, S) the map in use.
        shape: of the present group.
        num_ranks: M; vLLM removes the ranks with the highest numbers.

    Raises:
        InfeasiblePlan, ShapeMismatch: M ranks have fewer slots than there are experts.
    """
    placement = Placement(current.astype(np.int32), shape.num_ranks, shape.num_logical_experts)
    stay = tuple(range(num_ranks))
    return surviving_placement(placement, stay, replace(shape, num_ranks=num_ranks)).phy2log.astype(
        np.int64
    )


def stage_settings(settings: GuestSettings, stage: int, stages: int) -> GuestSettings:
    """Return the settings of a pipeline stage, which is a deployment of its own.

    Each stage has its own layers, and its own group of ranks that share experts.

    Args:
        settings: the plugin's settings.
        stage: number of this rank's stage.
        stages: number of stages.

    Raises:
        Unsupported: the name of the stage's deployment is too long, or all stages would start from
            one placement file, or record into one folder.
    """
    if stages == 1:
        return settings
    settings = settings_of_part(settings, f"pp{stage}", f"pipeline stage {stage} of {stages}")
    for use, path in (
        ("start from one file", settings.placement),
        ("record into one folder", settings.record),
    ):
        if path and STAGE not in path:
            raise Unsupported(
                f"{stages} pipeline stages cannot {use}, {path}:"
                f" put {STAGE} into the path, which stands for the stage"
            )
    paths = {
        field: getattr(settings, field).replace(STAGE, str(stage))
        for field in ("placement", "record")
    }
    return settings.model_copy(update=paths)
