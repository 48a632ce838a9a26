"""The fewest active experts: speed beside LPLB and a greedy rule, and time on recorded decode."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.dispatch_baselines import greedy_fewest
from bench.dispatch_traces import RANKS, SLOTS_PER_RANK, Recorded, eplb_placement
from bench.loads import drifted, lognormal_steps
from bench.report import Row, best_of
from evenkeel_moe.dispatch import ExactSplit, FewestReplicas
from evenkeel_moe.model.cost import ReplicaWork
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.eplb import rebalance_experts
from evenkeel_moe.planning.problem.kernels import batch_split_kernel
from evenkeel_moe.planning.problem.moe_time import replica_work
from evenkeel_moe.planning.problem.token_split import slot_load

LAYERS, EXPERTS, BENCH_RANKS, SLOTS, TOP_K = 58, 256, 32, 288, 8
WINDOW_STEPS = 16
READS = (0.0, 1.0, 2.0, 4.0)
"""k: tokens that take as long to compute as one expert's weights to read, over an expert's mean."""
STEPS = 60
"""Steps scored per trace, evenly spaced after the window."""


def fewest_speed_rows() -> list[Row]:
    """Return times of the choice for decode batches of 4 and of 32 tokens per rank."""
    rows, over_lplb, over_greedy, more_active = [], [], [], []
    for batch in (4, 32):
        tokens = batch * BENCH_RANKS * TOP_K
        planned = lognormal_steps(1, LAYERS, EXPERTS, sigma=1.0)[0]
        rng = np.random.default_rng(2)
        share = drifted(planned) / drifted(planned).sum(axis=1, keepdims=True)
        live = np.stack([rng.multinomial(tokens, row, WINDOW_STEPS) for row in share], axis=1)
        phy2log = rebalance_experts(planned, SLOTS, 1, 1, BENCH_RANKS, allow_duplicates=False)
        placement = Placement(phy2log, BENCH_RANKS, EXPERTS)
        fewest, lplb = FewestReplicas(placement), ExactSplit(placement)
        counts, load = torch.from_numpy(live[0]), live[0].astype(np.float64)
        window, row = live.astype(np.float64), placement.phy2log.copy()
        seconds = best_of(
            {
                "fewest": partial(fewest.choose, counts),
                "lplb": partial(lplb.quotas, counts),
                "greedy": partial(greedy_fewest, load, row, BENCH_RANKS),
            }
        )
        seconds |= best_of(
            {
                "window": partial(batch_split_kernel, window, row, BENCH_RANKS, True),
                "optimal window": partial(batch_split_kernel, window, row, BENCH_RANKS, False),
            }
        )
        exact = fewest.active.max(axis=1)
        more_active.append(float((greedy_fewest(load, row, BENCH_RANKS) / exact).mean()))
        over_lplb.append(seconds["fewest"] / seconds["lplb"])
        over_greedy.append(seconds["fewest"] / seconds["greedy"])
        name = f"fewest_batch{batch}"
        rows += [
            Row(f"{name}_us_per_layer", seconds["fewest"] / LAYERS * 1e6, "us"),
            Row(f"{name}_time_over_lplb", over_lplb[-1], "ratio"),
            Row(f"{name}_time_over_greedy", over_greedy[-1], "ratio"),
            Row(f"{name}_greedy_active_over_exact", more_active[-1], "ratio"),
            Row(
                f"{name}_window_time_over_optimal",
                seconds["window"] / seconds["optimal window"],
                "ratio",
            ),
        ]
    headline = [
        Row("fewest_time_over_lplb", max(over_lplb), "ratio"),
        Row("fewest_time_over_greedy", max(over_greedy), "ratio"),
        Row("fewest_greedy_active_over_exact", max(more_active), "ratio"),
    ]
    return headline + rows


def fewest_time_rows(traces: list[Recorded]) -> list[Row]:
    """Return the time of EPLB's placement under each rule, over that of no replicas, by k.

    The time of a replica is the larger of reading its weights and computing its tokens. Values are
    means over the decode traces, which all have the same weight.
    """
    decode = [trace for trace in traces if "_decode_" in trace.name]
    if not decode:
        return []
    scores = [_scores(trace) for trace in decode]
    rows = []
    print(f"\n{len(decode)} decode traces, EPLB's placement: time over no replicas")
    for read in READS:
        for rule in ("even", "lplb", "fewest"):
            value = float(np.mean([score[rule, read] for score in scores]))
            print(f"k = {read:<4g}{rule:10}{value:8.4f}")
            rows.append(Row(f"eplb_{rule}_k{read:g}_time_over_linear", value, "ratio"))
    return rows


def _scores(trace: Recorded) -> dict[tuple[str, float], float]:
    window, _ = trace.window
    eplb = eplb_placement(trace.load[:window], RANKS, SLOTS_PER_RANK)
    steps = np.unique(np.linspace(window, len(trace.load) - 1, STEPS).astype(int))
    load = trace.load[steps].astype(np.float64)
    per_slot = {
        "even": slot_load(load, eplb),
        "lplb": _lplb_slots(trace.load[steps], eplb),
        "fewest": batch_split_kernel(load, eplb.phy2log.copy(), RANKS, True),
    }
    plain = slot_load(load, trace.in_order)
    out = {}
    for read in READS:
        work = ReplicaWork(read_tokens=read * float(load.mean()))
        alone = _time(plain, work)
        for rule, tokens in per_slot.items():
            out[rule, read] = _time(tokens, work) / alone
    return out


def _lplb_slots(counts: NDArray[np.int64], placement: Placement) -> NDArray[np.float64]:
    """Return (T, L, S) whole tokens per slot under LPLB."""
    solver = ExactSplit(placement)
    out = np.zeros((*counts.shape[:2], placement.num_slots))
    held = np.argwhere(placement.log2phy >= 0)
    slots = placement.log2phy[tuple(held.T)]
    for step, batch in enumerate(counts):
        quotas, _ = solver.quotas(torch.from_numpy(batch))
        out[step, held[:, 0], slots] = quotas.numpy()[tuple(held.T)]
    return out


def _time(per_slot: NDArray[np.float64], work: ReplicaWork) -> float:
    by_rank = replica_work(per_slot, work).reshape(*per_slot.shape[:2], RANKS, -1).sum(axis=3)
    return float(by_rank.max(axis=2).sum())
