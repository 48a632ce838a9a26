"""Compares what plans promised with what they delivered, in a whole vLLM on a CPU.

`make bench-vllm_delivered` (`python -m bench.vllm_delivered [--parallel dp] [--plans N]`) runs a
controller in `auto` and a vLLM server with two ranks (see `make test-vllm`). The requests are about
one topic after the other, each with hot experts of its own, so that plans follow. At the
end one rank computes its experts twice for a share of the tokens, and then recovers.

The ranks report the seconds of their own experts, and the controller measures every plan. A probe
in vLLM writes the seconds of each layer at every step. From these, which the controller never sees,
the bench measures the plans too.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.delivered import share_rows
from bench.report import Row, write_report
from evenkeel_moe.telemetry.delivered_gain import match_tokens
from tests.integration.whole import Served, plans
from tests.vllm.checkpoint import LAYERS, VOCABULARY, Kind, write_checkpoint
from tests.vllm.rig import rank_settings
from tests.vllm.server import DATA_PARALLEL, TENSOR_PARALLEL, Traffic, VllmServer

PLANS = 10
MOST_TOPICS = 30
SECONDS_EVERY = 1
"""Steps of which one is measured: more than by default, so that enough of them are soon there."""
LENGTHS = (8, 48, 16, 96, 24, 64, 32, 8) * 8
"""Tokens of each prompt of a topic."""
KIND = Kind(hidden=256, ffn=1024, topics=MOST_TOPICS)
CLIENTS = 24
WINDOW_STEPS = 512
THRESHOLDS = {"min_changed_steps": 128, "cooldown_s": 10}
"""A batch has few tokens: plans on fewer steps since a change promise by chance."""
SLOW_RANK = 1
REPEATED = 0.8
"""Share of the tokens for which the slow rank computes its experts twice."""
_NEWEST_S = 5.0
_BEGINS_S = 20.0
"""Seconds of a topic, if no plan begins: its experts are in balance as they are."""
_MEASURED_S = 180.0
"""Longest wait for a plan to be measured."""
_FEWEST_PAIRS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which the traffic stayed as it was."""

    what: str
    began: float
    ended: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One plan that was carried out."""

    what: str
    plan: Mapping[str, Any]
    by_probe: float
    """Share of MoE time saved, by the seconds of each layer at each step; NaN with few steps."""
    tokens_per_s: tuple[float, float, float]
    """Before, during and after the plan; NaN where the time is short."""

    @property
    def delivered(self) -> Mapping[str, Any] | None:
        """The gain that the controller measured; None if it could not."""
        found: Mapping[str, Any] | None = self.plan["delivered"]
        return found if found is not None and found["over_promised"] is not None else None


class Run:
    """A controller and a server, with traffic about one topic at a time."""

    def __init__(self, served: Served, server: VllmServer) -> None:
        self.served, self.server = served, server
        self._prompts = _prompts(0)
        self.traffic = Traffic(server, self._prompts, CLIENTS)

    def wait_until_measured(self) -> Mapping[str, Any]:
        """Return the cost model once it is that of the ranks' seconds, with a window of steps."""

        def measured() -> Mapping[str, Any] | None:
            status = self.served.status()
            if status is None or status["window_steps"] < WINDOW_STEPS // 2:
                return None
            cost: Mapping[str, Any] | None = status["cost_model"]
            return cost if cost is not None and cost["source"] == "measured" else None

        found: Mapping[str, Any] = self.served.wait(measured, 120, "the ranks' seconds")
        return found

    def topic(self, number: int) -> list[Measured]:
        """Let all requests from now on be about another topic; see `observe`."""
        self._prompts[:] = _prompts(number)
        return self.observe(f"topic {number}")

    def observe(self, what: str) -> list[Measured]:
        """Wait for the plans that begin from now on; return those that were carried out."""
        began, first = time.time(), len(plans(self.served))

        def new() -> Sequence[Mapping[str, Any]]:
            found = plans(self.served)
            return found[: len(found) - first][::-1]

        until = time.monotonic() + _BEGINS_S
        while not new() and time.monotonic() < until:
            time.sleep(0.25)
        until = time.monotonic() + _MEASURED_S
        while any(map(_unmeasured, new())) and time.monotonic() < until:
            time.sleep(0.25)
        span, found = Span(what, began, time.time()), new()
        carried_out = [plan for plan in found if plan["phase"] == "committed"]
        steps = self.server.steps() if carried_out else []
        return [self._result(plan, span, carried_out, steps) for plan in carried_out]

    def _result(
        self,
        plan: Mapping[str, Any],
        span: Span,
        carried_out: Sequence[Mapping[str, Any]],
        steps: list[list[dict[str, Any]]],
    ) -> Measured:
        begins, ends = plan["created_at"], plan["updated_at"]
        first = max([span.began, *(p["updated_at"] for p in carried_out if p["updated_at"] < ends)])
        last = min(
            [span.ended, *(p["created_at"] for p in carried_out if p["created_at"] > begins)]
        )
        edges = ((first, begins), (begins, ends), (ends, last))
        before, _, after = (_between(steps, *edge) for edge in edges)
        rates = [self._tokens_per_s(*edge) for edge in edges]
        return Measured(span.what, plan, _gain(before, after), (rates[0], rates[1], rates[2]))

    def share_of(self, rank: int, seconds: float) -> float:
        """Return the share of all pairs of token and expert that a rank computed lately."""
        pairs = _between(self.server.steps(), time.time() - seconds, time.time()).pairs
        return float(pairs[:, rank].sum() / pairs.sum())

    def _tokens_per_s(self, began: float, ended: float) -> float:
        """Return the tokens that clients got answered per second, prompts included."""
        if ended - began < 0.2:
            return float("nan")
        tokens = 0
        for answer in list(self.traffic.answers):
            parts = [began <= at <= ended for at in answer.arrivals]
            tokens += sum(parts) + (LENGTHS[answer.prompt] if parts[0] else 0)
        return tokens / (ended - began)


@dataclass(frozen=True, slots=True)
class ProbeSteps:
    """Steps as the probe wrote them."""

    tokens: NDArray[np.float64]
    """(T,)"""
    seconds: NDArray[np.float64]
    """(T, R, L) of the experts of a rank."""
    pairs: NDArray[np.int64]
    """(T, R, L) pairs of token and expert that a rank computed."""


def _between(steps: list[list[dict[str, Any]]], began: float, ended: float) -> ProbeSteps:
    """Return the steps of a time in which every layer ran once."""
    lines = [
        line
        for line in zip(*steps, strict=False)
        if began <= line[0]["at"] <= ended and all(len(rank["seconds"]) == LAYERS for rank in line)
    ]
    tokens = [line[0]["tokens"] for line in lines]
    seconds, pairs = (
        [[rank[name] for rank in line] for line in lines] for name in ("seconds", "pairs")
    )
    return ProbeSteps(np.array(tokens, np.float64), np.array(seconds), np.array(pairs, np.int64))


def _unmeasured(plan: Mapping[str, Any]) -> bool:
    """Return True if it is not yet known what a plan delivered."""
    if plan["phase"] == "committed":
        return plan["delivered"] is None
    return not plan["ended"]


def _gain(before: ProbeSteps, after: ProbeSteps) -> float:
    """Return the share of MoE time saved, by steps alike in tokens."""
    earlier, later = match_tokens(before.tokens, after.tokens)
    if len(earlier) < _FEWEST_PAIRS:
        return float("nan")
    old, new = (
        float(one.seconds[rows].max(axis=1).sum())
        for one, rows in ((before, earlier), (after, later))
    )
    return 1.0 - new / old


def _prompts(topic: int) -> list[list[int]]:
    rng = np.random.default_rng(topic)
    words = [word for word in range(2, VOCABULARY) if word % MOST_TOPICS == topic]
    return [rng.choice(words, length).tolist() for length in LENGTHS]


@contextmanager
def started(parallel: tuple[str, str]) -> Iterator[Run]:
    """Start a controller, a server and traffic; all are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "model", 0, KIND)
        served = Served(
            folder / "controller",
            WINDOW__STEPS=WINDOW_STEPS,
            WINDOW__PLAN_STEPS=256,
            PLANNER__MODE="observe",
            PLANNER__POLICY="keel",
            PLANNER__THRESHOLDS=json.dumps(THRESHOLDS),
            PLANNER__CYCLE_S=2,
            PLANNER__RECENT_STEPS=32,
        )
        server = VllmServer(
            folder / "engine",
            checkpoint,
            parallel,
            rank_settings(served, "place", SECONDS_EVERY=str(SECONDS_EVERY)),
        )
        run = Run(served, server)
        try:
            served.start()
            server.start()
            with run.traffic:
                yield run
        finally:
            server.stop()
            served.stop()
            served.http.close()


HEAD = (
    f"{'':25} promised  delivered  error  (95 %)             modelled  by probe  ratio  pairs"
    "  tokens/s before, during, after  step ms before, after"
)


def line_of(one: Measured) -> str:
    """Return the figures of a plan as a line."""
    found, name = one.plan["delivered"], f"{one.what:10} {one.plan['planned_because'] or '-':14}"
    rates = "  ".join(f"{rate:6.0f}" for rate in one.tokens_per_s)
    if found is not None:
        sides = [found[side] for side in ("before", "after")]
        rates += "  " + " ".join(
            "     -" if s is None else f"{1e3 * s['step_s']:6.1f}" for s in sides
        )
    if one.delivered is None:
        why = "not measured" if found is None else found["unknown_because"] or "no promise"
        return f"{name} {why}  by probe {one.by_probe:.1%}  tokens/s {rates}"
    return (
        f"{name} {found['promised']:8.1%}  {found['gain']:9.1%} +-{found['error']:5.1%}"
        f"  ({found['lower']:6.1%}, {found['upper']:6.1%})  {found['modelled']:8.1%}"
        f"  {one.by_probe:8.1%}  {found['over_promised']:5.2f}  {found['steps']:3d}  {rates}"
    )


def print_rank(run: Run) -> None:
    """Print the speed of the rank that is slowed, as the controller has it, and its share."""
    slowness = run.served.get()["ranks"][SLOW_RANK]["slowness"]
    share = run.share_of(SLOW_RANK, _NEWEST_S)
    print(
        f"rank {SLOW_RANK} takes {slowness or math.nan:.2f} times as long as the median rank, and"
        f" computes {share:.0%} of the tokens",
        flush=True,
    )


def rows_of(found: list[Measured]) -> list[Row]:
    """Return the figures of all plans."""
    known = [one.delivered for one in found if one.delivered is not None]
    apart = [
        one.delivered["gain"] - one.by_probe
        for one in found
        if one.delivered is not None and np.isfinite(one.by_probe)
    ]
    rows = [
        Row("plans", float(len(found)), "carried out"),
        Row("measured", float(len(known)), "of them"),
        *share_rows("", known),
    ]
    if apart:
        rows.append(Row("delivered_minus_probe_mean", float(np.mean(np.abs(apart))), "absolute"))
    return rows


def main() -> None:
    """Run, print every plan, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", choices=("tp", "dp"), default="tp")
    parser.add_argument("--plans", type=int, default=PLANS)
    options = parser.parse_args()
    found: list[Measured] = []

    def keep(new: list[Measured]) -> None:
        found.extend(new)
        for one in new:
            print(line_of(one), flush=True)

    with started(TENSOR_PARALLEL if options.parallel == "tp" else DATA_PARALLEL) as run:
        cost = run.wait_until_measured()
        print(f"cost model {cost['source']}: {cost['detail']}, mean error {cost['fit_error']:.0%}")
        print(HEAD, flush=True)
        run.served.patch_policy(mode="auto")
        for number in range(MOST_TOPICS):
            if len(found) >= options.plans:
                break
            keep(run.topic(number))
        print_rank(run)
        for share, what in ((REPEATED, "slow"), (0.0, "recovered")):
            run.server.call("repeat_experts", rank=SLOW_RANK, share=share)
            keep(run.observe(what))
            print_rank(run)
    if all(one.delivered is None for one in found):
        raise SystemExit(f"none of the {len(found)} plans that were carried out was measured")
    write_report(f"vllm_delivered_{options.parallel}", rows_of(found))


if __name__ == "__main__":
    main()
