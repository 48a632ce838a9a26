"""Measures what the canary costs a step: python -m bench.canary [--pairs] [--step-ms].

One rank computes steps of torch experts. Steps with the canary and without alternate in
the same run, and each pair of neighbours is compared, because the speed of a machine drifts. Slots
are due in every step, as after a plan that moves all experts; between plans the canary costs
nothing. `ask` is also timed by itself.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from bench.report import Row, write_report
from evenkeel_moe.adapters.torch.groups import make_communicator
from evenkeel_moe.agent.canary_runs import CanaryRuns, canary_token
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.model.ids import Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import MovedAnswers

LAYERS, SLOTS, HIDDEN, FFN = 4, 14, 256, 384
EXPERTS = SLOTS - 2
"""Two experts have a replica."""
STEP_S = float(GuestSettings.model_fields["canary_step_s"].default)
CPU = torch.device("cpu")
dist: Any = torch.distributed
WARM = 20


class Engine:
    """One rank of an engine: gated experts, and steps that keep the thread busy."""

    def __init__(self, placement: Placement) -> None:
        generator = torch.Generator().manual_seed(1)
        whole = [
            torch.randn((LAYERS, EXPERTS, *shape), generator=generator) / 20
            for shape in ((2 * FFN, HIDDEN), (HIDDEN, FFN))
        ]
        self.weights = whole
        self.map = placement.phy2log
        self.token = canary_token(HIDDEN, torch.float32, CPU)

    def expert(self, layer: int, slot: int, tokens: Tensor) -> Tensor:
        """Compute (n, hidden) tokens by the expert in a slot."""
        w_in, w_out = (tensor[layer, int(self.map[layer, slot])] for tensor in self.weights)
        gate, up = (tokens @ w_in.mT).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w_out.mT

    def step(self, experts: int) -> None:
        """Compute so many experts, one after the other, on a batch."""
        tokens = self.token.expand(16, -1)
        for number in range(experts):
            self.expert(number % LAYERS, number % SLOTS, tokens)

    def experts_in(self, seconds: float) -> int:
        """Return how many experts a step of this duration computes."""
        began = time.process_time()
        self.step(200)
        return max(1, round(200 * seconds / (time.process_time() - began)))


def measure(pairs: int, step_s: float) -> list[Row]:
    """Return the rows of the report."""
    row = [*range(EXPERTS), 0, 1]
    placement = Placement(np.array([row] * LAYERS, np.int32), 1, EXPERTS)
    engine, told = Engine(placement), list[MovedAnswers]()
    alarms: list[str] = []
    with ThreadPoolExecutor(1) as worker:

        def queue(job: Callable[[], None]) -> None:
            worker.submit(job)

        canary = CanaryRuns(
            lambda layer, slot: engine.expert(layer, slot, engine.token[None])[0],
            0,
            CPU,
            STEP_S,
            now=time.monotonic,
            later=queue,
            tell=told.append,
            alarm=alarms.append,
        )
        canary.register(
            make_communicator(dist.HashStore(), "bench", 0, 1, device=CPU, timeout_s=60), placement
        )
        random, waves = np.random.default_rng(1), 0
        asked, wall, cpu, covered, began = [], [], [], [], 0.0
        experts = engine.experts_in(step_s)
        for step in range(2 * (WARM + pairs)):
            if len(told) == waves:
                if waves:
                    covered.append(time.perf_counter() - began)
                new = Placement(random.permuted(placement.phy2log, axis=1), 1, EXPERTS)
                wave = WaveKey(Generation("bench"), PlanId(f"plan-{waves}"), 0, 1)
                canary.moved(wave, placement, new)
                engine.map, placement = new.phy2log, new
                waves, began = waves + 1, time.perf_counter()
            started, started_cpu = time.perf_counter(), time.process_time()
            engine.step(experts)
            computed = time.perf_counter()
            if step % 2:
                canary.ask(placement)
            asked.append(time.perf_counter() - computed)
            # The comparison on the other thread counts for this step.
            worker.submit(int).result()
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - started_cpu)
    if alarms:
        raise SystemExit(alarms[0])
    ask = np.array(asked).reshape(-1, 2)[WARM:, 1]
    off_s = float(np.median(np.array(wall).reshape(-1, 2)[WARM:, 0]))
    what = f"share of a step, {pairs} pairs of {1000 * off_s:.1f} ms"
    return [
        Row("ask_share", float(ask.mean() / off_s), f"{what}, timed by itself"),
        Row("ask_p99_us", float(np.quantile(ask, 0.99) * 1e6), "us"),
        *_pairs("wall", wall, what),
        *_pairs("cpu", cpu, f"{what}, seconds of the process on a core, both threads"),
        Row("answer_us", canary._cost_s * 1e6, "us, one expert, as registered"),
        *(
            Row("covered_s", seconds, f"s until {one.same} of {one.moved} moved experts answered")
            for seconds, one in zip(covered, told, strict=False)
        ),
    ]


def _pairs(name: str, spent: list[float], what: str) -> list[Row]:
    """Return by how much steps with the canary exceed their neighbours, and the error of it."""
    off, on = np.array(spent).reshape(-1, 2)[WARM:].T
    difference = (on - off) / np.median(off)
    error = 1.96 * difference.std() / np.sqrt(len(difference))
    return [
        Row(f"{name}_share", float(difference.mean()), f"{what}, on against off"),
        Row(f"{name}_share_error", float(error), "95 % interval of the mean, plus or minus"),
    ]


def main() -> None:
    """Print the figures and write bench/out/canary.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    write_report("canary", measure(options.pairs, options.step_ms / 1000))


if __name__ == "__main__":
    main()
