"""Measures the MoE layer of every rank on recorded traffic, under several placements.

The ranks of a fleet run one after the other on one device: each computes the tokens that it would
get, with one grouped matrix product per matrix over its slots. The time of a layer is that of its
slowest rank, as ranks wait for each other. Communication is not part of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from bench.dispatch_traces import EXAMPLES
from bench.gpu_costs import MODELS, TYPES, measured_cost
from bench.gpu_parts import Sizes
from bench.planning_walk import setup_of
from evenkeel_moe.agent.profile.expert_layer import (
    ExpertShape,
    Graphs,
    GroupedProduct,
    waiter,
)
from evenkeel_moe.agent.profile.timing import time_points
from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import relabel_proposal
from evenkeel_moe.replay.walk import Setup
from evenkeel_moe.wire.link import ReplicaCost

RANKS, SLOTS = 8, 72
LAYERS = (
    ("DeepSeek-V3", "fp8"),
    ("DeepSeek-V3", "bf16"),
    ("Qwen3-235B-A22B", "bf16"),
    ("Kimi-K3", "bf16"),
)
"""Models, and the number types of their experts, that are measured."""


Share = tuple[int, ...]
"""The tokens of the slots of one rank, in one layer and step."""


class RaggedLayer:
    """A MoE layer whose slots each have a number of tokens of their own.

    One grouped product per matrix computes all slots, replayed as a graph on a GPU.
    """

    def __init__(self, shape: ExpertShape, device: torch.device, most_tokens: int) -> None:
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            drawn = torch.randn(*size, generator=generator, device=device) * 0.02
            return drawn.to(self._dtype)

        self.up = random(shape.experts, 2 * shape.d_ffn, shape.d_model).mT
        self.down = random(shape.experts, shape.d_model, shape.d_ffn).mT
        self.row = random(1, shape.d_model)
        """Every token is this one."""
        self._rows = self.row.repeat(most_tokens, 1)
        self._ends: dict[Share, torch.Tensor] = {}
        self._product = GroupedProduct(self._dtype, device)
        self._graphs: Graphs[Share] = Graphs(device)

    def __call__(self, share: Share) -> None:
        """Compute a share; its result is dropped. A rank without tokens launches nothing."""
        if any(share):
            self._graphs.run(self.compute, share)

    def compute(self, share: Share) -> torch.Tensor:
        """Return (n, d_model) results, slot by slot."""
        if share not in self._ends:
            reached = np.cumsum(share)
            self._ends[share] = torch.tensor(reached, dtype=torch.int32, device=self.row.device)
        rows, ends = self._rows[: sum(share)], self._ends[share]
        if len(rows) == 0:
            return rows
        with torch.no_grad():
            gate, value = self._product(rows, self.up, ends).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate).mul_(value).to(self._dtype)
            return self._product(hidden, self.down, ends)


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
    return [tuple(part.tolist()) for part in tokens.reshape(ranks, -1)]


def slowest_ranks(
    shares: dict[str, list[list[Share]]], seconds_of: Callable[[Share], float]
) -> dict[str, float]:
    """Return the mean over the layers of the time of the slowest rank, for each placement."""
    return {
        name: float(np.mean([max(map(seconds_of, ranks)) for ranks in layers]))
        for name, layers in shares.items()
    }


def _planned(setup: Setup, name: str, objective: Objective) -> Placement:
    """Return the placement that a policy plans on the first window of the trace."""
    under = replace(setup, objective=objective)
    problem = under.problem(0, setup.window_steps, Placement.initial(setup.shape))
    return relabel_proposal(problem, find_policy(name)(problem))


def _by_fit(cost: ReplicaCost) -> Callable[[Share], float]:
    def seconds(share: Share) -> float:
        busy = [count for count in share if count]
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
    """Measure every model at three batch sizes, or at one if `sizes` is small."""
    trace = read_trace(EXAMPLES / "decode_abrupt.npz")
    setup = setup_of(trace, RANKS, SLOTS)
    lines = [
        (
            f"Recorded traffic (`{trace.name}`, {trace.num_experts} experts) on {RANKS} ranks with"
            f" {SLOTS // RANKS} slots each, as many slots as a rank of DeepSeek-V3 has on 32 ranks."
            " The counts of a recorded step are scaled to the tokens named, and the tokens of an"
            " expert are split evenly over its replicas."
            " Planned on steps before those that are measured. `linear` has no replicas,"
            " `initial` is where an engine starts, `keel` is planned by tokens, and `keel, time` by"
            " the fit of this device."
        ),
        "",
        (
            "| experts of | tokens a rank | placement | slowest rank | over linear | by tokens |"
            " by the fit |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    layers = LAYERS if device.type == "cuda" else (("DeepSeek-V3", "bf16"),)
    batches = (64, 256, 2048)[: sizes.pick(3, 1)]
    share = Sizes(sizes.small, sizes.budget_s / (len(layers) * len(batches)))
    for name, kind in layers:
        for tokens in batches:
            lines += _rows(name, kind, tokens, setup, device, share)
    return lines


def _rows(
    name: str,
    kind: str,
    tokens: int,
    setup: Setup,
    device: torch.device,
    sizes: Sizes,
) -> Iterator[str]:
    model = MODELS[name]
    width = (model.d_model, model.d_ffn) if not sizes.small else (64, 32)
    shape = ExpertShape(*width, setup.shape.slots_per_rank, TYPES[kind])
    cost, _, _ = measured_cost(
        shape, device, max_tokens=sizes.pick(4096, 128), budget_s=sizes.budget_s / 4
    )
    work = ReplicaWork(cost.read_s / cost.s_per_token, cost.s_per_replica / cost.s_per_token)
    # The trace's own steps are smaller or larger than the batch that is measured.
    choices = RANKS * tokens * model.top_k
    scale = float(setup.load[: setup.window_steps].sum(axis=2).mean()) / choices
    there = ReplicaWork(work.read_tokens * scale, work.start_tokens * scale)
    placements = {
        "linear": Placement.linear(setup.shape),
        "initial": Placement.initial(setup.shape),
        "eplb": _planned(setup, "eplb", Objective()),
        "keel": _planned(setup, "keel", Objective()),
        "keel, time": _planned(setup, "keel", Objective(cost=CostModel(replica=there))),
    }
    samples = _samples(setup, sizes.pick(16, 2))
    shares = {key: _shares(setup, one, samples, choices) for key, one in placements.items()}
    points = sorted({share for layers in shares.values() for ranks in layers for share in ranks})
    layer = RaggedLayer(shape, device, max(sum(share) for share in points))
    timing = time_points(layer, points, budget_s=sizes.budget_s * 3 / 4, settle=waiter(device))
    measured = dict(zip(points, timing.seconds, strict=True))
    times = slowest_ranks(shares, measured.__getitem__)
    by_tokens = slowest_ranks(shares, lambda share: float(sum(share)))
    by_fit = slowest_ranks(shares, _by_fit(cost))
    for key, seconds in times.items():
        ratios = [found[key] / found["linear"] for found in (times, by_tokens, by_fit)]
        shown = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        of = "a small layer" if sizes.small else f"{name}, {kind}"
        yield f"| {of} | {tokens} | {key} | {seconds * 1e6:,.1f} us | {shown} |"
