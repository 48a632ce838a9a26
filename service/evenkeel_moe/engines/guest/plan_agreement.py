"""The plan between the gate and the engine's planner: asked for on every rank, answered alike on all of them.

An engine calls its planner once per rank and trusts that all answers are equal; where they are not, its copies
wait for each other for ever. So before a plan is given to the engine the ranks compare what they hold: one
gathered row each, judged by one pure function. Anything but full agreement keeps the old map, everywhere.
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

from evenkeel_moe.agent.guest import Move

__all__ = ["ROW", "Orders", "digest_of", "gather_rows", "judge"]

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed

ROW = ("layout", "ordered", "plan", "target", "base", "step")
"""What each rank says: a number for this layout, whether it holds a plan, digests, and its step."""
_LAYOUT = int.from_bytes(hashlib.blake2b(repr(ROW).encode(), digest_size=7).digest(), "big")

Gather = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""(len(ROW),) int64 of this rank -> (R, len(ROW)) of all; collective, over a CPU group of the engine's."""


@dataclass(slots=True)
class Orders:
    """One rank's plan for the engine, if there is one."""

    move: Move | None = None
    """Set by the gate, on every rank at the same step."""
    step: int = 0
    """Of the engine, counted alike on all ranks."""
    refused: str = ""
    """Why the last plan was not given to the engine; empty when it was."""

    def answer(self, current: NDArray[np.int64], gather: Gather) -> NDArray[np.int64]:
        """The map the engine shall go to.

        Args:
            current: (L, S) the engine's own map as it handed it in.
            gather: see `Gather`.

        Returns:
            (L, S) int64, the same on every rank: the plan's, or `current`.
        """
        move = self.move
        row = np.array(
            [
                _LAYOUT,
                int(move is not None),
                0 if move is None else move.wave.fingerprint,
                0 if move is None else digest_of(move.placement.phy2log),
                digest_of(current),
                self.step,
            ],
            np.int64,
        )
        table = gather(row)
        verdict = judge(table)
        if move is None and verdict == "":
            verdict = "no rank holds a plan"
        if move is not None and verdict == "" and move.placement.phy2log.shape != current.shape:
            shape = move.placement.phy2log.shape
            verdict = f"the plan is for {shape} layers and slots, the engine has {current.shape}"
        if verdict == "" and move is not None:
            self.refused = ""
            return move.placement.phy2log.astype(np.int64)
        if move is not None or table[:, ROW.index("ordered")].any():
            self.refused = verdict
            _log.error("plan_not_given", detail=verdict)
        return current


def judge(table: NDArray[np.int64]) -> str:
    """What stands against going on, in words with the ranks; empty when all ranks said the same.

    Args:
        table: (R, len(ROW)) int64, a row per rank.
    """
    words = {
        "layout": "another version of this plugin",
        "step": "another step",
        "ordered": "no plan where others have one",
        "plan": "another plan",
        "target": "another target map",
        "base": "another map now",
    }
    for name, what in words.items():
        column = table[:, ROW.index(name)]
        values, counts = np.unique(column, return_counts=True)
        if len(values) > 1:
            usual = values[counts.argmax()]
            if name == "ordered":
                usual = 1
            odd = np.flatnonzero(column != usual).tolist()
            told = {rank: int(column[rank]) for rank in odd[:4]} if name == "step" else odd[:8]
            return f"ranks {told} of {len(table)} have {what}" + (
                f", the others {int(usual)}" if name == "step" else ""
            )
    return ""


def digest_of(phy2log: NDArray[np.generic]) -> int:
    """60 bits over a map's shape and contents."""
    values = np.ascontiguousarray(phy2log, np.int64)
    seed = repr(values.shape).encode()
    return int(hashlib.blake2b(seed + values.tobytes(), digest_size=15).hexdigest()[:15], 16)


def gather_rows(row: NDArray[np.int64], group: Any) -> NDArray[np.int64]:
    """(R, n) every rank's row, in rank order; collective over a CPU group of the engine's."""
    mine = torch.from_numpy(row)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    _distributed.all_gather(rows, mine, group=group)
    return np.asarray(torch.stack(rows).numpy(), np.int64)
