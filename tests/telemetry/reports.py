"""Simulated ranks that count tokens, for the tests of steps and windows."""

from collections import Counter

import numpy as np

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import (
    CountingSide,
    LoadReport,
    LoadWindow,
    Phase,
    StepMeta,
    step_table,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.telemetry.assembly import StepAssembler
from evenkeel_moe.telemetry.windows import join_windows

SHAPE = ModelShape(
    num_layers=2, num_logical_experts=4, num_ranks=3, slots_per_rank=2, top_k=2, bytes_per_expert=8
)
PLACEMENT = Placement(np.array([[0, 1, 2, 3, 0, -1], [3, 2, 1, 0, 3, 3]], np.int32), 3, 4)
EPOCH = Epoch(5)


class Fleet:
    """Ranks that route tokens and count them on either side."""

    def __init__(self, seed: int = 0, placement: Placement = PLACEMENT, shape: ModelShape = SHAPE):
        self.rng = np.random.default_rng(seed)
        self.placement = placement
        self.shape = shape

    def run(self, steps, *, phase=Phase.DECODE, epoch=EPOCH, idle=()):
        """Route tokens for some steps: (n, R, L, E) by source rank, and tokens (n, R)."""
        shape = self.shape
        tokens = self.rng.integers(1, 9, (len(steps), shape.num_ranks))
        tokens[:, list(idle)] = 0
        routed = np.zeros(
            (len(steps), shape.num_ranks, shape.num_layers, shape.num_logical_experts), np.int64
        )
        for index in np.ndindex(*tokens.shape):
            for layer in range(shape.num_layers):
                for _ in range(tokens[index]):
                    chosen = self.rng.permutation(shape.num_logical_experts)[: shape.top_k]
                    routed[(*index, layer)][chosen] += 1
        return Run(self, list(steps), tokens, routed, phase, epoch, set(idle))


class Run:
    def __init__(self, fleet, steps, tokens, routed, phase, epoch, idle):
        self.fleet, self.steps, self.tokens, self.routed = fleet, steps, tokens, routed
        self.phase, self.epoch, self.idle = phase, epoch, idle
        self.load = routed.sum(axis=1)
        self.received = self._dispatch()

    def _dispatch(self):
        """Split the tokens of every expert over its slots at random: (n, L, S)."""
        placement, rng = self.fleet.placement, self.fleet.rng
        received = np.zeros((len(self.steps), placement.num_layers, placement.num_slots), np.int64)
        for step, layer, expert in np.ndindex(*self.load.shape):
            slots = np.flatnonzero(placement.phy2log[layer] == expert)
            for slot in rng.choice(slots, self.load[step, layer, expert]):
                received[step, layer, slot] += 1
        return received

    def report(self, rank, side=CountingSide.DESTINATION, only=slice(None), **changes):
        per_rank = self.fleet.shape.slots_per_rank
        if side is CountingSide.DESTINATION:
            counts = self.received[:, :, rank * per_rank : (rank + 1) * per_rank]
        else:
            counts = self.routed[:, rank]
        steps = step_table(
            StepMeta(
                step,
                changes.get("epoch", self.epoch),
                changes.get("phase", self.phase),
                int(tokens),
                dummy=rank in self.idle or changes.get("dummy", False),
                compute_s=0.001 * (rank + 1),
            )
            for step, tokens in zip(self.steps, self.tokens[:, rank], strict=True)
        )
        return LoadReport(
            DeploymentId("demo"),
            Generation("g"),
            EpRank(rank),
            1,
            side,
            steps[only],
            counts[only].copy(),
        )


def make_assembler(**options) -> StepAssembler:
    assembler = StepAssembler(SHAPE, **options)
    assembler.learn_epoch(EPOCH, PLACEMENT)
    return assembler


def reasons(intake):
    found: Counter[Reason] = Counter()
    for rejection in intake.rejected:
        found[rejection.reason] += rejection.rank_steps
    return found


def windows_of(intakes):
    """Phase -> window over all intakes."""
    parts: dict[Phase, list[LoadWindow]] = {}
    for intake in intakes:
        for phase, window in intake.complete:
            parts.setdefault(phase, []).append(window)
    return {phase: join_windows(windows) for phase, windows in parts.items()}


def load_window(counts, steps, num_ranks, *, epoch=0, seconds=None, tokens=None) -> LoadWindow:
    """Return a window of (T, L, E) counts; seconds are unknown if they are not given."""
    shape = (len(steps), num_ranks)
    return LoadWindow(
        counts.astype(np.uint32),
        np.array(steps, np.int64),
        np.full(len(steps), epoch, np.int64),
        np.ones(shape, np.int64) if tokens is None else tokens,
        np.full(shape, np.nan) if seconds is None else seconds,
    )
