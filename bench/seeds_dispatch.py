"""The figures of Libra, SGLang's LPLB and Waterfill, and METRO, which split single batches."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from bench.dispatch_rules import predicted_demand
from bench.dispatch_traces import RANKS, Recorded, eplb_placement, placements_of
from bench.report import Row
from evenkeel_moe.dispatch import (
    FewestReplicas,
    LibraVariant,
    plan_replicas,
    shard_tokens,
)
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.metrics import rank_load
from evenkeel_moe.planning.problem.token_split import SplitModel

STEPS = 20
"""Steps sampled per trace for Libra, evenly spaced."""
LIBRA_VARIANTS = {
    "published": LibraVariant.PUBLISHED,
    "refined": LibraVariant.REFINED,
}
EXTRA = (4, 8)
"""N, experts a rank fetches: half of the 8 it holds, as in Libra's evaluation (8 of 16), and all
8."""
TABLE_2_MS = {
    "gate": 0.39,
    "predict": 0.03,
    "dispatch": 0.99,
    "exchange_demand": 0.34,
    "shard": 0.57,
    "return_plan": 0.09,
    "local": 2.77,
    "plan": 0.26,
    "remote": 4.55,
    "combine": 1.33,
}
"""Milliseconds of each stage in Libra's Table 2: Qwen3MoE, 32 sequences of 1,024 tokens."""
REDUNDANT = (0, 8, 16, 32)
"""Redundant slots for 64 experts."""
BOUND_BY_READING = (0.5, 1.0, 2.0, 4.0)
"""k: reading the weights of an expert takes as long as computing k times its mean tokens."""


def _spread(name: str, values: list[float], unit: str = "1") -> list[Row]:
    """Return the mean, least and most of the values of all traces."""
    return [
        Row(f"{name}_{label}", float(pick(values)), unit)
        for label, pick in (("mean", np.mean), ("least", np.min), ("most", np.max))
    ]


def libra_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """Imbalance (max over mean) and MoE time under Libra, one copy of each expert placed in order.

    `predicted` plans on the lookahead, or on the step before if there is none; `exact` plans on the
    demand itself.
    """
    found: dict[str, list[float]] = {}
    for trace in traces:
        rows = []
        for key, value in _libra_means(trace).items():
            rows.append(Row(f"libra_{trace.name}_{key}", value, "ratio"))
            for group in ("all", "prefill" if "prefill" in trace.name else "decode"):
                found.setdefault(f"libra_{group}_{key}", []).append(value)
        yield rows
    yield [row for name, values in found.items() for row in _spread(name, values, "ratio")]
    yield [
        Row("libra_table_2_layer_ms", layer_ms(TABLE_2_MS), "ms"),
        Row("libra_table_2_layer_if_nothing_is_hidden_ms", sum(TABLE_2_MS.values()), "ms"),
    ]


def layer_ms(ms: Mapping[str, float]) -> float:
    """Return the milliseconds of a layer under Libra's two stages, by those of its parts.

    While the tokens that stay are computed, the counts are exchanged; then the tokens are gathered,
    and beside that the remote tokens are sharded. Planning for the next layer is hidden.

    Source: Libra, section 3.1 and Figure 4.
    """
    decided = max(ms["dispatch"], ms["shard"] + ms["return_plan"])
    first = max(ms["local"], ms["exchange_demand"] + decided)
    return ms["gate"] + ms["predict"] + first + ms["remote"] + ms["combine"]


def _libra_means(trace: Recorded) -> dict[str, float]:
    """Return the mean imbalance of each variant, and its MoE time over that without Libra."""
    steps, layers, _ = trace.load.shape
    placement = trace.in_order
    residents = [placement.held(layer) for layer in range(layers)]
    before: list[NDArray[np.int64]] = []
    after: dict[str, list[NDArray[np.int64]]] = {}
    for step in np.unique(np.linspace(1, steps - 1, STEPS).astype(int)).tolist():
        for layer, resident in enumerate(residents):
            asked = np.ascontiguousarray(trace.source[step, :, layer])
            before.append(shard_tokens(asked, resident).rank_load)
            for kind, told in (
                ("predicted", predicted_demand(trace, step, layer)),
                ("exact", asked.astype(np.float64)),
            ):
                for name, variant in LIBRA_VARIANTS.items():
                    for extra in EXTRA:
                        plan = plan_replicas(told, resident, extra, variant=variant)
                        done = shard_tokens(asked, plan.hosts, resident, variant=variant)
                        after.setdefault(f"N{extra}_{name}_{kind}", []).append(done.rank_load)
    first = np.array(before, np.float64)
    found = {"none_imbalance": _imbalance(first)}
    for key, loads in after.items():
        load = np.array(loads, np.float64)
        found[f"{key}_imbalance"] = _imbalance(load)
        found[f"{key}_time"] = float(load.max(axis=1).sum() / first.max(axis=1).sum())
    return found


def _imbalance(load: NDArray[np.float64]) -> float:
    """Return the mean over batches (n, R) of the load of the fullest rank over the mean load."""
    busy = load[load.sum(axis=1) > 0]
    return float((busy.max(axis=1) / busy.mean(axis=1)).mean())


def lplb_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """MoE time that LPLB saves over an even split, by the number of redundant slots.

    EPLB plans once, on the first half of the trace; the second half is scored.
    """
    found: dict[int, list[float]] = {}
    for trace in traces:
        half, experts = len(trace.load) // 2, trace.load.shape[2]
        later = trace.load[half:].astype(np.float64)
        rows = []
        for redundant in REDUNDANT:
            placement = eplb_placement(trace.load[:half], RANKS, (experts + redundant) // RANKS)
            even = rank_load(later, placement).max(axis=2).sum()
            optimal = rank_load(later, placement, SplitModel(DispatchModel.OPTIMAL)).max(axis=2)
            saved = 1.0 - float(optimal.sum() / even)
            rows.append(Row(f"lplb_{redundant}_redundant_{trace.name}_saved", saved, "1"))
            found.setdefault(redundant, []).append(saved)
        yield rows
    yield [
        row
        for redundant, values in found.items()
        for row in _spread(f"lplb_{redundant}_redundant_saved", values)
    ]


def waterfill_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """MoE time that Waterfill could save over shared experts computed at home, by placement.

    `ideal`: shared work is divided and sent at will, so that every rank below the waterline reaches
    it; `dispatch_tokens.waterfill_rule_rows` has what the rule saves. `own` has the shared work of
    the model, `one_to_8` an eighth of the routed work, as DeepSeek-V3 has it. EPLB plans once, on
    the first half of the trace.
    """
    found: dict[str, list[float]] = {}
    for trace in traces:
        half = len(trace.load) // 2
        later = trace.load[half:].astype(np.float64)
        source = trace.source[half:].sum(axis=3).transpose(0, 2, 1).astype(np.float64)
        placements = placements_of(trace.load[:half], trace.top_k)
        for label, share in (("own", trace.shared_cost / trace.top_k), ("one_to_8", 1 / 8)):
            for name, placement in placements.items():
                routed = rank_load(later, placement)
                home = (routed + share * source).max(axis=2).sum()
                level = routed.mean(axis=2) * (1.0 + share)
                poured = np.maximum(routed.max(axis=2), level).sum()
                found.setdefault(f"waterfill_{label}_{name}_ideal_saved", []).append(
                    1.0 - float(poured / home)
                )
    yield [row for name, values in found.items() for row in _spread(name, values)]


def metro_rows(traces: list[Recorded]) -> Iterator[list[Row]]:
    """MoE time and active experts that METRO's routing saves over EPLB's even split in decode.

    A replica takes as long as reading its weights or computing its tokens, whichever is longer.
    EPLB plans once on the first half, with an eighth or half as many redundant slots as experts;
    the second half is scored. `linear` is the placement in order, without replicas.
    """
    found: dict[str, list[float]] = {}
    for trace in (trace for trace in traces if "prefill" not in trace.name):
        rows = []
        for redundant in (8, 32):
            for key, value in _metro_savings(trace, redundant).items():
                name = f"{redundant}_redundant_{key}"
                rows.append(Row(f"metro_{trace.name}_{name}", value, "1"))
                found.setdefault(f"metro_{name}", []).append(value)
        yield rows
    yield [row for name, values in found.items() for row in _spread(name, values)]


def _metro_savings(trace: Recorded, redundant: int) -> dict[str, float]:
    """Return the shares that METRO and EPLB's even split save in one trace."""
    half, experts = len(trace.load) // 2, trace.load.shape[2]
    later = trace.load[half:]
    placement = eplb_placement(trace.load[:half], RANKS, (experts + redundant) // RANKS)
    fewest, routed = _fewest_load(later, placement), _even_batches(later, placement)
    found = {"active_on_worst_rank_saved": 1.0 - _most_active(fewest) / _most_active(routed)}
    mean = float(later.sum(axis=2).mean()) / experts
    for k in BOUND_BY_READING:
        cost = CostModel(replica=ReplicaWork(read_tokens=k * mean))
        even, metro = _slot_time(routed, cost), _slot_time(fewest, cost)
        linear = moe_time.predicted_time(later.astype(np.float64), trace.in_order, cost)
        found |= {
            f"k{k:g}_saved_over_eplb": 1.0 - metro / even,
            f"k{k:g}_saved_over_linear": 1.0 - metro / linear,
            f"k{k:g}_eplb_saved_over_linear": 1.0 - even / linear,
        }
    return found


def _even_batches(load: NDArray[np.int64], placement: Placement) -> NDArray[np.float64]:
    """Return (T, L, S) whole tokens of each slot if every choice draws a replica with equal odds.

    The draws are seeded.
    """
    rng = np.random.default_rng(0)
    out = np.zeros((*load.shape[:2], placement.num_slots))
    for layer, row in enumerate(placement.phy2log):
        for expert in range(load.shape[2]):
            slots = np.flatnonzero(row == expert)
            odds = np.full(len(slots), 1.0 / len(slots))
            out[:, layer, slots] = rng.multinomial(load[:, layer, expert], odds)
    return out


def _fewest_load(load: NDArray[np.int64], placement: Placement) -> NDArray[np.float64]:
    """Return (T, L, S) tokens of each slot under the fewest active experts."""
    rule = FewestReplicas(placement)
    out = np.zeros((*load.shape[:2], placement.num_slots))
    for batch, slots in zip(load, out, strict=True):
        chosen = rule.choose(torch.from_numpy(batch)).numpy()
        layer, expert = np.nonzero(chosen >= 0)
        slots[layer, chosen[layer, expert]] = batch[layer, expert]
    return out


def _by_rank(per_slot: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum (T, L, S) over the slots of each rank: (T, L, R)."""
    return np.asarray(per_slot.reshape(*per_slot.shape[:2], RANKS, -1).sum(axis=3), np.float64)


def _most_active(tokens: NDArray[np.float64]) -> float:
    """Return the sum over batches of the active replicas of the worst rank."""
    return float(_by_rank((tokens > 0).astype(np.float64)).max(axis=2).sum())


def _slot_time(tokens: NDArray[np.float64], cost: CostModel) -> float:
    """Return the time of all steps and layers, by the (T, L, S) tokens of each slot."""
    work = _by_rank(moe_time.replica_work(tokens, cost.replica))
    return float(moe_time.rank_times(work, cost).max(axis=2).sum())
