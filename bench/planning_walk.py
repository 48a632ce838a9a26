"""Walk-forward on recorded routing: policies plan on the past and are scored on the next steps."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.dispatch_traces import EXAMPLES, TRACES
from bench.loads import Regime, drawn_traffic, regrouped
from bench.report import Row
from evenkeel_moe.formats import Trace, read_trace
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.replay.planners import VERDICT, choose_planners
from evenkeel_moe.replay.walk import Setup, Walk, walk_forward

FLEETS = ((8, 72), (16, 80))
"""(ranks, slots of a layer); the names of the other fleets' rows have the size appended."""
WIDE_FLEETS = ((32, 288), (32, 320))
"""The fleets of layers with 256 experts."""
WIDE = ("dsv2lite_decode_phased", "dsv2lite_prefill_mixed")
"""The traces whose layers are joined into layers of 256 experts."""
DRAWN = {
    "drawn_skew_2": (16, 288, Regime(steps=96, layers=8, experts=256, tokens=16_384)),
    "drawn_skew_5": (16, 288, Regime(steps=96, layers=8, experts=256, tokens=16_384, skew=5.0)),
    "drawn_skew_10": (16, 288, Regime(steps=96, layers=8, experts=256, tokens=16_384, skew=10.0)),
    "drawn_temporal_3": (8, 72, Regime(
        steps=216, layers=4, experts=64, tokens=4096, skew=3.0, temporal=3, burst=5.0)),
    "drawn_temporal_8": (8, 72, Regime(
        steps=216, layers=4, experts=64, tokens=4096, skew=3.0, temporal=8, burst=5.0)),
    "drawn_drift": (16, 144, Regime(
        steps=96, layers=8, experts=128, tokens=8192, skew=4.0, drift=0.25)),
    "drawn_384_experts": (64, 448, Regime(
        steps=48, layers=12, experts=384, tokens=24_576, skew=10.0)),
    "drawn_896_experts": (64, 960, Regime(
        steps=48, layers=12, experts=896, tokens=57_344, skew=10.0)),
    "drawn_896_wide": (256, 1024, Regime(
        steps=48, layers=4, experts=896, tokens=57_344, skew=10.0)),
}  # fmt: skip
"""Traffic that no recording has: name, ranks, slots of a layer, and what is drawn."""
Case = tuple[Trace, int, int]
"""A trace, ranks, and slots of a layer."""
RIVALS = ("eplb", "craft", "gem", "once", "ewma")
DRAWS = 2000


def recorded(folder: Path = TRACES) -> list[Trace]:
    """Return every trace with loads in a folder, or the example traces if the folder has none."""
    paths = sorted(folder.glob("*.npz")) or sorted(EXAMPLES.glob("*.npz"))
    return [read_trace(path) for path in paths if "T" in np.load(path).files]


def wide(folder: Path = TRACES) -> list[Trace]:
    """Return traces with layers of 256 experts; of the example traces where `WIDE` are missing."""
    traces = recorded(folder)
    chosen = [trace for trace in traces if trace.name in WIDE] or traces[:1]
    return [regrouped(trace) for trace in chosen]


def drawn() -> list[Case]:
    """Return the traffic of `DRAWN`, each on its fleet."""
    return [
        (Trace(drawn_traffic(regime), tuple(range(regime.layers)), name, top_k=8), ranks, slots)
        for name, (ranks, slots, regime) in DRAWN.items()
    ]


def cases(
    names: list[str] | None = None, fleets: list[tuple[int, int]] | None = None
) -> list[Case]:
    """Return every trace on every fleet, those with large layers on `WIDE_FLEETS`.

    Args:
        names: of traces; none or None for all.
        fleets: (ranks, slots) for all traces whose experts they hold; none or None for the usual
            ones.
    """
    found = [(trace, fleet) for fleet, trace in product(fleets or FLEETS, recorded())]
    found += [(trace, fleet) for fleet, trace in product(fleets or WIDE_FLEETS, wide())]
    return [
        (trace, ranks, slots)
        for trace, (ranks, slots) in found
        if slots >= trace.num_experts and (not names or trace.name in names)
    ]


def setup_of(trace: Trace, ranks: int, slots: int) -> Setup:
    """Return the set-up: window and horizon 100/50 for more than 200 decode steps, else 16/8."""
    long = ("decode" in trace.name or "burst" in trace.name) and trace.num_steps > 200
    window, horizon = (100, 50) if long else (16, 8)
    return Setup(
        load=trace.counts.astype(np.float64),
        shape=ModelShape(
            trace.num_layers, trace.num_experts, ranks, slots // ranks, trace.top_k or 1, 1
        ),
        topology=Topology.single_node(ranks),
        window_steps=window,
        horizon_steps=horizon,
    )


def upper95(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
    """Return the upper 95 % bound of the ratio of times, by a paired bootstrap; both (T,)."""
    chosen = np.random.default_rng(0).integers(0, len(ours), (DRAWS, len(ours)))
    return float(np.quantile(ours[chosen].sum(axis=1) / theirs[chosen].sum(axis=1), 0.95))


def _rows(name: str, walks: dict[str, Walk], layers: int) -> list[Row]:
    keel, eplb = walks["keel"], walks["eplb"]
    ours = keel.times.sum(axis=1)
    rows = []
    for rival in RIVALS:
        theirs = walks[rival].times.sum(axis=1)
        tail = "upper95" if rival == "eplb" else f"keel_over_{rival}_upper95"
        rows += [
            Row(f"walk_{name}_keel_over_{rival}", float(ours.sum() / theirs.sum()), "ratio"),
            Row(f"walk_{name}_{tail}", upper95(ours, theirs), "ratio"),
        ]
    later, first = slice(1, None), slice(0, 1)
    rows += [
        Row(
            f"walk_{name}_copies_over_relabelled_eplb",
            float(keel.copies[later].sum() / eplb.copies[later].sum()),
            "ratio",
        ),
        Row(
            f"walk_{name}_keel_first_copies",
            float(keel.copies[first].sum()) / layers,
            "copies/layer",
        ),
    ]
    best, judged = (
        min(float(walks[rival + tail].times.sum()) for rival in RIVALS) for tail in ("", VERDICT)
    )
    behind = float(walks[f"keel{VERDICT}"].times.sum())
    rows += [
        Row(f"walk_{name}_keel_over_best", float(ours.sum()) / best, "ratio"),
        Row(f"walk_{name}_keel_verdict_over_best", behind / best, "ratio"),
        Row(f"walk_{name}_keel_verdict_over_best_verdict", behind / judged, "ratio"),
    ]
    for policy, walk in walks.items():
        rows += [
            Row(
                f"walk_{name}_{policy}_time_over_fluid",
                float(walk.times.sum() / walk.fluid.sum()),
                "ratio",
            ),
            Row(
                f"walk_{name}_{policy}_copies",
                float(walk.copies[later].mean()) / layers,
                "copies/layer",
            ),
            Row(f"walk_{name}_{policy}_plan_s", float(np.median(walk.plan_s)), "s"),
        ]
    return rows


def walk_rows(chosen: list[Case]) -> Iterator[list[Row]]:
    """Compare keel with the others on every trace and fleet; yield the rows of each pair.

    Every policy runs alone and with the verdict deciding on its plans. Copies do not include the
    first plan.
    """
    for trace, ranks, slots in chosen:
        walk = partial(walk_forward, setup=setup_of(trace, ranks, slots))
        names = [*RIVALS, "keel"]
        planners = choose_planners([*names, *(name + VERDICT for name in names)], baselines=False)
        walks = {policy: walk(policy, planner) for policy, planner in planners.items()}
        name = trace.name if (ranks, slots) == FLEETS[0] else f"{trace.name}_{ranks}x{slots}"
        print(
            f"{name}: "
            + ", ".join(f"{p} {w.times.sum() / w.fluid.sum():.4f}" for p, w in walks.items()),
            flush=True,
        )
        yield _rows(name, walks, trace.num_layers)
