"""Libra's two-stage execution as a schedule: what runs on which resource, and after what.

Local tokens first, remote ones second. Everything that decides about remote tokens, and the dispatch itself (an
all-gather, which needs no decision), fits beside the local stage; planning and fetching the next layer's
experts fits beside the remote stage. Experts sit in two buffers: even layers compute from one while
the odd layer's experts arrive in the other, so a fetch never touches what is being computed on.

`timeline` computes when each task starts and ends; engines issue the tasks in the listed order, and
only wait where `after` says so.

Source: Libra, section 3.1, Figure 4, section 4 and Table 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evenkeel_moe.errors import InvalidInput

__all__ = [
    "PrefetchBuffers",
    "Resource",
    "Span",
    "Stage",
    "Task",
    "hidden_s",
    "layer_tasks",
    "timeline",
]


class Stage(StrEnum):
    """The parts of one MoE layer."""

    GATE = "gate"
    PREDICT = "predict"
    """Lookahead: the next layer's gate on this layer's hidden state."""
    DISPATCH = "dispatch"
    """All-gather of the tokens."""
    EXCHANGE_DEMAND = "exchange_demand"
    """Counts of this layer, and predicted ones of the next, to the CPU of every rank."""
    SHARD = "shard"
    """Algorithm 2, on the CPU."""
    RETURN_PLAN = "return_plan"
    """Sharding back to the GPU."""
    LOCAL = "local"
    """Own tokens through own experts."""
    PLAN = "plan"
    """Algorithm 1 for the next layer, on the CPU."""
    PREFETCH = "prefetch"
    """Expert weights of the next layer into the other buffer."""
    REMOTE = "remote"
    COMBINE = "combine"


class Resource(StrEnum):
    """What a task occupies; one task at a time each."""

    COMPUTE = "compute"
    """The GPU's compute stream."""
    CPU = "cpu"
    NETWORK = "network"
    """The collectives' stream."""
    COPY = "copy"
    """The copy engines."""


@dataclass(frozen=True, slots=True)
class Task:
    """One stage of one layer."""

    layer: int
    stage: Stage
    resource: Resource
    after: tuple[tuple[int, Stage], ...]
    """(layer, stage) of what must have ended."""


def layer_tasks(layer: int, num_layers: int) -> tuple[Task, ...]:
    """The tasks of one MoE layer in the order an engine issues them.

    Raises:
        InvalidInput: no such layer.
    """
    if not 0 <= layer < num_layers:
        raise InvalidInput(f"layer {layer} is outside 0..{num_layers - 1}")
    s, r = Stage, Resource
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
        # The buffer of the next layer was last read two layers ago, which has long ended.
        tasks += [
            Task(layer, s.PLAN, r.CPU, ((layer, s.SHARD),)),
            Task(layer, s.PREFETCH, r.COPY, ((layer, s.PLAN),)),
        ]
    tasks.append(Task(layer, s.COMBINE, r.NETWORK, ((layer, s.REMOTE),)))
    return tuple(tasks)


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran."""

    task: Task
    start_s: float
    end_s: float


def timeline(tasks: tuple[Task, ...], seconds: Mapping[Stage, float]) -> tuple[Span, ...]:
    """Run tasks in order, each as soon as its resource and what it waits for are free.

    Args:
        tasks: in the order they are issued.
        seconds: duration of each stage; stages left out take no time.

    Raises:
        InvalidInput: a negative duration, or a task that waits for one not issued before it.
    """
    if any(value < 0 for value in seconds.values()):
        raise InvalidInput("durations must not be negative")
    free: dict[Resource, float] = {}
    ended: dict[tuple[int, Stage], float] = {}
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


def hidden_s(spans: tuple[Span, ...], stage: Stage) -> float:
    """Seconds of a stage's tasks during which the compute stream was at work too."""
    busy = [(s.start_s, s.end_s) for s in spans if s.task.resource is Resource.COMPUTE]
    total = 0.0
    for span in spans:
        if span.task.stage is stage:
            total += sum(
                max(0.0, min(span.end_s, high) - max(span.start_s, low)) for low, high in busy
            )
    return total


class PrefetchBuffers:
    """Which transient expert is in which place of the even and the odd buffer.

    A layer's experts arrive while the layer before computes from the other buffer. What is here is never part
    of a placement and never the source of a copy: it is gone with the next layer of the same parity.
    """

    def __init__(self, size: int) -> None:
        """size: N, places per buffer.

        Raises:
            InvalidInput: negative size.
        """
        if size < 0:
            raise InvalidInput(f"a buffer of {size} places cannot be")
        self.size = size
        self._held: list[tuple[int, tuple[int, ...]] | None] = [None, None]
        self._computing: int | None = None

    def prefetch(self, layer: int, experts: tuple[int, ...]) -> int:
        """Claim the buffer of a layer for its experts; 0 for the even one, 1 for the odd one.

        Raises:
            InvalidInput: more experts than places, or the buffer is being computed from.
        """
        if len(experts) > self.size:
            raise InvalidInput(f"{len(experts)} experts for {self.size} places")
        if self._computing is not None and self._computing % 2 == layer % 2:
            raise InvalidInput(
                f"layer {layer} would overwrite the experts of layer {self._computing}"
            )
        self._held[layer % 2] = (layer, tuple(experts))
        return layer % 2

    def begin(self, layer: int) -> tuple[int, ...]:
        """Experts a layer finds in its buffer, in place order; it keeps the buffer until `end`."""
        self._computing = layer
        held = self._held[layer % 2]
        return held[1] if held is not None and held[0] == layer else ()

    def end(self, layer: int) -> None:
        """The layer no longer reads its buffer; what was in it is gone."""
        self._computing = None
        self._held[layer % 2] = None
