"""Token-level parts of the bench: Waterfill on recorded choices, and accuracy of predictions."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bench.dispatch_baselines import PathTable
from bench.dispatch_traces import RANKS, Recorded, placements_of, shared_cost
from bench.report import Row
from evenkeel_moe.dispatch import (
    DispatchTables,
    EvenChoice,
    Waterfill,
)
from evenkeel_moe.dispatch.waterfill import count_by_rank, count_tokens
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.traffic import TextTraffic
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology

TOKENS_PER_RANK = 256
BATCHES = 12
_RULE_FORMS = {
    "rule_static": "visited static",
    "rule": "visited",
    "rule_all_ranks": "all ranks",
}


def recorded_ids(folder: Path) -> dict[str, NDArray[np.int64]]:
    """Return the (tokens, L, k) experts of every trace that recorded them."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            if "ids" in archive.files:
                found[path.stem] = archive["ids"].astype(np.int64)
    return found


def waterfill_rule_rows(ids: dict[str, NDArray[np.int64]]) -> Iterator[list[Row]]:
    """MoE time that Waterfill saves on real tokens over shared experts computed at home.

    `rule_static` draws by the load of the own rank's tokens, `rule` by that of all ranks, and
    `rule_all_ranks` may also draw ranks that a token does not visit. `ideal` fills every rank of
    the same batches up to the waterline, which no rule that decides by token can promise. Shares
    of shared work and placements are those of `seeds_dispatch.waterfill_rows`.
    """
    for name, tokens in ids.items():
        rows = []
        top_k = tokens.shape[2]
        placements = placements_of(_half_load(tokens), top_k)
        batches_of = {key: _dispatched(tokens, placed) for key, placed in placements.items()}
        for label, shared in (
            ("own", Fraction(shared_cost(name))),
            ("one_to_8", Fraction(top_k, 8)),
        ):
            for placement, batches in batches_of.items():
                time = {
                    form: sum(_rule_peak(mode, batch, shared) for batch in batches)
                    for form, mode in _RULE_FORMS.items()
                }
                time["ideal"] = sum(_ideal_peak(batch, shared) for batch in batches)
                home = sum(_rule_peak("home", batch, shared) for batch in batches)
                rows += [
                    Row(f"waterfill_{label}_{placement}_{name}_{form}_saved", 1 - peak / home, "1")
                    for form, peak in time.items()
                ]
        yield rows


def _rule_peak(mode: str, batch: "_Batch", shared: Fraction) -> float:
    """Return the load of the fullest rank, in routed choices; a shared expert costs `shared`."""
    load = batch.landed.sum(dim=0).double()
    for rank in range(RANKS):
        chosen = _shared(mode, rank, batch, shared)
        load = load + float(shared) * torch.bincount(chosen, minlength=RANKS)
    return float(load.max())


def _ideal_peak(batch: "_Batch", shared: Fraction) -> float:
    """Return the load of the fullest rank if shared work could be divided and sent at will."""
    routed = batch.landed.sum(dim=0).double()
    tokens = sum(len(own) for own in batch.slots)
    return max(float(routed.max()), float(routed.mean()) + float(shared) * tokens / RANKS)


class _Batch(NamedTuple):
    """One batch in one layer after an even choice of replicas."""

    layer: int
    slots: list[torch.Tensor]
    """(n, k) int64 slots of each rank's tokens."""
    landed: torch.Tensor
    """(R, R) int64 [tokens] from each rank to each rank."""
    slots_per_rank: int


def _half_load(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (1, L, E) tokens of each expert in the first half."""
    experts, layers = int(tokens.max()) + 1, tokens[: len(tokens) // 2].swapaxes(0, 1)
    return np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in layers])[None]


def _dispatched(tokens: NDArray[np.int64], placement: Placement) -> list[_Batch]:
    """Return batches of the second half of the tokens, in up to 6 layers or so."""
    layers, half, size = tokens.shape[1], len(tokens) // 2, RANKS * TOKENS_PER_RANK
    topology = Topology.single_node(RANKS)
    rules = [EvenChoice(DispatchTables.of(placement, topology, rank)) for rank in range(RANKS)]
    found = []
    for start in range(half, len(tokens) - size + 1, size)[:BATCHES]:
        parts = tokens[start : start + size].reshape(RANKS, TOKENS_PER_RANK, layers, -1)
        for layer in range(0, layers, max(1, layers // 6)):
            slots = [
                rule.choose(layer, torch.from_numpy(part[:, layer].copy()))
                for rule, part in zip(rules, parts, strict=True)
            ]
            per_rank = placement.slots_per_rank
            landed = torch.stack([count_by_rank(own, RANKS, per_rank) for own in slots])
            found.append(_Batch(layer, slots, landed, per_rank))
    return found


def _shared(mode: str, rank: int, batch: _Batch, shared: Fraction) -> torch.Tensor:
    """Return the (n,) rank of the shared expert of each token of a rank."""
    slots = batch.slots[rank]
    if mode == "home":
        return torch.full((len(slots),), rank)
    rule = Waterfill(
        RANKS,
        batch.slots_per_rank,
        rank,
        all_ranks=mode == "all ranks",
        # In units of which a routed choice and a shared expert are whole numbers.
        shared_cost=shared.numerator,
    )
    if mode == "visited static":
        score, number = rule.static_score(slots)
    else:
        score = rule.dynamic_score(batch.landed)
        number = torch.stack([count_tokens(own) for own in batch.slots]).sum()
    return rule.choose(slots, score * shared.denominator, number, salt=batch.layer)


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
    model = Model.build(**config.model_sizes, device=torch.device("cpu"))
    traffic = TextTraffic(config.num_ranks, config.tokens_per_step, 0)
    found = []
    for step in range(8):
        ahead, row = None, []
        for layer, plain in enumerate(model.undistributed(model.embed(traffic.tokens(step, 0)))):
            if ahead is not None:
                right = (plain.chosen[:, :, None] == ahead[:, None]).any(dim=2)
                row.append(float(right.double().mean()))
            if layer + 1 < model.num_layers:
                ahead = model.route(layer + 1, plain.before)
        found.append(row)
    return np.mean(found, axis=0)
