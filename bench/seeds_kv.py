"""CRAFT's memory: what replicas take from the KV cache, computed and served.

`memory_rows` is arithmetic on the models of the paper. `kv_rows` serves the same requests with the
reference engine at equal memory: without replicas, with CRAFT's own R, and with EPLB's replica in
every layer of every rank.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.report import OUT, Row
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet import run_fleet
from evenkeel_moe.engines.reference.lines import read_lines
from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.requests import Lengths, RequestTraffic, draw_requests
from evenkeel_moe.engines.reference.slots import PooledWeights
from evenkeel_moe.engines.reference.state import SavedPlacement, save_placement
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.craft import plan_craft
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.problem.metrics import balancedness_mean
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from tests.forked.rank import fork_rank

# --- the paper's models ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperSetup:
    """One deployment of the paper: bfloat16, 8 GPUs of 80 GB a node, EP over all GPUs."""

    name: str
    moe_layers: int
    experts: int
    other_parameters: float
    """Parameters outside the routed experts, by the sizes of the model; a node holds them once."""
    gpus: int
    claimed: float
    """Share of the KV cache that EPLB's replicas take, as printed."""


PAPER_SETUPS = (
    PaperSetup("D8", 58, 256, 17.1e9, 64, 0.19),
    PaperSetup("K6", 60, 384, 11.6e9, 48, 0.75),
    PaperSetup("K12", 60, 384, 11.6e9, 96, 0.24),
)
EXPERT_BYTES = 3 * 7168 * 2048 * 2
"""Three matrices of hidden x intermediate size; the same in DeepSeek-R1 and Kimi-K2."""


def memory_rows() -> list[Row]:
    """Return the part of the KV cache that a replica in every layer of every GPU takes.

    The memory of a GPU for weights and KV cache is not printed: it is what gives K6 its 75 %.
    """
    k6 = PAPER_SETUPS[1]
    memory = _weights(k6) + _replicas(k6) / k6.claimed
    rows = [Row("kv_paper_bytes_for_weights_and_cache", memory, "bytes")]
    for setup in PAPER_SETUPS:
        taken = _replicas(setup) / (memory - _weights(setup))
        rows += [
            Row(f"kv_paper_{setup.name}_replica_bytes", _replicas(setup), "bytes"),
            Row(f"kv_paper_{setup.name}_share_taken", taken, "1"),
            Row(f"kv_paper_{setup.name}_share_taken_claimed", setup.claimed, "1"),
        ]
    r8 = 8 / k6.moe_layers * k6.claimed
    return [*rows, Row("kv_paper_K6_share_taken_by_craft_R8", r8, "1")]


def _weights(setup: PaperSetup) -> float:
    experts = setup.moe_layers * setup.experts / setup.gpus * EXPERT_BYTES
    return experts + setup.other_parameters * 2 / 8


def _replicas(setup: PaperSetup) -> float:
    return float(setup.moe_layers * EXPERT_BYTES)


# --- served by the reference engine ---------------------------------------------------------------

SERVED = RankConfig(
    run_folder="",
    num_ranks=4,
    seed=7,
    layers=4,
    experts=16,
    top_k=2,
    tokens_per_step=64,
    steps=120,
    requests_per_s=1e12,
    prompt_tokens=48,
    output_tokens=16,
    pace_s_per_token=1e-4,
    pace_s_per_replica=2e-4,
    agent=False,
    verify_every=0,
)
"""Requests always wait, so the batch of each step follows from the seed and the free blocks alone.
A block has 32 tokens. With this seed the layers differ in skew: their hottest experts have 2.7 to
5.8 times the mean load."""
READ_TOKENS = {"compute": 2.0, "read": 15.0}
"""Tokens that a rank computes in the time of reading one expert, by what bounds a step. `compute`
is the paper's prefill: an A100 computes 156 tokens meanwhile, and an expert has 1024, seven times
as many; here it has 14. `read` is decode: about as many tokens as an expert has."""
BUDGETS = (9, 6)
"""Buffers of a rank for experts and KV cache, in the mean of a layer. EPLB's replicas take 20 and
50 % of the cache that there is without replicas."""
WARM_STEPS = 20
"""First steps, while the batch grows: what ends in them is left out."""
SLACK = 1.25
"""Bound on the mean time between tokens of a request, over their mean without replicas."""


def kv_rows(config: RankConfig = SERVED, budgets: tuple[int, ...] = BUDGETS) -> Iterator[list[Row]]:
    """Balance, KV tokens, batch, tokens a second and goodput at equal memory, by budget and policy.

    Goodput is the requests that ended in a second and keep to the bound. Time is that of the pace,
    for each of `READ_TOKENS`: what the experts of the slowest rank take, layer after layer, for the
    tokens and the active experts that the engine measured. `wall_step` is by this machine's clock.
    """
    load = profile(config)
    drawn: dict[str, list[float]] = {}
    for buffers in budgets:
        asked = config.replace(pool_slots_per_layer=buffers, slots_per_rank=0)
        served = {
            name: serve(asked, placement) for name, placement in placements(asked, load).items()
        }
        start = f"kv_{buffers * config.layers}_buffers"
        yield [
            Row(f"{start}_{name}_{figure}", value, unit)
            for name, one in served.items()
            for figure, value, unit in (
                ("replicas_per_rank", one.replicas_per_rank, "1"),
                ("balancedness", one.balancedness, "1"),
                ("kv_tokens_per_rank", one.kv_tokens, "tokens"),
                ("batch_per_rank", one.batch, "requests"),
                ("wall_step", one.wall_step_s, "s"),
            )
        ]
        for bound_by, read_tokens in READ_TOKENS.items():
            clocks = {name: one.paced(read_tokens) for name, one in served.items()}
            bound = SLACK * float(np.mean(clocks["none"].between_s))
            good = {name: clock.goodput(bound) for name, clock in clocks.items()}
            yield [
                Row(f"{start}_{bound_by}_{name}_{figure}", value, unit)
                for name, clock in clocks.items()
                for figure, value, unit in (
                    ("step", clock.window_s / clock.steps, "s"),
                    ("time_between_tokens", float(np.mean(clock.between_s)), "s"),
                    ("tokens", clock.output / clock.window_s, "tokens/s"),
                    ("goodput", good[name], "requests/s"),
                )
            ] + [
                Row(f"{start}_{bound_by}_craft_over_{other}", good["craft"] / good[other], "ratio")
                for other in ("eplb", "none")
            ]
            for name, value in good.items():
                drawn.setdefault(name, []).append(value / good["none"])
    labels = [
        f"{buffers * config.layers} buffers,\nbound by {what}"
        for buffers in budgets
        for what in ("computing", "reading")
    ]
    draw(labels, drawn, OUT / "goodput.svg")


@dataclass(frozen=True, eq=False)
class Clocked:
    """The counted steps and requests of a run by one clock."""

    steps: int
    window_s: float
    between_s: NDArray[np.float64]
    """(n,) mean time between tokens of each request that ended."""
    output: int
    """Tokens of these requests."""

    def goodput(self, bound_s: float) -> float:
        """Return the requests in a second that keep to a bound on the time between tokens."""
        return float((self.between_s <= bound_s).sum() / self.window_s)


@dataclass(frozen=True, eq=False)
class Served:
    """The results of one run."""

    replicas_per_rank: float
    balancedness: float
    """Mean over counted steps and layers of the measured loads."""
    kv_tokens: float
    batch: float
    """Mean running requests of a rank."""
    wall_step_s: float
    tokens: NDArray[np.float64]
    """(R, T, L) tokens that each rank computed."""
    active: NDArray[np.float64]
    """(R, T, L) experts that they were of."""
    requests: NDArray[np.int64]
    """(n, 3) step of the first token, step of the last, and tokens of each request that ended in
    a counted step."""
    s_per_token: float

    def paced(self, read_tokens: float) -> Clocked:
        """Return the run by the clock of a pace."""
        work = (self.tokens + read_tokens * self.active).max(axis=0).sum(axis=1)
        ends = self.s_per_token * work.cumsum()
        first, last, output = self.requests.T
        return Clocked(
            len(ends) - 1 - WARM_STEPS,
            float(ends[-1] - ends[WARM_STEPS]),
            (ends[last] - ends[first]) / (output - 1),
            int(output.sum()),
        )


def placements(config: RankConfig, load: NDArray[np.float64]) -> dict[str, Placement]:
    """Return the placement of each policy, planned on a profile."""
    ranks = config.num_ranks
    problem = PlacementProblem(load, config.shape, Topology.single_node(ranks))
    return {
        "none": plan_eplb(replace(problem, replica_budget=0)).placement,
        "craft": plan_craft(problem).placement,
        "eplb": plan_eplb(replace(problem, replica_budget=ranks)).placement,
    }


def profile(config: RankConfig, steps: int = 32) -> NDArray[np.float64]:
    """Return (T, L, E) tokens of other requests than those that are served, without a fleet."""
    cpu = torch.device("cpu")
    model = Model.build(**config.model_sizes, device=cpu)
    weights = PooledWeights(config.layers, 1, 128, config.d_model, config.d_ffn, cpu)
    lengths = Lengths(config.prompt_tokens, config.output_tokens)
    asked = draw_requests((config.seed, config.num_ranks), 1e9, lengths)
    rows = config.num_ranks * config.tokens_per_step
    traffic = RequestTraffic(model, weights, asked, lengths.most, rows)
    counts = np.zeros((steps, config.layers, config.experts))
    for step in range(steps):
        x = model.embed(traffic.tokens(step, 0), traffic.before(step, 0))
        for layer, plain in enumerate(model.undistributed(x, traffic.attend)):
            chosen = plain.chosen.flatten().numpy()
            counts[step, layer] = np.bincount(chosen, minlength=config.experts)
        traffic.end_step(plain.after)
    return counts


def serve(config: RankConfig, placement: Placement) -> Served:
    """Serve the requests with a fleet of processes that starts from a placement."""
    ranks = run(config, placement)
    steps = [[line for line in rank if line["kind"] == "step"] for rank in ranks]
    later = slice(WARM_STEPS + 1, None)
    tokens, paced, running, unix = (
        np.array([[step[key] for step in rank] for rank in steps], np.float64)
        for key in ("rank_load", "paced_s", "running", "unix")
    )
    ended = [
        (line["first_step"], line["ended_step"], line["output"])
        for rank in ranks
        for line in rank
        if line["kind"] == "request" and line["ended_step"] > WARM_STEPS and line["output"] > 1
    ]
    held = placement.phy2log.reshape(config.layers, config.num_ranks, -1) >= 0
    free = config.layers * config.pool_slots_per_layer - held.sum(axis=(0, 2)).mean()
    return Served(
        float(placement.replicas_by_layer.sum()) / config.num_ranks,
        balancedness_mean(tokens[:, later].transpose(1, 2, 0)),
        float(free) * (config.d_ffn // config.layers),
        float(running[:, later].mean()),
        float(np.diff(unix[:, later]).mean()),
        tokens,
        ((paced - config.pace_s_per_token * tokens) / config.pace_s_per_replica).round(),
        np.array(ended),
        config.pace_s_per_token,
    )


def run(config: RankConfig, placement: Placement) -> list[list[dict[str, Any]]]:
    """Run a fleet that starts from a placement to its end; return the lines of each rank."""
    ranks = range(config.num_ranks)
    with tempfile.TemporaryDirectory() as name:
        asked = config.replace(run_folder=name)
        for rank in ranks:
            saved = SavedPlacement(placement, 1, "bench")
            save_placement(asked.replace(rank=rank).state_file, saved)
        report = run_fleet(asked, start_rank=fork_rank)
        assert report.ok and not report.restarts, report.words
        return [read_lines(Path(name) / f"rank-{rank}.jsonl") for rank in ranks]


@matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evenkeel"})
def draw(labels: list[str], goodput: dict[str, list[float]], file: Path) -> None:
    """Write a bar chart of goodput, over that without replicas, by setting and policy as SVG."""
    figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    at = np.arange(len(labels))
    colours = {"none": "#8aa9c8", "craft": "#b85c00", "eplb": "#1c2126"}
    names = {"none": "no replicas", "craft": "CRAFT, its own R", "eplb": "EPLB, 1 in every layer"}
    for place, (policy, values) in enumerate(goodput.items()):
        bars = axes.bar(
            at + (place - 1) * 0.27, values, 0.25, color=colours[policy], label=names[policy]
        )
        axes.bar_label(bars, fmt="%.2f")
    axes.set(xticks=at, xticklabels=labels, ylabel="goodput / that without replicas")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
