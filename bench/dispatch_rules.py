"""Scores every dispatch rule on every placement, step by step over recorded traffic."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.dispatch_baselines import harmoeny
from bench.dispatch_traces import RANKS, TWO_NODES, Recorded, setup_of
from bench.report import Row
from evenkeel_moe.dispatch import (
    ExactSplit,
    FewestReplicas,
    LibraVariant,
    plan_replicas,
    shard_tokens,
)
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.metrics import rank_load
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.replay.walk import walk_forward

PLACEMENTS = ("none", "eplb", "keel")
# "libra" is as published: Algorithms 1 and 2 as printed. "ours" (libra-refined in the engine) uses
# all N transient experts and shards exactly; "2N" has twice as many.
RULES = (
    "even",
    "nearest",
    "lplb",
    "fewest",
    "libra sharding",
    "libra",
    "libra, ours",
    "libra, ours 2N",
    "harmoeny",
)
EXTRA = 4
"""Transient experts per rank of Libra and HarMoEny: half of the 8 that a rank holds, as in Libra's
evaluation."""
_FETCHED = (
    ("libra", EXTRA, LibraVariant.PUBLISHED),
    ("libra, ours", EXTRA, LibraVariant.REFINED),
    ("libra, ours 2N", 2 * EXTRA, LibraVariant.REFINED),
)
STEPS = 40
"""Steps sampled per trace, evenly spaced over the scored steps."""


@dataclass(slots=True)
class Tally:
    """Sums over steps and layers."""

    balance: float = 0.0
    peak: float = 0.0
    fluid: float = 0.0
    shared_home_peak: float = 0.0
    shared_poured_peak: float = 0.0
    shared_fluid: float = 0.0
    cells: int = 0
    copies: int = 0

    def add(
        self, load: NDArray[np.generic], home: NDArray[np.int64], cost: int, copies: int = 0
    ) -> None:
        """Add one step and layer.

        Args:
            load: (R,) [tokens] routed load.
            home: (R,) the shared work of each source rank, in routed choices.
            cost: the routed choices that one token's shared expert costs.
            copies: experts fetched.
        """
        values = np.asarray(load, np.float64)
        top, mean = float(values.max()), float(values.mean())
        if top <= 0.0:
            return
        self.cells += 1
        self.balance += mean / top
        self.peak += top
        self.fluid += mean
        self.copies += copies
        shared = float(home.sum())
        self.shared_home_peak += float((values + home).max())
        # All-rank Waterfill at its best fills every rank to the same level, unless a rank is
        # already above that level.
        self.shared_poured_peak += max(
            top, np.ceil((values.sum() + shared) / len(values) / cost) * cost
        )
        self.shared_fluid += mean + shared / len(values)


class Solvers(NamedTuple):
    """The solvers that the rules prepare for one placement."""

    plan: int
    """The number of the plan in the walk."""
    lplb: ExactSplit
    fewest: FewestReplicas
    residents: list[NDArray[np.bool_]]
    """(E, R) of each layer, True where a rank holds an expert."""


Tallies = dict[tuple[str, str], Tally]


def _tallies(trace: Recorded) -> Tallies:
    """Return the tally of every (placement, rule) on a trace."""
    print(f"  {trace.name}", flush=True)
    setup = setup_of(trace, DispatchModel.EVEN)
    walks = {
        "eplb": walk_forward("eplb", lambda replan: plan_eplb(replan.problem), setup),
        "keel": walk_forward("keel", lambda replan: plan_keel(replan.problem), setup),
    }
    bare, layers = trace.in_order, trace.load.shape[1]
    first, horizon = int(walks["keel"].steps[0]), setup.horizon_steps
    last = int(walks["keel"].steps[-1]) + horizon
    out: Tallies = {(placement, rule): Tally() for placement in PLACEMENTS for rule in RULES}
    solvers: dict[str, Solvers] = {}
    for step in np.unique(np.linspace(first, last - 1, STEPS).astype(int)).tolist():
        index = (step - first) // horizon
        for name in PLACEMENTS:
            placement = bare if name == "none" else walks[name].placements[index]
            if name not in solvers or solvers[name].plan != index:
                masks = [placement.held(layer) for layer in range(layers)]
                exact, fewest = ExactSplit(placement), FewestReplicas(placement)
                solvers[name] = Solvers(index, exact, fewest, masks)
            _one_step(out, name, trace, step, placement, solvers[name])
    return out


def _one_step(
    out: Tallies,
    name: str,
    trace: Recorded,
    step: int,
    placement: Placement,
    solvers: Solvers,
) -> None:
    import torch

    load = trace.load[step : step + 1].astype(np.float64)
    demand = trace.source[step]
    near = SplitModel(DispatchModel.NEAREST, TWO_NODES, demand.astype(np.float64))
    even, nearest = rank_load(load, placement)[0], rank_load(load, placement, near)[0]
    solvers.lplb.quotas(torch.from_numpy(trace.load[step]))
    solvers.fewest.choose(torch.from_numpy(trace.load[step]))
    exact, fewest = solvers.lplb.rank_load, solvers.fewest.rank_load
    home = demand.sum(axis=2) // trace.top_k * trace.shared_cost
    for layer in range(trace.load.shape[1]):
        own, cost = home[:, layer], trace.shared_cost
        asked = np.ascontiguousarray(demand[:, layer])
        resident = solvers.residents[layer]
        out[name, "even"].add(even[layer], own, cost)
        out[name, "nearest"].add(nearest[layer], own, cost)
        out[name, "lplb"].add(exact[layer], own, cost)
        out[name, "fewest"].add(fewest[layer], own, cost)
        expected = predicted_demand(trace, step, layer)
        alone = shard_tokens(asked, resident, variant=LibraVariant.PUBLISHED)
        out[name, "libra sharding"].add(alone.rank_load, own, cost)
        for rule, extra, variant in _FETCHED:
            plan = plan_replicas(expected, resident, extra, variant=variant)
            done = shard_tokens(asked, plan.hosts, resident, variant=variant)
            out[name, rule].add(done.rank_load, own, cost, plan.copies)
        fetched, copies = harmoeny(asked, resident, EXTRA)
        out[name, "harmoeny"].add(fetched, own, cost, copies)


def predicted_demand(trace: Recorded, step: int, layer: int) -> NDArray[np.float64]:
    """Return the (R, E) predicted load: the recorded lookahead, else the load of the step before.

    The recorded lookahead has no source ranks, so it is spread over them evenly. The true load of
    the step is never used.
    """
    if trace.lookahead is not None and layer > 0:
        return np.repeat(trace.lookahead[step, layer - 1][None] / RANKS, RANKS, axis=0)
    return trace.source[step - 1, :, layer].astype(np.float64)


def rule_rows(traces: list[Recorded]) -> list[Row]:
    """Return means over traces, all with the same weight, and print them as a table."""
    rows, table = [], [_tallies(trace) for trace in traces]
    print(
        f"\nmean over {len(table)} traces, {RANKS} ranks;"
        " time is over the fluid bound of the same work"
    )
    print(
        f"{'placement':10}{'rule':24}{'balancedness':>13}{'max/mean':>10}{'time':>8}"
        f"{'+ shared at home':>18}{'+ waterfill':>13}{'copies':>8}"
    )
    for placement in PLACEMENTS:
        for rule in RULES:
            tallies = [row[placement, rule] for row in table]
            balance = float(np.mean([t.balance / t.cells for t in tallies]))
            time = float(np.mean([t.peak / t.fluid for t in tallies]))
            home = float(np.mean([t.shared_home_peak / t.shared_fluid for t in tallies]))
            poured = float(np.mean([t.shared_poured_peak / t.shared_fluid for t in tallies]))
            copies = float(np.mean([t.copies / t.cells for t in tallies]))
            print(
                f"{placement:10}{rule:24}{balance:13.4f}{1 / balance:10.3f}{time:8.3f}"
                f"{home:18.3f}{poured:13.3f}{copies:8.1f}"
            )
            key = f"{placement}_{rule.replace(',', '').replace(' ', '_')}"
            rows += [
                Row(f"{key}_balancedness", balance, "1"),
                Row(f"{key}_time_over_fluid", time, "ratio"),
                Row(f"{key}_shared_home_time_over_fluid", home, "ratio"),
                Row(f"{key}_waterfill_time_over_fluid", poured, "ratio"),
            ]
    return rows
