"""What vLLM's kinds of parallelism mean for the plugin, decided from the configuration alone."""

from typing import Any

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.wire.values import is_deployment_id

STAGE = "{pp}"
"""Stands for the pipeline stage in the paths of the placement to start from and of a recording."""


def refuse_elastic(parallel_config: Any) -> None:
    """Refuse elastic expert parallelism, which changes the number of ranks while vLLM serves.

    The ranks that vLLM adds later make calls that the first ranks do not answer, so
    this is decided before any collective call, on every rank alike.

    Raises:
        Unsupported: it is switched on; the message has the numbers.
    """
    if getattr(parallel_config, "enable_elastic_ep", False):
        now = getattr(parallel_config, "data_parallel_size", None)
        most = getattr(parallel_config, "elastic_ep_max_dp_size", None)
        raise Unsupported(
            "vLLM runs with elastic expert parallelism (enable_elastic_ep), which changes the ranks"
            f" (data_parallel_size {now}, at most {most}): this plugin supports a fixed number"
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
    name = f"{settings.deployment}-pp{stage}"
    if not is_deployment_id(name):
        raise Unsupported(
            f"{name!r}, the deployment of pipeline stage {stage} of {stages}, has {len(name)}"
            " characters; a name has at most 63"
        )
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
    return settings.model_copy(update={"deployment": name, **paths})
