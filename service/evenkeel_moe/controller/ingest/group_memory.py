"""Computes, from the shape that ranks declare, the most memory that their deployment takes.

The parts of a deployment keep these bounds, so a group that does not fit can be refused when it
registers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache

from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS
from evenkeel_moe.telemetry.windows import source_bytes

_MAX_PENDING_BYTES = 1 << 28
"""Most bytes of incomplete steps of one side of counting. For a large shape fewer than
`max_pending` steps are held."""
_MAX_WINDOW_BYTES = 1 << 28
"""Most bytes of one phase's window. For a large shape fewer than `window_steps` steps are kept:
otherwise one rank could fill the memory with a shape that it alone declares."""
_MAX_SOURCE_BYTES = 1 << 28
"""Most bytes of one phase's source-side sums. For a larger shape none are kept: they only refine
the costs of plans."""
_MAPS = 96
"""Placements that fill as many bytes as those of the last 64 epochs, for rollbacks, and the maps
derived from eight of them, under which reports are counted."""
_ORIGIN_BYTES = 32
"""Bytes, for each layer, expert and rank, of what a plan knows of tokens by source rank: the sums,
those that are expected, their shares, and a copy of these."""
_RANK_BYTES = 160_000
"""Bytes of a stream and its session, measured with `make bench-scale`, rounded up."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most steps that a deployment keeps."""

    window_steps: int
    """Complete steps of each phase."""
    pending_steps: int
    """Incomplete steps of each side of counting."""
    keeps_sources: bool
    """True if source-side sums are kept."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The most bytes that the parts of one deployment take."""

    windows: int
    """The windows of all phases, and the sums by which their counts are checked."""
    sources: int
    """Their source-side sums."""
    pending: int
    """Incomplete steps, of both sides of counting."""
    waiting: int
    """Reports that wait until the placement is known."""
    cycle: int
    """The copy of the window that a planning cycle gets, before and after it is packed."""
    maps: int
    ranks: int
    """Streams and sessions."""
    plan: int
    """Bytes of a plan in the planner's process, which makes one plan at a time."""

    @property
    def total(self) -> int:
        """The sum of all parts in the controller's process."""
        held = self.windows + self.sources + self.pending + self.waiting
        return held + self.cycle + self.maps + self.ranks

    def __str__(self) -> str:
        parts = ", ".join(f"{one.name} {getattr(self, one.name)}" for one in fields(self))
        return f"{self.total + self.plan} bytes ({parts})"


def memory_together(groups: Iterable[GroupMemory]) -> int:
    """Return the most bytes of several groups, and of the largest plan of any of them."""
    found = list(groups)
    return sum(one.total for one in found) + max((one.plan for one in found), default=0)


def limit_steps(shape: ModelShape, window_steps: int, max_pending: int) -> StepLimits:
    """Return how many steps of a shape are kept: as set, or as many as the bytes allow."""
    most = _MAX_PENDING_BYTES // (
        8 * shape.num_layers * max(shape.num_slots, shape.num_logical_experts)
    )
    return StepLimits(
        window_steps=max(1, min(window_steps, _MAX_WINDOW_BYTES // _window_step(shape))),
        pending_steps=max(1, min(max_pending, most)),
        keeps_sources=source_bytes(shape) <= _MAX_SOURCE_BYTES,
    )


@lru_cache(maxsize=1024)  # Each Hello asks for that of every deployment.
def group_memory(
    shape: ModelShape, *, window_steps: int, max_pending: int, plan_steps: int, threads: int
) -> GroupMemory:
    """Return the most memory that a deployment of a shape takes.

    Args:
        shape: as its ranks declare it.
        window_steps: `window.steps`.
        max_pending: `ingest.max_pending_steps`.
        plan_steps: `window.plan_steps`.
        threads: `planner.threads`.
    """
    layers, experts = shape.num_layers, shape.num_logical_experts
    limits, phases = limit_steps(shape, window_steps, max_pending), len(Phase)
    by_slot = limits.pending_steps * 4 * layers * shape.num_slots
    by_expert = limits.pending_steps * 8 * layers * experts
    of_ranks = limits.pending_steps * (17 * shape.num_ranks + 64)
    cycle_steps = min(plan_steps, limits.window_steps)
    return GroupMemory(
        windows=phases * limits.window_steps * _window_step(shape)
        + 8 * layers * (experts + plan_steps),
        sources=phases * source_bytes(shape) if limits.keeps_sources else 0,
        pending=by_slot + by_expert + 2 * of_ranks,
        waiting=max_waiting_bytes(shape, limits),
        cycle=2 * cycle_steps * _window_step(shape),
        maps=_MAPS * 4 * layers * shape.num_slots,
        ranks=_RANK_BYTES * shape.num_ranks,
        plan=_plan_bytes(shape, cycle_steps, limits.keeps_sources, threads),
    )


def _plan_bytes(shape: ModelShape, steps: int, has_sources: bool, threads: int) -> int:
    """Return the bytes of one of keel's plans.

    The steps are held as they came, as expected and as the search reads them. Each thread works on
    one layer at a time: on its loads by expert and by rank, and on what the moves of its experts
    and slots to each rank promise.
    """
    layers, experts, ranks = shape.num_layers, shape.num_logical_experts, shape.num_ranks
    searched = min(steps, DEFAULT_OPTIONS.merged_size // (experts * ranks) + 1)
    one_layer = ranks * (64 * experts + 8 * shape.num_slots + 48 * searched)
    one_layer += 56 * experts * searched
    origins = _ORIGIN_BYTES * layers * experts * ranks if has_sources else 0
    return origins + threads * one_layer + 8 * steps * layers * (5 * experts + ranks)


def max_waiting_bytes(shape: ModelShape, limits: StepLimits) -> int:
    """Return the most bytes of reports that wait.

    More would not be used: of steps that no rank has finished reporting, only the pending ones are
    held.
    """
    return (
        limits.pending_steps
        * 4
        * shape.num_layers
        * max(shape.num_slots, shape.num_logical_experts)
    )


def _window_step(shape: ModelShape) -> int:
    """Return the bytes of one step in a window."""
    return 4 * shape.num_layers * shape.num_logical_experts + 16 * shape.num_ranks + 16
