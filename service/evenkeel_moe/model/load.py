"""Load: routed real tokens by step, layer and logical expert; and the ranks' reports of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation


class Phase(StrEnum):
    """Phase of a step; there is one window per phase."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class CountingSide(StrEnum):
    """The side on which tokens are counted."""

    DESTINATION = "destination"
    """Tokens that this rank's slots received, by local slot of the step's epoch."""
    SOURCE = "source"
    """Tokens that this rank routed, by logical expert; independent of the placement."""


PHASE_CODE = {phase: code for code, phase in enumerate(Phase, 1)}
"""Number of each phase in a `StepTable`. No phase has 0, so an unfilled table is not valid."""
MAX_STEP = (1 << 62) - 1
"""Largest step number and epoch."""
MAX_TOKENS = (1 << 31) - 1
"""Largest token count of a rank in a step; sums over ranks, times `top_k`, stay below 2**63."""
MAX_COMPUTE_S = 1e5
"""Most seconds of MoE computation of a rank in a step, above a day; sums of squares stay finite."""
_LEAST_COMPUTE_S = 1e-9
"""No clock measures a step below this; such seconds count as not measured."""

STEP = np.dtype(
    [
        ("step", "i8"),
        ("epoch", "i8"),
        ("tokens", "i8"),
        ("compute_s", "f8"),
        ("phase", "u4"),
        ("dummy", "u4"),
    ]
)
"""A row of a `StepTable`: a `StepMeta` with `PHASE_CODE`, and NaN for unmeasured compute_s."""
StepTable = NDArray[np.void]
"""(n,) of `STEP`. A fleet sends tens of thousands of rows a second, too many for Python objects."""


class StepMeta(NamedTuple):
    """One step as a rank reports it, without the counts."""

    step: int
    epoch: int
    """Epoch of the placement that the step used."""
    phase: Phase
    tokens: int
    """Real tokens that this rank routed, without padding."""
    dummy: bool = False
    """True for a warm-up, profiling or idle step, which is never counted."""
    compute_s: float | None = None
    """Seconds of this rank's routed experts, summed over layers, without collectives and without
    shared experts; None in a step that the engine did not measure."""


def measured_seconds(compute_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds of steps, of any shape, with NaN in place of what no step can take.

    Stored windows are not checked as reports are, and fits divide by seconds and square them.
    """
    possible = (compute_s >= _LEAST_COMPUTE_S) & (compute_s <= MAX_COMPUTE_S)
    return np.where(possible, compute_s, np.nan)


def step_table(metas: Iterable[StepMeta]) -> StepTable:
    """Return a table of steps in the given order."""
    return np.array(
        [
            (
                m.step,
                m.epoch,
                m.tokens,
                math.nan if m.compute_s is None else m.compute_s,
                PHASE_CODE[m.phase],
                m.dummy,
            )
            for m in metas
        ],
        STEP,
    )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Consecutive steps from one rank."""

    deployment: DeploymentId
    generation: Generation
    rank: EpRank
    incarnation: int
    side: CountingSide
    steps: StepTable
    """n steps in rising order."""
    counts: NDArray[np.int32] | NDArray[np.int64]
    """(n, L, slots_per_rank) for DESTINATION, (n, L, E) for SOURCE [tokens].

    int32 from the wire, int64 from a recorder."""
    dropped_steps: int = 0
    """Steps that the rank's recorder had to drop since the previous report."""

    @property
    def last_step(self) -> int | None:
        """Number of the newest step; None without steps."""
        return int(self.steps["step"][-1]) if len(self.steps) else None


PER_STEP = ("counts", "steps", "epochs", "tokens", "compute_s")
"""The fields of a `LoadWindow` with a row for each step."""


@dataclass(frozen=True, eq=False)
class LoadWindow:
    """The last T complete steps of one deployment and phase, oldest first."""

    counts: NDArray[np.uint32]
    """(T, L, E) [tokens]."""
    steps: NDArray[np.int64]
    """(T,) step numbers."""
    epochs: NDArray[np.int64]
    """(T,) epoch of each step."""
    tokens: NDArray[np.int64]
    """(T, R) real tokens that each rank routed; -1 if not known."""
    compute_s: NDArray[np.float64]
    """(T, R) seconds of routed experts before the collective; NaN if not measured."""
    source: NDArray[np.uint32] | None = field(default=None)
    """(R, L, E) [tokens] - source-side counts of each rank over the window; None without SOURCE."""

    def __post_init__(self) -> None:
        if self.counts.ndim != 3:
            raise ShapeMismatch(f"window counts must be (T, L, E), got {self.counts.shape}")
        length = self.counts.shape[0]
        for name in PER_STEP:
            if getattr(self, name).shape[0] != length:
                raise ShapeMismatch(
                    f"window {name} has {getattr(self, name).shape[0]} rows, counts have {length}"
                )

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    def last(self, num_steps: int) -> "LoadWindow":
        """Return the newest `num_steps` steps, or all if there are fewer."""
        if num_steps >= len(self):
            return self
        return self.slice(slice(len(self) - num_steps, None))

    def slice(self, cut: slice | NDArray[np.bool_]) -> "LoadWindow":
        """Return the steps of a slice or mask. Source-side sums still cover the whole window."""
        return replace(self, **{name: getattr(self, name)[cut] for name in PER_STEP})

    def at_width(self, num_ranks: int) -> "LoadWindow":
        """Return the window as a group of another size sees it: nothing is known of its ranks."""
        size = len(self), num_ranks
        tokens, compute_s = np.full(size, -1, np.int64), np.full(size, np.nan)
        return replace(self, tokens=tokens, compute_s=compute_s, source=None)
