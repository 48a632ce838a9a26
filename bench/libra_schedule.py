"""Libra's two-stage execution as a schedule of tasks with resources and dependencies.

Local tokens are computed first, remote ones second. Everything that decides about remote tokens,
and the dispatch itself (an all-gather, which needs no decision), runs in parallel with the local
stage; planning and fetching the experts of the next layer runs in parallel with the remote stage.
There are two expert buffers: even layers compute from one while the experts of the odd layer arrive
in the other, so a fetch never overwrites experts in use.

`timeline` computes when each task starts and ends if an engine issues the tasks in the listed order
and waits only for the tasks in `after`.

Source: Libra, section 3.1, Figure 4, section 4 and Table 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import InvalidInput

__all__ = ["LibraStage", "Resource", "Task", "layer_tasks", "timeline"]


class LibraStage(StrEnum):
    """The parts of one MoE layer."""

    GATE = "gate"
    PREDICT = "predict"
    """Lookahead: the gate of the next layer applied to the hidden state of this layer."""
    DISPATCH = "dispatch"
    """All-gather of the tokens."""
    EXCHANGE_DEMAND = "exchange_demand"
    """Sends the counts of this layer and the predicted ones of the next to the CPU of every
    rank."""
    SHARD = "shard"
    """Algorithm 2, on the CPU."""
    RETURN_PLAN = "return_plan"
    """Copies the sharding back to the GPU."""
    LOCAL = "local"
    """Computes own tokens with own experts."""
    PLAN = "plan"
    """Algorithm 1 for the next layer, on the CPU."""
    PREFETCH = "prefetch"
    """Copies expert weights of the next layer into the other buffer."""
    REMOTE = "remote"
    COMBINE = "combine"


class Resource(StrEnum):
    """A resource that a task occupies; each runs one task at a time."""

    COMPUTE = "compute"
    """The compute stream of the GPU."""
    CPU = "cpu"
    NETWORK = "network"
    """The stream of the collectives."""
    COPY = "copy"
    """The copy engines."""


@dataclass(frozen=True, slots=True)
class Task:
    """One stage of one layer."""

    layer: int
    stage: LibraStage
    resource: Resource
    after: tuple[tuple[int, LibraStage], ...]
    """(layer, stage) of the tasks that must have ended before."""


def layer_tasks(layer: int, num_layers: int) -> tuple[Task, ...]:
    """Return the tasks of one MoE layer in the order an engine issues them.

    Raises:
        InvalidInput: the layer does not exist.
    """
    if not 0 <= layer < num_layers:
        raise InvalidInput(f"layer {layer} is outside 0..{num_layers - 1}")
    s, r = LibraStage, Resource
    before = ((layer - 1, s.COMBINE),) if layer else ()
    fetched = ((layer - 1, s.PREFETCH),) if layer else ()
    more = layer + 1 < num_layers
    tasks = [Task(layer, s.GATE, r.COMPUTE, before)]
    if more:
        tasks.append(Task(layer, s.PREDICT, r.COMPUTE, ((layer, s.GATE),)))
    asked = ((layer, s.PREDICT if more else s.GATE),)
    tasks += [
        Task(layer, s.LOCAL, r.COMPUTE, ((layer, s.GATE), *fetched)),
        Task(layer, s.EXCHANGE_DEMAND, r.NETWORK, asked),
        Task(layer, s.DISPATCH, r.NETWORK, ((layer, s.GATE),)),
        Task(layer, s.SHARD, r.CPU, ((layer, s.EXCHANGE_DEMAND),)),
        Task(layer, s.RETURN_PLAN, r.COPY, ((layer, s.SHARD),)),
        Task(
            layer,
            s.REMOTE,
            r.COMPUTE,
            ((layer, s.LOCAL), (layer, s.DISPATCH), (layer, s.RETURN_PLAN)),
        ),
    ]
    if more:
        # The buffer of the next layer was last read by the previous layer, which has ended.
        tasks += [
            Task(layer, s.PLAN, r.CPU, ((layer, s.SHARD),)),
            Task(layer, s.PREFETCH, r.COPY, ((layer, s.PLAN),)),
        ]
    tasks.append(Task(layer, s.COMBINE, r.NETWORK, ((layer, s.REMOTE),)))
    return tuple(tasks)


@dataclass(frozen=True, slots=True)
class Span:
    """The time span in which a task ran."""

    task: Task
    start_s: float
    end_s: float


def timeline(tasks: tuple[Task, ...], seconds: Mapping[LibraStage, float]) -> tuple[Span, ...]:
    """Compute the times of tasks that start as soon as their resource and dependencies allow.

    Args:
        tasks: in the order they are issued.
        seconds: duration of each stage; stages left out take no time.

    Raises:
        InvalidInput: a duration is negative, or a task waits for one that is not issued before it.
    """
    if any(value < 0 for value in seconds.values()):
        raise InvalidInput("durations must not be negative")
    free: dict[Resource, float] = {}
    ended: dict[tuple[int, LibraStage], float] = {}
    spans = []
    for task in tasks:
        for wanted in task.after:
            if wanted not in ended:
                raise InvalidInput(
                    f"{task.stage} of layer {task.layer} waits for {wanted}, which is not issued"
                )
        start = max([free.get(task.resource, 0.0), *(ended[wanted] for wanted in task.after)])
        end = start + seconds.get(task.stage, 0.0)
        free[task.resource] = end
        ended[task.layer, task.stage] = end
        spans.append(Span(task, start, end))
    return tuple(spans)
