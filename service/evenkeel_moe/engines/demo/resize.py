"""The demo of a group that grows, loses a rank and shrinks while it serves requests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from rich.console import Console
from rich.text import Text

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.engines.demo.controller import DemoController
from evenkeel_moe.engines.demo.processes import StopFlag
from evenkeel_moe.engines.reference.lines import read_new_lines
from evenkeel_moe.engines.reference.resizing import ResizeOutcome
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.quantities import counted
from evenkeel_moe.planning.schedule.relabel import fewest_moves
from evenkeel_moe.planning.schedule.width_change import copies_to, holders

REQUESTS: dict[str, Any] = {
    "requests_per_s": 2.0,
    "prompt_tokens": 16,
    "output_tokens": 8,
    "pool_slots_per_layer": 14,
    "shrinks": True,
}
"""Settings of the ranks. Three ranks have room for all experts and the KV cache of the requests."""
_REPLICAS = 4
"""Replicas of all layers that a plan may make: what they leave is for the KV cache."""
_MORE, _FEWER = 6, 3
_KILLED = 2
_STAGE_S = 240.0
"""Longest time of a stage; each takes a few seconds on a quiet machine."""
_SERVE_S = 8.0
"""Seconds for which the tokens a second of a size are measured."""
_POLL_S = 0.1
_T = TypeVar("_T")


class ResizeDemo:
    """Takes a group to six ranks, kills one, takes it to three, and says what came of it."""

    def __init__(
        self, console: Console, controller: DemoController, supervisor: Supervisor, stop: StopFlag
    ) -> None:
        self._console, self._stop = console, stop
        self._controller, self._supervisor = controller, supervisor
        self._clock = SystemClock()
        self._offsets: dict[Path, int] = {}
        self._tokens: list[tuple[float, int]] = []
        """Unix seconds and tokens of each step of each rank."""
        self._least_replicas = 1
        self._begun: dict[str, Any] = {}
        """The retirement as the newest evacuation found it."""

    def run(self) -> bool:
        """Run all stages; return True if nothing was wrong.

        Raises:
            Unavailable: a stage took too long, or the demo was stopped.
        """
        ranks = self._supervisor.num_ranks
        self._until(lambda: (self._status() or {}).get("window_steps", 0) >= 64, "served steps")
        budget = {"replica_budget": _REPLICAS}
        self._until(
            lambda: self._controller.change("PATCH", "deployments/demo/policy", budget),
            "the policy",
        )
        self._serve(f"{ranks} ranks")
        self._grow()
        self._serve(f"{_MORE} ranks")
        self._lose()
        self._serve(f"{_MORE - 1} ranks")
        self._shrink()
        self._serve(f"{_FEWER} ranks")
        report = self._supervisor.stop()
        self._say(report.words)
        rows = sum(check["rows_checked"] for check in report.checks)
        wrong = sum(check["mismatches"] for check in report.checks)
        self._say(
            f"{rows:,} outputs compared with those of a model that never moved: {wrong} differ"
        )
        self._say(f"every expert had at least {self._least_replicas} replica whenever it was asked")
        return report.ok and self._least_replicas > 0

    def _grow(self) -> None:
        self._resize(_MORE)
        before = self._until(lambda: self._placement(_MORE), "the placement of the new group")
        after = self._until(self._filled, "experts on the ranks that joined")
        # The plan's ranks may have other names: the fewest copies over all ways to name them.
        held = holders(before)
        copied, least = copies_to(held, after), copies_to(held, fewest_moves(before, after))
        self._say(f"ranks that joined were filled: {copied} copies, the best assignment {least}")

    def _filled(self) -> Placement | None:
        placement = self._placement(_MORE)
        if placement is None or (self._status() or {}).get("active_plan") is not None:
            return None
        joined = holders(placement)[:, :, self._joined :]
        return placement if bool(joined.any(axis=1).all()) else None

    def _lose(self) -> None:
        """Kill a rank; the others go on with its experts."""
        placement = self._until(lambda: self._placement(_MORE), "the present placement")
        alone = int((placement.only_rank == _KILLED).sum())
        self._say(f"killing rank {_KILLED}: {counted(alone, 'expert')} live on it alone")
        began, before = self._clock.unix(), self._supervisor.resized
        self._supervisor.kill_rank(_KILLED)

        def outlived() -> ResizeOutcome | None:
            found = self._supervisor.resized
            return None if found is before else found

        self._say_resized(self._until(outlived, "the group without it"), began)
        self._until(lambda: self._placement(_MORE - 1), "the placement of the smaller group")

    def _shrink(self) -> None:
        self._begun = self._until(
            lambda: self._asked({"to_ranks": _FEWER, "plan_id": "evacuate"}),
            "the retirement of ranks",
        )
        ready = self._until(self._evacuated, "the evacuation")
        plan = self._until(
            lambda: self._controller.get(f"deployments/demo/plans/{ready['plan_id']}"), "its plan"
        )
        self._say(f"{ready['words']} {plan['moves']} copies, least {self._begun['stranded']}")
        self._resize(_FEWER, tuple(ready["retire"]))

    def _asked(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Ask for a retirement; None while a plan runs."""
        answer = self._controller.change("POST", "deployments/demo/resize", asked)
        return answer if answer is not None and "retire" in answer else None

    def _evacuated(self) -> dict[str, Any] | None:
        """Return the retirement once the ranks may leave; ask again if the plan has failed."""
        status = self._status()
        if status is None or status["resize"] is None:
            return None
        found: dict[str, Any] = status["resize"]
        if not found["ready"] and status["active_plan"] is None:
            self._begun = self._asked({"retire": found["retire"]}) or self._begun
        return found if found["ready"] else None

    def _resize(self, ranks: int, retire: tuple[int, ...] = ()) -> None:
        self._joined = self._supervisor.num_ranks
        began = self._clock.unix()
        self._supervisor.resize(ranks, retire)
        outcome = self._until(lambda: self._supervisor.resized, f"the group of {ranks} ranks")
        self._say_resized(outcome, began)

    def _say_resized(self, outcome: ResizeOutcome, began: float) -> None:
        if outcome.failed:
            raise Unavailable(outcome.words, Reason.RESIZING)
        self._read()
        self._say(
            f"{outcome.words}; {self._rate(began, self._clock.unix()):.0f} tokens/s meanwhile"
        )

    def _serve(self, who: str) -> None:
        """Serve for some seconds, and say how many tokens a second."""
        began = self._clock.unix()
        self._until(lambda: self._clock.unix() > began + _SERVE_S or None, "steps")
        self._say(f"{who}: {self._rate(began, self._clock.unix()):.0f} tokens/s")

    def _rate(self, began: float, ended: float) -> float:
        inside = [tokens for at, tokens in self._tokens if began <= at < ended]
        return sum(inside) / (ended - began)

    def _until(self, ask: Callable[[], _T | None], what: str) -> _T:
        """Poll until there is an answer.

        Raises:
            Unavailable: there is none in time, the ranks ended, or the demo was stopped.
        """
        deadline = time.monotonic() + _STAGE_S
        while not self._stop and time.monotonic() < deadline:
            if (report := self._supervisor.poll()) is not None:
                raise Unavailable(f"{what} did not come: {report.words}", Reason.RANKS_MISSING)
            self._read()
            try:
                if answer := ask():
                    return answer
            except httpx.HTTPError:
                pass
            self._stop.wait(_POLL_S)
        raise Unavailable(f"{what} did not come within {_STAGE_S:g} s", Reason.EXPIRED)

    def _read(self) -> None:
        for line in read_new_lines(self._supervisor.folder, self._offsets):
            if line["kind"] == "step":
                self._tokens.append((line["unix"], line["tokens"]))

    def _status(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._controller.get("deployments/demo")
        return found

    def _placement(self, ranks: int) -> Placement | None:
        """Return the committed placement; None while the group has another number of ranks."""
        found = self._controller.get("deployments/demo/placement")
        if found is None or found["num_ranks"] != ranks:
            return None
        replicas = np.array(found["replica_count"])
        self._least_replicas = min(self._least_replicas, int(replicas.min()))
        slots = np.array(found["physical_to_logical"], np.int32)
        return Placement(slots, ranks, replicas.shape[1])

    def _say(self, words: str) -> None:
        self._console.print(Text(words), soft_wrap=True)
