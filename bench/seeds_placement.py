"""The figures of CRAFT, GEM and Libra's Algorithm 1 that depend on the placement alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.dispatch_traces import RANKS, Recorded, eplb_placement, setup_of
from bench.gem_setups import gem_setup
from bench.report import Row
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft import (
    Benefit,
    allocate_replicas,
    place_replicas,
    replica_benefit,
)
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.gem import plan_gem
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem.metrics import balancedness_mean, rank_load
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal
from evenkeel_moe.replay.walk import Replan, Setup, Walk, walk_forward

EPLB_OVER_CRAFT = 7.25
"""Replicas of EPLB over those of CRAFT at R = 8 for DeepSeek-R1: 58 a GPU over 8."""
CRAFT_RANKS = (8, 16)
"""16 ranks hold 4 experts of a layer each, as DeepSeek-R1 has on the paper's 64 GPUs."""
LEAST_GAIN = 0.005
"""Balancedness that EPLB's replicas must gain for a share of it to be given."""
GEM_RANKS, GEM_WINDOW = 4, 16
"""GPUs and steps of the window in GEM's evaluation."""
WINDOWS = (1, 4, 16, 64, 256)
"""Lengths of GEM's window in steps, within the sweep of its Figure 10."""
SETUPS = ("high", "moderate", "low")
LIBRA_SLOTS = (9, 12)
"""Slots per rank and layer for 8 homes: one copy, and the half that Libra's evaluation allows."""


def craft_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """Share of the balancedness gain of EPLB's replicas that CRAFT reaches with fewer.

    `seen` plans on the steps that are scored, as the paper does; `unseen` plans on the first half
    and is scored on the second. R8 has 8 replicas a rank over all layers; `same_ratio` has as few,
    compared with EPLB's one a rank and layer, as R = 8 is for DeepSeek-R1. No share is given where
    EPLB's replicas gain less than `LEAST_GAIN`; a row by model is of the gains of all its traces.
    """
    for ranks in CRAFT_RANKS:
        found: dict[tuple[str, str], list[float]] = {}
        for trace in traces:
            half = len(trace.load) // 2
            rows = []
            for name, window, later in (
                ("seen", trace.load, trace.load),
                ("unseen", trace.load[:half], trace.load[half:]),
            ):
                gains = craft_gains(ranks, window, later)
                start = f"craft_{ranks}_ranks_{trace.name}_{name}"
                rows += [Row(f"{start}_{label}_gain", gain, "1") for label, gain in gains.items()]
                model = trace.name.partition("_")[0]
                for label, gain in gains.items():
                    found.setdefault((f"{model}_{name}", label), []).append(gain)
                    if label != "eplb" and gains["eplb"] >= LEAST_GAIN:
                        share = gain / gains["eplb"]
                        rows.append(Row(f"{start}_{label}_share_of_eplb_gain", share, "1"))
            yield rows + _layer_rows(f"craft_{ranks}_ranks_{trace.name}", trace.load, ranks)
        yield [
            Row(
                f"craft_{ranks}_ranks_{key}_{label}_share_of_eplb_gain",
                sum(gains) / sum(found[key, "eplb"]),
                "1",
            )
            for (key, label), gains in found.items()
            if label != "eplb"
        ]


def craft_gains(
    ranks: int, window: NDArray[np.int64], later: NDArray[np.int64]
) -> dict[str, float]:
    """Return the balancedness that EPLB and CRAFT gain over EPLB's placement without replicas."""
    layers, experts = window.shape[1:]
    per_rank = -(-experts // ranks) + 1
    total = window.sum(axis=0).astype(np.float64)

    def balance(placement: Placement) -> float:
        return balancedness_mean(rank_load(later.astype(np.float64), placement))

    base = balance(eplb_placement(window, ranks, per_rank - 1))
    found = {"eplb": balance(eplb_placement(window, ranks, per_rank)) - base}
    topology, benefit = Topology.single_node(ranks), _benefit(window, ranks)
    for label, factor in (("R8", 8), ("same_ratio", max(1, round(layers / EPLB_OVER_CRAFT)))):
        allocation = allocate_replicas(benefit, factor * ranks)
        found[label] = balance(place_replicas(total, allocation, topology, per_rank)) - base
    return found


def _benefit(load: NDArray[np.int64], ranks: int) -> Benefit:
    per_rank = -(-load.shape[2] // ranks) + 1
    return replica_benefit(load.astype(np.float64), Topology.single_node(ranks), per_rank)


def _layer_rows(name: str, load: NDArray[np.int64], ranks: int) -> list[Row]:
    """Return how the gain grows with replicas, the same in all layers, and differs by layer."""
    benefit = _benefit(load, ranks)
    rows = [
        Row(f"{name}_uniform_{count}_gain", float(gain.mean()), "1")
        for count, gain in zip(benefit.counts.tolist(), benefit.gain, strict=True)
    ]
    last = benefit.gain[-1]
    return [
        *rows,
        Row(f"{name}_least_layer_gain", float(last.min()), "1"),
        Row(f"{name}_most_layer_gain", float(last.max()), "1"),
    ]


def _gem_setup_of(trace: Recorded, spread: str, window: int, horizon: int) -> Setup:
    _, layers, experts = trace.load.shape
    load = trace.load.astype(np.float64)
    tokens = float(load.sum(axis=2).mean()) / GEM_RANKS
    curves = gem_setup(spread, GEM_RANKS, tile_tokens=max(1, int(tokens / 16)), tiles=64)
    return Setup(
        load=load,
        shape=ModelShape(layers, experts, GEM_RANKS, -(-experts // GEM_RANKS), trace.top_k, 1),
        topology=Topology.single_node(GEM_RANKS),
        window_steps=window,
        horizon_steps=horizon,
        objective=Objective(cost=CostModel(curves)),
    )


def _walk(name: str, plan: Callable[[PlacementProblem], Proposal] | None, setup: Setup) -> Walk:
    def planner(replan: Replan) -> Proposal | None:
        return None if plan is None else plan(replan.problem)

    return walk_forward(name, planner, setup)


def _step_seconds(walk: Walk) -> NDArray[np.float64]:
    """Return the (T,) time of each scored step, all layers."""
    return np.asarray(walk.times.sum(axis=1), np.float64)


def _saved(ours: NDArray[np.float64], base: NDArray[np.float64]) -> tuple[float, float]:
    """Return the shares saved of the mean and of the 90th percentile over steps."""
    p90 = 1.0 - np.quantile(ours, 0.9) / np.quantile(base, 0.9)
    return float(1.0 - ours.mean() / base.mean()), float(p90)


def gem_savings(trace: Recorded, spread: str) -> dict[str, tuple[float, float]]:
    """Return what GEM and EPLB save in one of GEM's set-ups: of the mean and the 90th percentile.

    Each plan sees 16 steps and is scored on the next 50, or fewer if the trace is too short for
    four plans.
    """
    horizon = min(50, (len(trace.load) - GEM_WINDOW) // 4)
    setup = _gem_setup_of(trace, spread, GEM_WINDOW, horizon)
    linear, eplb, gem = (
        _step_seconds(_walk(name, plan, setup))
        for name, plan in (("linear", None), ("eplb", plan_eplb), ("gem", plan_gem))
    )
    return {
        "gem_over_linear": _saved(gem, linear),
        "eplb_over_linear": _saved(eplb, linear),
        "gem_over_eplb": _saved(gem, eplb),
    }


def gem_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """MoE time that GEM saves over linear placement and EPLB, one copy of each expert, 4 ranks."""
    for spread in SETUPS:
        found: dict[str, list[float]] = {}
        for trace in traces:
            rows = []
            for name, saved in gem_savings(trace, spread).items():
                for statistic, value in zip(("mean", "p90"), saved, strict=True):
                    row = f"{name}_{statistic}_saved"
                    rows.append(Row(f"gem_{spread}_{trace.name}_{row}", value, "1"))
                    found.setdefault(row, []).append(value)
            yield rows
        yield [
            Row(f"gem_{spread}_{label}_{row}", float(pick(values)), "1")
            for row, values in found.items()
            for label, pick in (("mean", np.mean), ("least", np.min), ("most", np.max))
        ]


def gem_window_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """MoE time that GEM saves over linear placement by the length of its window, set-up high.

    All windows end at the same steps, so the same steps are scored.
    """
    found: dict[int, list[float]] = {}
    for trace in traces:
        windows = [window for window in WINDOWS if window <= len(trace.load) * 2 // 3]
        horizon = min(50, (len(trace.load) - windows[-1]) // 4)
        rows = []
        for window in windows:
            setup = _gem_setup_of(trace, "high", windows[-1], horizon)
            setup = replace(setup, load=setup.load[windows[-1] - window :], window_steps=window)
            linear, gem = (
                _step_seconds(_walk(name, plan, setup))
                for name, plan in (("linear", None), ("gem", plan_gem))
            )
            saved = _saved(gem, linear)[0]
            rows.append(Row(f"gem_window_{window}_{trace.name}_mean_saved", saved, "1"))
            if windows == list(WINDOWS):
                found.setdefault(window, []).append(saved)
        yield rows
    # Of the traces that are long enough for every window.
    yield [
        Row(f"gem_window_{window}_all_mean_saved", float(np.mean(values)), "1")
        for window, values in found.items()
    ]


def libra_policy_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """Time over fluid of Libra's Algorithm 1 as a placement policy, under nearest dispatch."""
    for per_rank in LIBRA_SLOTS:
        found: dict[str, list[float]] = {}
        for trace in traces:
            setup = setup_of(trace, DispatchModel.NEAREST)
            setup = replace(setup, shape=replace(setup.shape, slots_per_rank=per_rank))
            for policy in ("eplb", "libra"):
                walk = _walk(policy, POLICIES[policy], setup)
                value = float(walk.times.sum() / walk.fluid.sum())
                found.setdefault(policy, []).append(value)
        yield [
            Row(f"libra_policy_{RANKS * per_rank}_slots_{policy}_time_over_fluid", mean, "ratio")
            for policy, mean in ((p, float(np.mean(v))) for p, v in found.items())
        ]
