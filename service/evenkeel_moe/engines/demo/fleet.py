"""What the ranks of a run have written so far, put together per step."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.planning.problem import metrics

__all__ = ["FleetLog", "StepRow", "Swap", "read_new_lines"]

RECENT_STEPS = 16
"""Steps the bars and the shown balancedness are averaged over."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step that every rank has written."""

    step: int
    unix: float
    """When the last rank wrote it."""
    seconds: float
    """The slowest rank's."""
    epoch: int
    domain: str
    rank_load: NDArray[np.int64]
    """(L, R) [tokens]."""
    balancedness: float
    """Mean over layers; NaN without load."""


@dataclass(frozen=True, slots=True)
class Swap:
    """One wave that took effect on one rank."""

    rank: int
    step: int
    epoch: int
    plan_id: str
    seconds: float
    received_bytes: int


@dataclass(slots=True)
class FleetLog:
    """The lines of all ranks, joined by step.

    Balancedness here is measured by the ranks step by step, not taken from the controller: the demo
    must not believe the part it demonstrates.
    """

    num_ranks: int
    rows: list[StepRow] = field(default_factory=list)
    """Steps all ranks have written, in the order they became complete."""
    swaps: list[Swap] = field(default_factory=list)
    checks: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Final check by rank."""
    exits: list[Mapping[str, Any]] = field(default_factory=list)
    faults: list[Mapping[str, Any]] = field(default_factory=list)
    """What was broken on purpose, as the ranks admit it."""
    mismatches: int = 0
    """Output rows that differed from the never-migrated model, newest count over the ranks."""
    _open: dict[int, dict[int, Mapping[str, Any]]] = field(default_factory=dict)

    def feed(self, lines: Iterable[Mapping[str, Any]]) -> list[Swap]:
        """Take in new lines; the swaps among them, for whoever tells of them."""
        swaps: list[Swap] = []
        for line in lines:
            kind = line["kind"]
            if kind == "step":
                self._feed_step(line)
            elif kind == "swap":
                swaps.append(
                    Swap(
                        line["rank"],
                        line["step"],
                        line["epoch"],
                        line["plan_id"],
                        line["seconds"],
                        line["received_bytes"],
                    )
                )
            elif kind == "check":
                self.checks[line["rank"]] = line
            elif kind == "exit":
                self.exits.append(line)
            elif kind == "fault":
                self.faults.append(line)
        self.swaps += swaps
        return swaps

    def _feed_step(self, line: Mapping[str, Any]) -> None:
        self.mismatches = max(self.mismatches, line["mismatches"])
        ranks = self._open.setdefault(line["step"], {})
        ranks[line["rank"]] = line
        if len(ranks) < self.num_ranks:
            return
        del self._open[line["step"]]
        load = np.array([ranks[rank]["rank_load"] for rank in range(self.num_ranks)], np.int64).T
        per_layer = metrics.balancedness(load.astype(np.float64))
        known = per_layer[~np.isnan(per_layer)]
        self.rows.append(
            StepRow(
                step=line["step"],
                unix=max(row["unix"] for row in ranks.values()),
                seconds=max(row["seconds"] for row in ranks.values()),
                epoch=line["epoch"],
                domain=line["domain"],
                rank_load=load,
                balancedness=float(known.mean()) if known.size else float("nan"),
            )
        )

    @property
    def newest(self) -> StepRow | None:
        """The newest complete step."""
        return self.rows[-1] if self.rows else None

    def layer_shares(self) -> NDArray[np.float64] | None:
        """(L, R) share of each layer's tokens of the last steps each rank carried; NaN for a layer without.

        None before there is a step.
        """
        if not self.rows:
            return None
        total = np.zeros(self.rows[-1].rank_load.shape)
        for row in self.rows[-RECENT_STEPS:]:
            total += row.rank_load
        whole = total.sum(axis=1, keepdims=True)
        return np.asarray(np.divide(total, whole, where=whole > 0, out=np.full_like(total, np.nan)))

    def median_step_s(self) -> float | None:
        """Median of the slowest rank's last step times; None before there are any."""
        recent = self.rows[-RECENT_STEPS:]
        return float(np.median([row.seconds for row in recent])) if recent else None

    def balancedness(self) -> float | None:
        """Mean of the last steps; None before there are any."""
        return mean_balancedness(self.rows[-RECENT_STEPS:])


def mean_balancedness(rows: Iterable[StepRow]) -> float | None:
    """Mean over steps of the balancedness of those that had load; None if none had."""
    values = [row.balancedness for row in rows if not np.isnan(row.balancedness)]
    return sum(values) / len(values) if values else None


def read_new_lines(
    folder: Path, num_ranks: int, offsets: dict[Path, int]
) -> Iterator[Mapping[str, Any]]:
    """Lines the ranks wrote since the last call; a line still being written waits for the next one.

    Mutates: `offsets`, bytes read of each file.
    """
    pending: deque[Mapping[str, Any]] = deque()
    for rank in range(num_ranks):
        path = folder / f"rank-{rank}.jsonl"
        if not path.exists():
            continue
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            text = file.read()
        whole = text.rfind(b"\n") + 1
        offsets[path] = offsets.get(path, 0) + whole
        pending.extend(json.loads(line) for line in text[:whole].splitlines() if line.strip())
    yield from pending
