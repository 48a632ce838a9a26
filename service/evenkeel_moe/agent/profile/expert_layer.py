"""The MoE layer that a profile measures.

One call for each matrix computes all active replicas, as an engine's grouped kernel does; a loop
over replicas would time its launches instead. On a GPU the layer is replayed as a graph, as engines
run decode: launched one by one, the kernels of a small layer end sooner than they can be launched,
and a measurement shows the launches only. Replicas take turns, so that weights come from memory and
not from a cache. Weights are random. An engine's fused kernel has other stairs, so what carries
over is the comparison of devices.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from evenkeel_moe.errors import InvalidInput

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The part of a MoE layer that one rank computes."""

    d_model: int
    d_ffn: int
    experts: int
    """Slots of this rank in one layer."""
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ffn", "experts"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be at least 1")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise InvalidInput(f"torch has no number type {self.dtype}")


class Point(NamedTuple):
    """One point of the grid."""

    tokens: int
    """Each active replica has this many."""
    active: int


def even_point(tokens: int, experts: int) -> Point:
    """Return the point at which that many tokens are spread evenly over all replicas of a rank.

    With fewer tokens than replicas, each active one has a token.
    """
    active = min(tokens, experts)
    return Point(-(-tokens // active), active)


class Graphs(Generic[KeyT]):
    """Runs computations; on a GPU the first call with an argument captures a graph.

    A computation is passed with each call and not kept: a cycle of references would let Python end
    old graphs at any time, and one that ends during a capture makes the capture fail.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._graphs: dict[KeyT, torch.cuda.CUDAGraph] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if self._on_gpu else None

    def run(self, compute: Callable[[KeyT], object], key: KeyT) -> None:
        """Start a computation of the argument; its result is dropped.

        Args:
            compute: the same function in every call.
            key: its argument.

        Raises:
            InvalidInput: the computation cannot be captured.
        """
        if not self._on_gpu:
            compute(key)
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._captured(compute, key)
        graph.replay()

    def _captured(self, compute: Callable[[KeyT], object], key: KeyT) -> torch.cuda.CUDAGraph:
        compute(key)  # What is allocated once is allocated outside the graph.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Graphs share memory, since no result is kept. Other threads may go on using the GPU.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute(key)
        except RuntimeError as error:
            raise InvalidInput(f"no graph of {key}: {str(error)[:200]}") from error
        return graph


class GroupedProduct:
    """Multiplies the rows of each replica by its weights, in one launch.

    Its kernel is made for this, as that of an engine is. Eight-bit floats are computed with a scale
    for each row, all 1, into bfloat16.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        functional: Any = torch.nn.functional
        self.device = device
        self._scaled = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        self._multiply = functional.scaled_grouped_mm if self._scaled else functional.grouped_mm
        self._ones: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Return (n, inner) products.

        Args:
            rows: (n, width), replica by replica.
            weights: (a, width, inner), the columns contiguous.
            ends: (a,) int32, the row after the last one of each replica.
        """
        found: Tensor
        if not self._scaled:
            found = self._multiply(rows, weights, offs=ends)
            return found
        by_row: Any = torch.nn.functional.ScalingType.RowWise  # type: ignore[attr-defined]
        found = self._multiply(
            rows,
            weights,
            self._scales(len(rows)),
            by_row,
            self._scales(len(weights), weights.shape[2]),
            by_row,
            offs=ends,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return found

    def _scales(self, *size: int) -> Tensor:
        scales = self._ones.get(size)
        if scales is None:
            scales = self._ones[size] = torch.ones(size, device=self.device)
        return scales


def _batched_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the same where every replica has the same number of rows."""
    return torch.bmm(rows.view(len(weights), -1, rows.shape[1]), weights).flatten(0, 1)


class GroupedLayer:
    """A MoE layer whose active replicas all have the same number of tokens.

    Raises:
        InvalidInput: torch cannot multiply matrices of this number type on the device.
    """

    def __init__(self, shape: ExpertShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._generator = torch.Generator(device).manual_seed(0)
        # On a CPU, torch's grouped product is a loop over replicas.
        grouped = self._dtype.itemsize == 1 or (
            device.type == "cuda" and self._dtype == torch.bfloat16
        )
        try:
            self._product = GroupedProduct(self._dtype, device) if grouped else _batched_product
            self._up = self._weights(shape.d_model, 2 * shape.d_ffn, grouped)
            self._down = self._weights(shape.d_ffn, shape.d_model, grouped)
            self._rows: dict[Point, tuple[Tensor, Tensor]] = {}
            self.compute(Point(1, 1))
        except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
            raise InvalidInput(
                f"no layer of {shape.dtype} on {device}: {str(error)[:200]}"
            ) from error
        self._first = 0
        self._graphs: Graphs[tuple[Point, int]] = Graphs(device)

    def __call__(self, point: Point) -> None:
        """Compute with the replicas whose turn it is."""
        if self._first + point.active > self.shape.experts:
            self._first = 0
        self._graphs.run(self._compute_turn, (point, self._first))
        self._first += point.active

    def compute(self, point: Point, first: int = 0) -> Tensor:
        """Return (active * tokens, d_model) results of the replicas from `first` on."""
        rows, ends = self._inputs(point)
        chosen = slice(first, first + point.active)
        with torch.no_grad():
            gate, value = self._product(rows, self._up[chosen], ends).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate).mul_(value).to(self._dtype)
            return self._product(hidden, self._down[chosen], ends)

    def _compute_turn(self, turn: tuple[Point, int]) -> None:
        self.compute(*turn)

    def _inputs(self, point: Point) -> tuple[Tensor, Tensor]:
        found = self._rows.get(point)
        if found is None:
            ends = torch.arange(1, point.active + 1, dtype=torch.int32) * point.tokens
            rows = self._random(1, point.active * point.tokens, self.shape.d_model)[0]
            found = self._rows[point] = (rows, ends.to(self.device))
        return found

    def _weights(self, width: int, inner: int, grouped: bool) -> Tensor:
        """Return (experts, width, inner) random weights; a grouped product reads columns."""
        if grouped:
            return self._random(self.shape.experts, inner, width).transpose(1, 2)
        return self._random(self.shape.experts, width, inner)

    def _random(self, count: int, *size: int) -> Tensor:
        made = torch.empty(count, *size, device=self.device, dtype=self._dtype)
        for one in made:  # One at a time: the memory beside an engine is small.
            one.copy_(torch.randn(*size, generator=self._generator, device=self.device) * 0.02)
        return made


def waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the computation that was started on a device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return wait
