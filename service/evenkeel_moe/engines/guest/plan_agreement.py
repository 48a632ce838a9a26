"""Agreement of the ranks on a plan, before the engine's planner returns it.

An engine calls its planner once per rank and relies on equal answers: if they differ, its copies
wait for each other forever. So the ranks first compare what they hold. Each rank contributes one
row, and one pure function judges the gathered rows. Any difference keeps the old map on every
rank.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed
from numpy.typing import NDArray

from evenkeel_moe.agent.engine_moves import Move

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed

ROW = ("layout", "ordered", "plan", "target", "base", "step")
"""Columns of a rank's row: the version of this layout, 1 if the rank holds a plan, the digests of
the plan, of the target map and of the map in use, and the step at which the plan was given, -1
without a plan."""
_LAYOUT = int.from_bytes(hashlib.blake2b(repr(ROW).encode(), digest_size=7).digest(), "big")
_DIFFERENCES = {
    "layout": "another version of this plugin",
    "ordered": "no plan where others have one",
    "step": "another step",
    "plan": "another plan",
    "target": "another target map",
    "base": "another map now",
}
"""Column -> what its odd ranks have; checked in this order."""

Gather = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""(n,) int64 row of this rank -> (R, n) rows of all ranks. Collective over a CPU group of the
engine."""


@dataclass(slots=True)
class PlanAgreement:
    """The plan that one rank holds for the engine, if any.

    An engine may ask for the plan on a thread of its own, some steps after it was given, and on
    each rank at another step. So `given` is one immutable value, and holds the step that the ranks
    compare.
    """

    given: tuple[Move, int] | None = None
    """The plan, and the engine's step at which the gate gave it, the same on all ranks."""
    refused: str = ""
    """Reason why the engine did not get the last plan; empty if it did."""

    @property
    def move(self) -> Move | None:
        """The move of the plan; None without a plan."""
        return None if self.given is None else self.given[0]

    def begin(self, move: Move, step: int) -> None:
        """Hold a plan that the gate gave at this step."""
        self.given, self.refused = (move, step), ""

    def end(self) -> None:
        """Drop the plan: the engine has carried it out."""
        self.given = None

    def agree(self, current: NDArray[np.int64], gather: Gather) -> NDArray[np.int64]:
        """Return the map the engine must go to; collective.

        Args:
            current: (L, S) map in use, as the engine passed it.
            gather: see `Gather`.

        Returns:
            (L, S) int64, the same on every rank: the plan's map, or `current`.
        """
        move, step = self.given or (None, -1)
        fingerprint = 0 if move is None else move.wave.fingerprint
        target = 0 if move is None else map_digest(move.placement.phy2log)
        row = [_LAYOUT, int(move is not None), fingerprint, target, map_digest(current), step]
        table = gather(np.array(row, np.int64))
        problem = find_disagreement(table)
        if move is None:
            problem = problem or "no rank holds a plan"
        elif not problem and move.placement.phy2log.shape != current.shape:
            shape = move.placement.phy2log.shape
            problem = f"the plan is for {shape} layers and slots, the engine has {current.shape}"
        if move is not None and not problem:
            self.refused = ""
            return move.placement.phy2log.astype(np.int64)
        if move is not None or table[:, ROW.index("ordered")].any():
            self.refused = problem
            _log.error("plan_not_given", detail=problem)
        return current


def find_disagreement(table: NDArray[np.int64]) -> str:
    """Return the first difference between the ranks in words; empty if all rows are equal.

    Args:
        table: (R, len(ROW)) int64, one row per rank.
    """
    for name, difference in _DIFFERENCES.items():
        column = table[:, ROW.index(name)]
        values, counts = np.unique(column, return_counts=True)
        if len(values) == 1:
            continue
        usual = 1 if name == "ordered" else int(values[counts.argmax()])
        odd = np.flatnonzero(column != usual).tolist()
        if name == "step":
            steps = {rank: int(column[rank]) for rank in odd[:4]}
            return f"ranks {steps} of {len(table)} have {difference}, the others {usual}"
        return f"ranks {odd[:8]} of {len(table)} have {difference}"
    return ""


def map_digest(phy2log: NDArray[np.generic]) -> int:
    """Return 60 bits that identify the shape and the content of a map."""
    values = np.ascontiguousarray(phy2log, np.int64)
    seed = repr(values.shape).encode()
    return int(hashlib.blake2b(seed + values.tobytes(), digest_size=15).hexdigest()[:15], 16)


def gather_rows(row: NDArray[np.int64], group: Any) -> NDArray[np.int64]:
    """Return (R, n): the row of every rank. Collective over a CPU group of the engine."""
    mine = torch.from_numpy(row)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    _distributed.all_gather(rows, mine, group=group)
    return np.asarray(torch.stack(rows).numpy(), np.int64)
