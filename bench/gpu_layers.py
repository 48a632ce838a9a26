"""Measures the MoE layer of every rank on recorded traffic, under several placements.

The ranks of a fleet run one after the other on one device: each computes the tokens that it would
get, with one grouped matrix product per matrix over its slots. The time of a layer is that of its
slowest rank, as ranks wait for each other. Communication is not part of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_parts import Sizes
from bench.planning_walk import EXAMPLES, setup_of
from evenkeel_moe.agent.profile.expert_layer import ExpertShape, Point, grouped_layer, waiter
from evenkeel_moe.agent.profile.replica_cost import ReplicaProfile, fit_replica_cost, grid
from evenkeel_moe.agent.profile.timing import time_points
from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.registry import resolve_policy
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.walk import Setup, relabelled
from evenkeel_moe.wire.link import ReplicaCost

__all__ = ["MODELS", "RaggedLayer", "layer_times", "rank_tokens", "slowest_ranks"]


class ModelExperts(NamedTuple):
    """The routed experts of a model, from its published configuration."""

    d_model: int
    """Width of what an expert reads; Kimi-K3's experts work on a projection of half the width."""
    d_ffn: int
    top_k: int


MODELS = {
    "DeepSeek-V3": ModelExperts(7168, 2048, 8),
    "Qwen3-235B-A22B": ModelExperts(4096, 1536, 8),
    "Kimi-K3": ModelExperts(3584, 3072, 16),
}
RANKS, SLOTS = 8, 72


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of the slots of one rank, in one layer and step."""

    tokens: tuple[int, ...]


class RaggedLayer:
    """A MoE layer whose slots each have a number of tokens of their own.

    One `grouped_mm` per matrix computes all slots. The inputs of a share are made in the first call
    with it, so that later calls time the products alone.
    """

    def __init__(self, shape: ExpertShape, device: torch.device) -> None:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        generator = torch.Generator().manual_seed(0)

        def weights(*size: int) -> torch.Tensor:
            drawn = torch.randn(*size, generator=generator) * 0.02
            return drawn.to(device=device, dtype=dtype)

        self.up = weights(shape.experts, shape.d_model, 2 * shape.d_ffn)
        self.down = weights(shape.experts, shape.d_ffn, shape.d_model)
        self.row = weights(1, shape.d_model)
        """Every token is this one."""
        self._rows = self.row
        self._ends: dict[Share, torch.Tensor] = {}
        self._grouped: Any = torch.nn.functional.grouped_mm

    def __call__(self, share: Share) -> None:
        """Compute a share; its result is dropped."""
        self.compute(share)

    def compute(self, share: Share) -> torch.Tensor:
        """Return (n, d_model) results, slot by slot."""
        total = sum(share.tokens)
        if share not in self._ends:
            reached = np.cumsum(share.tokens)
            self._ends[share] = torch.tensor(reached, dtype=torch.int32, device=self.row.device)
        if len(self._rows) < total:
            self._rows = self.row.repeat(total, 1)
        rows, ends = self._rows[:total], self._ends[share]
        if total == 0:
            return rows
        with torch.no_grad():
            gate, value = self._grouped(rows, self.up, offs=ends).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate).mul_(value)
            result: torch.Tensor = self._grouped(hidden, self.down, offs=ends)
        return result


def rank_tokens(row: NDArray[np.int32], counts: NDArray[np.int64], ranks: int) -> list[Share]:
    """Return the share of each rank when the tokens of an expert are split evenly.

    Args:
        row: (S,) expert of each slot, -1 for an empty one.
        counts: (E,) whole tokens of each expert; the first replicas get what is left over.
        ranks: R.
    """
    tokens = np.zeros(len(row), np.int64)
    for expert in np.unique(row[row != EMPTY]):
        slots = np.flatnonzero(row == expert)
        each, more = divmod(int(counts[expert]), len(slots))
        tokens[slots] = each
        tokens[slots[:more]] += 1
    return [Share(tuple(part.tolist())) for part in tokens.reshape(ranks, -1)]


def slowest_ranks(
    shares: dict[str, list[list[Share]]], seconds_of: Callable[[Share], float]
) -> dict[str, float]:
    """Return the mean over the layers of the time of the slowest rank, for each placement."""
    return {
        name: float(np.mean([max(map(seconds_of, ranks)) for ranks in layers]))
        for name, layers in shares.items()
    }


def _linear(setup: Setup) -> Placement:
    """Return the placement without replicas: experts in order, the last slots of a rank empty."""
    shape = setup.shape
    row = np.full((shape.num_ranks, shape.slots_per_rank), EMPTY, np.int32)
    for rank, part in enumerate(
        np.array_split(np.arange(shape.num_logical_experts), shape.num_ranks)
    ):
        row[rank, : len(part)] = part
    rows = np.repeat(row.reshape(1, -1), shape.num_layers, axis=0)
    return Placement(rows, shape.num_ranks, shape.num_logical_experts)


def _planned(setup: Setup, name: str, objective: Objective) -> Placement:
    """Return the placement that a policy plans on the first window of the trace."""
    under = replace(setup, objective=objective)
    problem = under.problem(0, setup.window_steps, Placement.initial(setup.shape))
    return relabelled(problem, resolve_policy(name)(problem))


def _by_fit(cost: ReplicaCost) -> Callable[[Share], float]:
    def seconds(share: Share) -> float:
        busy = [count for count in share.tokens if count]
        work = sum(cost.s_per_replica + max(cost.read_s, cost.s_per_token * n) for n in busy)
        return cost.fixed_s + work

    return seconds


def _samples(setup: Setup, number: int) -> list[tuple[int, int]]:
    """Return (step, layer) pairs after the window that was planned on, spread evenly."""
    steps = range(setup.window_steps, setup.window_steps + setup.horizon_steps)
    pairs = [(step, layer) for step in steps for layer in range(setup.shape.num_layers)]
    return [pairs[index] for index in np.linspace(0, len(pairs) - 1, number).astype(int)]


def _shares(
    setup: Setup, placement: Placement, samples: list[tuple[int, int]], choices: int
) -> list[list[Share]]:
    found = []
    for step, layer in samples:
        load = setup.load[step, layer]
        counts = np.round(load / max(load.sum(), 1.0) * choices).astype(np.int64)
        found.append(rank_tokens(placement.phy2log[layer], counts, RANKS))
    return found


def layer_times(device: torch.device, sizes: Sizes) -> list[str]:
    """Measure every model at two batch sizes."""
    trace = read_trace(EXAMPLES / "decode_abrupt.npz")
    setup = setup_of(trace, RANKS, SLOTS)
    lines = [
        (
            f"Recorded traffic (`{trace.name}`, {trace.num_experts} experts) on {RANKS} ranks with"
            f" {SLOTS // RANKS} slots each, as many slots as a rank of DeepSeek-V3 has on 32 ranks."
            " The counts of a recorded step are scaled to the tokens named, and the tokens of an"
            " expert are split evenly over its replicas."
            " Planned on steps before those that are measured. `keel` is planned by tokens, and"
            " `keel, time` by the fit of this device."
        ),
        "",
        (
            "| experts of | tokens a rank | placement | slowest rank | over linear | by tokens |"
            " by the fit |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    models = dict(list(MODELS.items())[: sizes.pick(3, 1)])
    for name, model in models.items():
        for tokens in (64, 2048)[: sizes.pick(2, 1)]:
            budget = sizes.budget_s / (len(models) * sizes.pick(2, 1))
            lines += _rows(name, model, tokens, setup, device, Sizes(sizes.small, budget))
    return lines


def _rows(
    name: str,
    model: ModelExperts,
    tokens: int,
    setup: Setup,
    device: torch.device,
    sizes: Sizes,
) -> Iterator[str]:
    width = (model.d_model, model.d_ffn) if not sizes.small else (64, 32)
    shape = ExpertShape(*width, setup.shape.slots_per_rank, "bfloat16")
    cost = _fit(shape, device, Sizes(sizes.small, sizes.budget_s / 4))
    work = ReplicaWork(cost.read_s / cost.s_per_token, cost.s_per_replica / cost.s_per_token)
    # The trace's own steps are smaller or larger than the batch that is measured.
    choices = RANKS * tokens * model.top_k
    scale = float(setup.load[: setup.window_steps].sum(axis=2).mean()) / choices
    there = ReplicaWork(work.read_tokens * scale, work.start_tokens * scale)
    placements = {
        "linear": _linear(setup),
        "eplb": _planned(setup, "eplb", Objective()),
        "keel": _planned(setup, "keel", Objective()),
        "keel, time": _planned(setup, "keel", Objective(cost=CostModel(replica=there))),
    }
    samples = _samples(setup, sizes.pick(16, 2))
    shares = {key: _shares(setup, one, samples, choices) for key, one in placements.items()}
    points = sorted(
        {share for layers in shares.values() for ranks in layers for share in ranks},
        key=lambda share: share.tokens,
    )
    timing = time_points(
        RaggedLayer(shape, device), points, budget_s=sizes.budget_s * 3 / 4, settle=waiter(device)
    )
    measured = dict(zip(points, timing.seconds, strict=True))
    times = slowest_ranks(shares, measured.__getitem__)
    by_tokens = slowest_ranks(shares, lambda share: float(sum(share.tokens)))
    by_fit = slowest_ranks(shares, _by_fit(cost))
    for key, seconds in times.items():
        ratios = [found[key] / found["linear"] for found in (times, by_tokens, by_fit)]
        shown = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        of = "a small layer" if sizes.small else name
        yield f"| {of} | {tokens} | {key} | {seconds * 1e6:,.1f} us | {shown} |"


def _fit(shape: ExpertShape, device: torch.device, sizes: Sizes) -> ReplicaCost:
    points: list[Point] = grid(shape.experts, sizes.pick(4096, 128))
    timing = time_points(
        grouped_layer(shape, device), points, budget_s=sizes.budget_s, settle=waiter(device)
    )
    return fit_replica_cost(ReplicaProfile(tuple(points), timing), 0.0)
