"""Token-level parts of the bench: Waterfill on recorded choices, and accuracy of predictions."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.dispatch_baselines import PathTable
from bench.dispatch_traces import RANKS, SLOTS_PER_RANK, Recorded
from bench.report import Row
from evenkeel_moe.dispatch import (
    DispatchTables,
    EvenChoice,
    Waterfill,
)
from evenkeel_moe.dispatch.waterfill import count_by_rank
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.model import Model, original_expert
from evenkeel_moe.engines.reference.traffic import TextTraffic
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.eplb import rebalance_experts

__all__ = ["accuracy_rows", "recorded_ids", "waterfill_rows"]

TOKENS_PER_RANK = 256
BATCHES = 12


def recorded_ids(folder: Path) -> dict[str, NDArray[np.int64]]:
    """Return the (tokens, L, k) experts of every trace that recorded them."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            if "ids" in archive.files:
                found[path.stem] = archive["ids"].astype(np.int64)
    return found


def waterfill_rows(ids: dict[str, NDArray[np.int64]]) -> list[Row]:
    """Run Waterfill on real tokens, with an even choice of replicas.

    EPLB places the first half of each trace; the batches come from the second half.
    """
    rows = []
    print(
        f"\nshared expert, {RANKS} ranks x {TOKENS_PER_RANK} tokens:"
        " time over fluid, share of tokens sent away"
    )
    for name, tokens in ids.items():
        half = len(tokens) // 2
        layers, experts = tokens.shape[1], int(tokens.max()) + 1
        seen = np.stack(
            [
                np.bincount(tokens[:half, layer].ravel(), minlength=experts)
                for layer in range(layers)
            ]
        )
        rows_of = rebalance_experts(
            seen, RANKS * SLOTS_PER_RANK, 1, 1, RANKS, allow_duplicates=False
        )
        placement = Placement(rows_of, RANKS, experts)
        tables = [
            DispatchTables.of(placement, Topology.single_node(RANKS), rank) for rank in range(RANKS)
        ]
        rules = [EvenChoice(table) for table in tables]
        size = RANKS * TOKENS_PER_RANK
        batches = [
            tokens[start : start + size] for start in range(half, len(tokens) - size + 1, size)
        ][:BATCHES]
        for mode in ("home", "visited static", "visited", "all ranks"):
            peak = fluid = moved = fresh = total = 0.0
            for batch, layer in (
                (b, layer) for b in batches for layer in range(0, layers, max(1, layers // 6))
            ):
                slots = [
                    rules[rank].choose(layer, torch.from_numpy(part[:, layer].copy()))
                    for rank, part in enumerate(batch.reshape(RANKS, TOKENS_PER_RANK, layers, -1))
                ]
                landed = torch.stack([count_by_rank(s, RANKS, SLOTS_PER_RANK) for s in slots])
                load = landed.sum(dim=0)
                for rank, own in enumerate(slots):
                    chosen = _shared(mode, rank, own, landed, size, layer)
                    load = load + torch.bincount(chosen, minlength=RANKS)
                    away = chosen != rank
                    moved += int(away.sum())
                    fresh += int(
                        (away & ~(own // SLOTS_PER_RANK == chosen[:, None]).any(dim=1)).sum()
                    )
                    total += len(own)
                peak += float(load.max())
                fluid += float(load.double().mean())
            print(
                f"{name:24}{mode:16} time {peak / fluid:6.3f}   away {moved / total:6.1%}"
                f"   new journeys {fresh / total:6.1%}"
            )
            rows.append(
                Row(
                    f"waterfill_{name}_{mode.replace(' ', '_')}_time_over_fluid",
                    peak / fluid,
                    "ratio",
                )
            )
    return rows


def _shared(
    mode: str, rank: int, slots: torch.Tensor, landed: torch.Tensor, size: int, layer: int
) -> torch.Tensor:
    if mode == "home":
        return torch.full((len(slots),), rank)
    rule = Waterfill(RANKS, SLOTS_PER_RANK, rank, all_ranks=mode == "all ranks")
    if mode == "visited static":
        score, number = rule.static_score(slots)
        return rule.choose(slots, score, number, salt=layer)
    return rule.choose(slots, rule.dynamic_score(landed), size, salt=layer)


def accuracy_rows(traces: list[Recorded], ids: dict[str, NDArray[np.int64]]) -> list[Row]:
    """Return the share of chosen experts that lookahead and Lina's table predicted.

    Lookahead is measured as recorded and on the reference engine.
    """
    rows = []
    print("\nprediction accuracy (share of chosen experts predicted)")
    recalls = [trace.recall for trace in traces if trace.recall is not None]
    if recalls:
        mean = np.mean(recalls, axis=0)
        print(
            f"lookahead, model A, layers 1..: {np.array2string(mean, precision=3)}"
            f" mean {mean.mean():.3f}"
        )
        rows.append(Row("lookahead_accuracy_model_a", float(mean.mean()), "1"))
    reference = _reference_accuracy()
    print(f"lookahead, reference engine, layers 1..: {np.array2string(reference, precision=3)}")
    rows.append(Row("lookahead_accuracy_reference_engine", float(reference.mean()), "1"))
    for name, tokens in ids.items():
        # Both sides must not share a passage, and passages are long: the split is by position.
        half, limit = len(tokens) // 2, 12_000
        table = PathTable().build(tokens[:half])
        accuracy = float(table.accuracy(tokens[half : half + limit]).mean())
        chance = tokens.shape[2] / (int(tokens.max()) + 1)
        print(f"Lina's path table, {name}: {accuracy:.3f} (by chance {chance:.3f})")
        rows.append(Row(f"lina_accuracy_{name}", accuracy, "1"))
    return rows


def _reference_accuracy() -> NDArray[np.float64]:
    """Return (L - 1,) accuracy on the reference engine's layers: text through its own gates."""
    config = RankConfig(run_folder="")
    model = Model.build(
        seed=config.seed,
        layers=config.layers,
        experts=config.experts,
        top_k=config.top_k,
        d_model=config.d_model,
        d_ffn=config.d_ffn,
        device=torch.device("cpu"),
    )
    traffic = TextTraffic(model, config.num_ranks, config.tokens_per_step, 0)
    experts = [
        [
            original_expert(model.seed, layer, e, model.d_model, model.d_ffn)
            for e in range(model.num_experts)
        ]
        for layer in range(model.num_layers)
    ]
    found = []
    for step in range(8):
        x = model.embed(traffic.tokens(step, 0))
        ahead, row = None, []
        for layer in range(model.num_layers):
            chosen = model.route(layer, x)
            if ahead is not None:
                row.append(float((chosen[:, :, None] == ahead[:, None]).any(dim=2).double().mean()))
            if layer + 1 < model.num_layers:
                ahead = model.route(layer + 1, x)
            x = model.next_layer(layer, x, model.undistributed(layer, x, chosen, experts[layer]))
        found.append(row)
    return np.mean(found, axis=0)
