"""Tells what the redundant replicas of the initial placement cost or save on a trace."""

import math
from dataclasses import dataclass

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.replay.walk import Setup

_NOTHING = 0.0005
"""Change of MoE time, as a share, that is reported as none."""


@dataclass(frozen=True, slots=True)
class ReplicaEffect:
    """The initial placement compared with the same one without replicas."""

    time_change: float
    """Change of MoE time as a share of the time without replicas: positive if replicas cost
    time."""
    tokens_per_expert: float
    """Mean tokens of an expert in a layer and step."""
    words: str
    """The same in a sentence."""


def replica_effect(setup: Setup, first: int, last: int) -> ReplicaEffect | None:
    """Compare the two placements on the steps first..last-1 of the trace.

    Returns:
        None without redundant slots or without load.
    """
    shape, cost, split = setup.shape, setup.objective.cost, setup.split(first, last)
    load = setup.load[first:last]
    with_replicas, without = Placement.initial(shape), Placement.linear(shape)
    if with_replicas == without or not load.any():
        return None
    time = moe_time.predicted_time(load, with_replicas, cost, split)
    change = time / moe_time.predicted_time(load, without, cost, split) - 1.0
    mean = float(load.mean())
    return ReplicaEffect(change, mean, _words(change, mean, cost))


def _words(change: float, mean: float, cost: CostModel) -> str:
    if abs(change) < _NOTHING or math.isnan(change):
        does = "do not change MoE time"
    else:
        does = f"{'cost' if change > 0 else 'save'} {abs(change):.1%} of MoE time"
    per_step = f"experts get {mean:.3g} tokens per step on average"
    return (
        f"On this trace the redundant replicas of the initial placement {does}:"
        f" {_reason(cost.replica)}, and {per_step}."
    )


def _reason(replica: ReplicaWork) -> str:
    """Return what the cost model says of the work of a replica."""
    parts = []
    if replica.read_tokens > 0:
        parts.append(
            "reading an expert's weights takes as long as computing"
            f" {replica.read_tokens:.3g} tokens"
        )
    if replica.start_tokens > 0:
        parts.append(f"every replica in use adds the time of {replica.start_tokens:.3g} tokens")
    return " and ".join(parts) or "the cost model does not count the reading of weights"
