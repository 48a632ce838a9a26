"""Recorded traffic for the dispatch bench: loads, source ranks, lookahead predictions."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.eplb import rebalance_experts
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.walk import Setup

TRACES = Path(os.environ.get("EVENKEEL_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
EXAMPLES = Path(__file__).parents[1] / "examples" / "traces"
RANKS = 8
TWO_NODES = Topology((0, 0, 0, 0, 1, 1, 1, 1))
"""Nearest dispatch of evenly spread sources equals an even split on one node, but not on two."""
SLOTS_PER_RANK = 9
"""72 slots for 64 experts: one redundant slot per rank and layer."""


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """One recorded trace."""

    name: str
    load: NDArray[np.int64]
    """(T, L, E) [tokens]."""
    source: NDArray[np.int64]
    """(T, R, L, E) [tokens] by source rank: recorded, or drawn evenly if the trace has none."""
    lookahead: NDArray[np.int64] | None
    """(T, L - 1, E) predicted load of layers 1.., None where not recorded."""
    recall: NDArray[np.float64] | None
    """(L - 1,) share of the true experts that was predicted, as recorded."""
    top_k: int
    shared_cost: int
    """The routed choices that one token's shared expert costs."""

    @property
    def window(self) -> tuple[int, int]:
        """The (window, horizon) in steps: 100/50, or less if the trace is too short for 4 plans."""
        for window, horizon in ((100, 50), (50, 25), (16, 8)):
            if (len(self.load) - window) // horizon >= 4:
                return window, horizon
        raise ValueError(f"{self.name} has {len(self.load)} steps, too few to plan on")

    def shape(self, slots_per_rank: int = SLOTS_PER_RANK) -> ModelShape:
        """Return the shape of the trace's layers on 8 ranks."""
        _, layers, experts = self.load.shape
        return ModelShape(layers, experts, RANKS, slots_per_rank, self.top_k, 1)

    @property
    def in_order(self) -> Placement:
        """One copy of each expert, placed in order."""
        return Placement.initial(self.shape(-(-self.load.shape[2] // RANKS)))


def read_all(folder: Path) -> list[Recorded]:
    """Return every trace with loads in a folder, by name. Draws of source ranks are seeded."""
    found = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            if "T" not in archive.files:
                continue
            load = archive["T"].astype(np.int64)
            top_k = int(archive["topk"])
            if "S" in archive.files and archive["S"].shape[1] == RANKS:
                source = archive["S"].astype(np.int64)
            else:
                rng = np.random.default_rng(len(found))
                source = np.moveaxis(rng.multinomial(load, np.full(RANKS, 1 / RANKS)), -1, 1)
            lookahead = archive["P"].astype(np.int64) if "P" in archive.files else None
            recall = (
                archive["lookahead_recall"].astype(np.float64) if "P" in archive.files else None
            )
        cost = shared_cost(path.stem)
        found.append(Recorded(path.stem, load, source, lookahead, recall, top_k, cost))
    return found


def shared_cost(name: str) -> int:
    """Return the routed choices that the shared experts of one token of a trace cost.

    DeepSeek-V2-Lite has two shared experts as wide as routed ones; model A is given one.
    """
    return 2 if name.startswith("dsv2lite") else 1


def eplb_placement(load: NDArray[np.generic], ranks: int, slots_per_rank: int) -> Placement:
    """Return EPLB's placement, planned on a (T, L, E) load."""
    total = np.asarray(load, np.float64).sum(axis=0)
    rows = rebalance_experts(total, ranks * slots_per_rank, 1, 1, ranks, allow_duplicates=False)
    return Placement(rows, ranks, load.shape[2])


def placements_of(load: NDArray[np.generic], top_k: int) -> dict[str, Placement]:
    """Return placements of a (T, L, E) load: in order, and EPLB's with more and more replicas."""
    _, layers, experts = load.shape
    shape = ModelShape(layers, experts, RANKS, -(-experts // RANKS), top_k, 1)
    return {"no_eplb": Placement.initial(shape)} | {
        f"eplb_{redundant}_redundant": eplb_placement(load, RANKS, (experts + redundant) // RANKS)
        for redundant in (0, 8, 16)
    }


def setup_of(trace: Recorded, dispatch: DispatchModel) -> Setup:
    """Return the trace on 8 ranks with 72 slots per layer; on two nodes if the rule uses nodes."""
    window, horizon = trace.window
    return Setup(
        load=trace.load.astype(np.float64),
        shape=trace.shape(),
        topology=TWO_NODES if dispatch is DispatchModel.NEAREST else Topology.single_node(RANKS),
        window_steps=window,
        horizon_steps=horizon,
        source=trace.source.astype(np.float64),
        objective=Objective(dispatch=dispatch),
        max_evaluations=2_000_000,
    )
