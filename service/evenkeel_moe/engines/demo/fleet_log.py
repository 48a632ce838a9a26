"""The lines that the ranks of a run have written so far, joined by step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.planning.problem import metrics

RECENT_STEPS = 16
"""Number of steps over which the displayed values are averaged."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, once every rank has written it."""

    step: int
    unix: float
    """Unix time at which the last rank wrote it."""
    seconds: float
    """Duration on the slowest rank."""
    domain: str
    rank_load: NDArray[np.int64]
    """(L, R) [tokens]."""
    balancedness: float
    """Mean over the layers; NaN without load."""
    layer_s: NDArray[np.float64]
    """(L,) seconds in the experts: of the slowest rank in each layer, because a layer's results
    must arrive before the next begins."""
    delay_s: NDArray[np.float64]
    """(L,) the part of `layer_s` beyond the time that the pace of the slowest rank asks for."""


@dataclass(frozen=True, slots=True)
class RankSwap:
    """One wave that took effect on one rank."""

    step: int
    plan_id: str
    seconds: float


@dataclass(slots=True)
class FleetLog:
    """The lines of all ranks, joined by step.

    Balancedness is computed here from what the ranks measured in each step. It is not taken from
    the controller, because the demo must check the controller's work independently.
    """

    num_ranks: int
    rows: list[StepRow] = field(default_factory=list)
    """Steps that all ranks have written, in the order in which they became complete."""
    swaps: list[RankSwap] = field(default_factory=list)
    checks: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Final check by rank."""
    exits: list[Mapping[str, Any]] = field(default_factory=list)
    mismatches: int = 0
    """Largest number of output rows on a rank that differ from the never-migrated model."""
    _open: dict[int, dict[int, Mapping[str, Any]]] = field(default_factory=dict)

    def feed(self, lines: Iterable[Mapping[str, Any]]) -> list[RankSwap]:
        """Add new lines, and return the swaps among them."""
        swaps: list[RankSwap] = []
        for line in lines:
            kind = line["kind"]
            if kind == "step":
                self._feed_step(line)
            elif kind == "swap":
                swaps.append(RankSwap(line["step"], line["plan_id"], line["seconds"]))
            elif kind == "check":
                self.checks[line["rank"]] = line
            elif kind == "exit":
                self.exits.append(line)
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
        layer_s = np.max([row["compute_s"] for row in ranks.values()], axis=0)
        paced_s = np.max([row["paced_s"] for row in ranks.values()], axis=0)
        self.rows.append(
            StepRow(
                step=line["step"],
                unix=max(row["unix"] for row in ranks.values()),
                seconds=max(row["seconds"] for row in ranks.values()),
                domain=line["domain"],
                rank_load=load,
                balancedness=float(known.mean()) if known.size else float("nan"),
                layer_s=layer_s,
                delay_s=layer_s - paced_s if paced_s.size else layer_s,
            )
        )

    @property
    def newest(self) -> StepRow | None:
        """The newest complete step; None before the first one."""
        return self.rows[-1] if self.rows else None

    @property
    def recent(self) -> list[StepRow]:
        """The last complete steps."""
        return self.rows[-RECENT_STEPS:]

    def layer_shares(self) -> NDArray[np.float64] | None:
        """Return (L, R): each rank's share of a layer's recent tokens; NaN if it has none.

        Returns None before the first step.
        """
        if not self.rows:
            return None
        total = np.zeros(self.rows[-1].rank_load.shape)
        for row in self.recent:
            total += row.rank_load
        whole = total.sum(axis=1, keepdims=True)
        return np.asarray(np.divide(total, whole, where=whole > 0, out=np.full_like(total, np.nan)))

    def median_step_s(self) -> float | None:
        """Return the median of the slowest rank's recent step times; None before the first step."""
        return float(np.median([row.seconds for row in self.recent])) if self.rows else None

    def balancedness(self) -> float | None:
        """Return the mean of the recent steps; None before the first step."""
        return mean_balancedness(self.recent)


def mean_balancedness(rows: Iterable[StepRow]) -> float | None:
    """Return the mean balancedness of the steps with load; None if there are none."""
    values = [row.balancedness for row in rows if not np.isnan(row.balancedness)]
    return sum(values) / len(values) if values else None
