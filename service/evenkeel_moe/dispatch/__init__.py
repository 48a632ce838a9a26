"""Per-batch dispatch on torch tensors: chooses the replica that serves each token of a batch.

Engines call this library in their MoE layer; the controller never imports it. docs/dispatch.md
describes each rule, when it helps and what it costs.
"""

from evenkeel_moe.dispatch.choice import (
    EvenChoice,
    NearestChoice,
    ReplicaChoice,
    assign_quotas,
)
from evenkeel_moe.dispatch.counts import count_choices
from evenkeel_moe.dispatch.fewest import FewestChoice, FewestReplicas
from evenkeel_moe.dispatch.interior import BatchedSplit, TokenSplit
from evenkeel_moe.dispatch.libra import LayerQuotas, LibraChoice
from evenkeel_moe.dispatch.libra_replicas import (
    LibraVariant,
    TransientReplicas,
    plan_replicas,
)
from evenkeel_moe.dispatch.libra_sharding import Sharding, shard_tokens
from evenkeel_moe.dispatch.lplb import (
    DeviceLplbChoice,
    DeviceSplit,
    ExactSplit,
    LplbChoice,
    device_split,
)
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.dispatch.waterfill import Waterfill, expand_topk

__all__ = [
    "BatchedSplit",
    "DeviceLplbChoice",
    "DeviceSplit",
    "DispatchTables",
    "EvenChoice",
    "ExactSplit",
    "FewestChoice",
    "FewestReplicas",
    "LayerQuotas",
    "LibraChoice",
    "LibraVariant",
    "LplbChoice",
    "NearestChoice",
    "ReplicaChoice",
    "Sharding",
    "TokenSplit",
    "TransientReplicas",
    "Waterfill",
    "assign_quotas",
    "count_choices",
    "device_split",
    "expand_topk",
    "plan_replicas",
    "shard_tokens",
]
