"""Measures the cost of the seconds of the experts: python -m bench.expert_times [--rounds].

One model of torch layers runs step after step: one step without the plugin, one whose turn to be
measured has not come, and one that is measured, in random order, so that a drift of the machine's
speed meets all alike. The layers are small and have nothing but experts, so the share of a step is
larger than for a large model.

On a CUDA device replays of a graph that was recorded with the measurement are compared with replays
of one that was recorded without.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.report import Row, write_report
from evenkeel_moe.engines.guest.expert_times import (
    ExpertCall,
    ExpertTimes,
    make_clock,
)

LAYERS, WIDTH, EXPERTS, TOKENS = 32, 512, 4, 16
EVERY = 8
"""Steps of which a plugin measures one, unless it is set otherwise."""
WARM_ROUNDS = 20
"""Rounds that are not counted."""


class Layer:
    """The experts of a layer, called as engines call them: looked up on an object."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def experts(self, rows: Tensor) -> Tensor:
        """Return what the experts compute."""
        return torch.bmm(rows.expand(EXPERTS, -1, -1), self._weights).mean(dim=0)


class Model:
    """Layers, with the measurement of their seconds if it is wanted.

    Args:
        weights: (LAYERS, EXPERTS, WIDTH, WIDTH), which all models have in common.
        measures: True to measure the seconds.
    """

    def __init__(self, weights: Tensor, *, measures: bool) -> None:
        self.layers = [Layer(of_layer) for of_layer in weights]
        self._rows = torch.randn(TOKENS, WIDTH, device=weights.device)
        calls = [ExpertCall(layer, "experts") for layer in self.layers]
        self.times = (
            ExpertTimes(EVERY, make_clock(weights.device), lambda: calls) if measures else None
        )

    def forward(self) -> None:
        """Run all layers."""
        rows = self._rows
        for layer in self.layers:
            rows = layer.experts(rows)

    def step(self, number: int, run: Callable[[], object] | None = None) -> None:
        """Run a step and its end, as a plugin does, and wait for the device.

        Args:
            number: 0 is measured, 1 is not.
            run: what computes the layers, if it is not `forward`.
        """
        if self.times is not None:
            self.times.begin_step(number)
        (run or self.forward)()
        if self.times is not None:
            self.times.end_step()
        if self._rows.is_cuda:
            torch.cuda.synchronize()


def take_turns(
    runs: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> NDArray[np.float64]:
    """Return (rounds, runs) seconds; the order within a round is random."""
    rng = np.random.default_rng(0)
    found = np.empty((rounds, len(runs)))
    for number in range(-WARM_ROUNDS, rounds):
        for which in rng.permutation(len(runs)).tolist():
            began = clock()
            runs[which]()
            found[max(number, 0), which] = clock() - began
    return found


def cost_row(name: str, cost: NDArray[np.float64], step_s: float) -> Row:
    """Return the median of paired differences as a share of a step, with its interval."""
    rng = np.random.default_rng(1)
    medians = np.median(rng.choice(cost, (1000, len(cost))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975)) / step_s * 100
    median = float(np.median(cost))
    return Row(
        f"{name}_percent",
        100 * median / step_s,
        f"% of {step_s * 1e3:.2f} ms, 95 % {low:.3f} to {high:.3f}: {median * 1e6:.1f} us,"
        f" {LAYERS} layers, {len(cost)} rounds",
    )


def measure_eager(weights: Tensor, rounds: int) -> list[Row]:
    """Return the cost of a step that is not measured, of one that is, and their mean."""
    bare, model = Model(weights, measures=False), Model(weights, measures=True)
    runs = [lambda: bare.step(0), lambda: model.step(1), lambda: model.step(0)]
    # Other processes take no part in the time of this one, which has one thread.
    clock = time.perf_counter if weights.is_cuda else time.process_time
    bare_s, off_s, on_s = take_turns(runs, rounds, clock).T
    step_s = float(np.median(bare_s))
    return [
        cost_row("not_measured", off_s - bare_s, step_s),
        cost_row("measured", on_s - bare_s, step_s),
        cost_row(f"one_in_{EVERY}", ((EVERY - 1) * off_s + on_s) / EVERY - bare_s, step_s),
    ]


def measure_graphs(weights: Tensor, rounds: int) -> list[Row]:
    """Return the cost of a replay."""
    runs = [_recorded(Model(weights, measures=measures)) for measures in (False, True)]
    bare_s, on_s = take_turns(runs, rounds, time.perf_counter).T
    return [cost_row("replayed", on_s - bare_s, float(np.median(bare_s)))]


def _recorded(model: Model) -> Callable[[], None]:
    """Return a function that replays a step of the model and ends it."""
    model.step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward()
    return lambda: model.step(0, graph.replay)


def main() -> None:
    """Measure, print the figures, and write bench/out/expert_times.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = torch.randn(LAYERS, EXPERTS, WIDTH, WIDTH, device=device) / WIDTH**0.5
    rows = measure_eager(weights, rounds)
    if weights.is_cuda:
        rows += measure_graphs(weights, rounds)
    write_report("expert_times", rows, ("torch",))


if __name__ == "__main__":
    main()
