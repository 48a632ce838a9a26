"""Load: routed real tokens per step, layer and logical expert, and the reports it arrives in."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation

__all__ = [
    "MAX_STEP",
    "MAX_TOKENS",
    "PHASE_CODE",
    "STEP",
    "CountingSide",
    "LoadReport",
    "LoadWindow",
    "Phase",
    "StepMeta",
    "StepTable",
    "step_table",
]


class Phase(StrEnum):
    """Label of a step; there is one window per phase."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class CountingSide(StrEnum):
    """Where tokens are counted."""

    DESTINATION = "destination"
    """Tokens this rank's slots received, by local slot under the step's epoch."""
    SOURCE = "source"
    """Tokens this rank routed, by logical expert: independent of the placement."""


PHASE_CODE = {phase: code for code, phase in enumerate(Phase, 1)}
"""0 is none, so that a table nobody filled in is not taken for one."""
MAX_STEP = (1 << 62) - 1
"""Of numbers of steps and epochs."""
MAX_TOKENS = (1 << 31) - 1
"""Of one rank in one step, routed or counted in one place: times `top_k` and summed over ranks they stay far below 2**63."""

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
"""A row of a `StepTable`: a `StepMeta`, with NaN for a compute_s that was not measured and the phase's code."""
StepTable = NDArray[np.void]
"""(n,) of `STEP`. A fleet makes tens of thousands of rows a second, too many to be objects."""


class StepMeta(NamedTuple):
    """What a rank says of one step besides the counts."""

    step: int
    epoch: int
    """Epoch of the maps the step ran under."""
    phase: Phase
    tokens: int
    """Real tokens this rank routed, padding excluded."""
    dummy: bool = False
    """Warm-up, profiling or idle step: never counted."""
    compute_s: float | None = None
    """MoE compute seconds before the collective; None where the engine does not measure it."""


def step_table(metas: Iterable[StepMeta]) -> StepTable:
    """Steps as a table, in the order given."""
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
    """A run of steps from one rank."""

    deployment: DeploymentId
    generation: Generation
    rank: EpRank
    incarnation: int
    side: CountingSide
    steps: StepTable
    """n steps in rising order."""
    counts: NDArray[np.int32] | NDArray[np.int64]
    """(n, L, slots_per_rank) for DESTINATION, (n, L, E) for SOURCE [tokens]; int32 from the wire, int64 from a recorder."""
    dropped_steps: int = 0
    """Steps the rank's recorder had to drop since the previous report."""

    @property
    def last_step(self) -> int | None:
        """Number of the newest step; None where there is none."""
        return int(self.steps["step"][-1]) if len(self.steps) else None


@dataclass(frozen=True, eq=False)
class LoadWindow:
    """The last T complete steps of one deployment and phase, oldest first."""

    counts: NDArray[np.uint32]
    """(T, L, E) [tokens]."""
    steps: NDArray[np.int64]
    """(T,) step numbers."""
    epochs: NDArray[np.int64]
    """(T,) epoch each step ran under."""
    tokens: NDArray[np.int64]
    """(T, R) real tokens each rank routed."""
    compute_s: NDArray[np.float64]
    """(T, R) MoE compute seconds before the collective; NaN where not measured."""
    source: NDArray[np.uint32] | None = field(default=None)
    """(R, L, E) [tokens] - summed source-side counts per rank, where ranks report SOURCE."""

    def __post_init__(self) -> None:
        if self.counts.ndim != 3:
            raise ShapeMismatch(f"window counts must be (T, L, E), got {self.counts.shape}")
        length = self.counts.shape[0]
        for name in ("steps", "epochs", "tokens", "compute_s"):
            if getattr(self, name).shape[0] != length:
                raise ShapeMismatch(
                    f"window {name} has {getattr(self, name).shape[0]} rows, counts have {length}"
                )

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    def last(self, num_steps: int) -> "LoadWindow":
        """The newest `num_steps` steps (all, if there are fewer)."""
        cut = slice(max(0, len(self) - num_steps), None)
        return self.slice(cut)

    def slice(self, cut: slice) -> "LoadWindow":
        """The steps of one slice; source-side sums cover the whole window and stay as they are."""
        return LoadWindow(
            self.counts[cut],
            self.steps[cut],
            self.epochs[cut],
            self.tokens[cut],
            self.compute_s[cut],
            self.source,
        )
