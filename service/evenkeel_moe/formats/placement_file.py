"""A placement with the layers that it is for, and the formats in which files hold one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.formats.reading import check_layer_ids
from evenkeel_moe.model.placement import Placement

NEUTRAL_FORMAT = "evenkeel.placement"
NEUTRAL_VERSION = 1


class PlacementFormat(StrEnum):
    """The formats, each named by its reader."""

    NEUTRAL = "neutral"
    """Our own: JSON that carries everything; documented in docs/formats.md."""
    SGLANG = "sglang"
    """SGLang `--init-expert-location`."""
    TRTLLM = "trtllm"
    """TensorRT-LLM `moe_config.load_balancer`."""
    ASCEND = "ascend"
    """vllm-ascend `expert_map_path`."""
    VLLM = "vllm"
    """vLLM `initial_expert_map_path`, of pull request 49572."""
    VLLM_MAPPING = "vllm-mapping"
    """vLLM `initial_mapping_path`, of pull request 41141."""
    VLLM_RANKS = "vllm-ranks"
    """vLLM `--expert-placement-file`, of pull request 34811."""

    @classmethod
    def parse(cls, name: str) -> "PlacementFormat":
        """Return the format with this name.

        Raises:
            InvalidInput: there is no such format.
        """
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(cls)
            raise InvalidInput(f"unknown placement format {name!r}; known: {known}") from error

    @property
    def holds_empty_slots(self) -> bool:
        """True if a slot may stay empty in such files."""
        return self is PlacementFormat.NEUTRAL

    @property
    def counts_moe_layers(self) -> bool:
        """True if row i of such files is the i-th MoE layer, whatever its hidden layer."""
        return self in (PlacementFormat.ASCEND, PlacementFormat.VLLM, PlacementFormat.VLLM_MAPPING)


@dataclass(frozen=True, eq=False)
class PlacementFile:
    """A placement with the layers of the model that its rows belong to."""

    placement: Placement
    layer_ids: tuple[int, ...]
    """(L,) index of each row among the model's hidden layers, dense layers included; rising."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Free text about its origin; only the neutral format keeps it."""

    def __post_init__(self) -> None:
        check_layer_ids(self.layer_ids, self.placement.num_layers)
        missing = np.argwhere(self.placement.logcnt == 0)
        if len(missing):
            row, expert = missing[0]
            raise InfeasiblePlan(
                f"{len(missing)} experts without a replica, "
                f"first: layer {self.layer_ids[row]} expert {expert}",
                Reason.EXPERT_WITHOUT_REPLICA,
            )


def refuse_duplicates(placement: Placement) -> None:
    """Raise InfeasiblePlan if a rank holds an expert twice, which ascend files cannot express."""
    duplicate = placement.first_duplicate()
    if duplicate is not None:
        layer, rank, expert = duplicate
        raise InfeasiblePlan(
            "ascend maps hold an expert once per device:"
            f" layer {layer} device {rank} has expert {expert} twice",
            Reason.DUPLICATE_ON_RANK,
        )
