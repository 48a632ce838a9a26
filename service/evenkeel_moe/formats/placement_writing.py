"""Writes placement files of the formats that `placements` describes, and how replicas are drawn."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.formats.array_files import write_file
from evenkeel_moe.formats.placements import (
    NEUTRAL_FORMAT,
    NEUTRAL_VERSION,
    PlacementFile,
    PlacementFormat,
    refuse_duplicates,
)
from evenkeel_moe.formats.reading import naming
from evenkeel_moe.model.placement import EMPTY

MAX_HIDDEN_LAYERS = 10_000
"""Most rows of an sglang file; far more than any model has, and small enough for memory."""


def write_placement(
    path: Path | str,
    file: PlacementFile,
    format_: PlacementFormat,
    *,
    num_hidden_layers: int | None = None,
) -> None:
    """Write a placement file; see `render_placement`."""
    with naming(path):
        text = render_placement(file, format_, num_hidden_layers=num_hidden_layers)
    write_file(path, text)


def render_placement(
    file: PlacementFile, format_: PlacementFormat, *, num_hidden_layers: int | None = None
) -> str:
    """Return the text of a placement file; equal placements give equal text.

    Args:
        file: the placement.
        format_: the format.
        num_hidden_layers: number of rows of an sglang file; None: up to the last MoE layer. Rows of
            dense layers hold the experts in order; the engine does not use them.

    Raises:
        InfeasiblePlan: the format cannot hold the placement's empty slots or duplicates.
        InvalidInput: the placement has a layer beyond `num_hidden_layers`.
    """
    if not format_.holds_empty_slots:
        _refuse_empty(file, format_)
    if format_ is PlacementFormat.SGLANG:
        rows = sglang_rows(file, num_hidden_layers)
        return f'{{"physical_to_logical_map": [\n{_lines(rows)}\n]}}\n'
    return _RENDERERS[format_](file)


def _render_neutral(file: PlacementFile) -> str:
    placement = file.placement
    content = {
        "format": NEUTRAL_FORMAT,
        "version": NEUTRAL_VERSION,
        "num_ranks": placement.num_ranks,
        "num_logical_experts": placement.num_logical_experts,
        "layer_ids": list(file.layer_ids),
        "info": dict(file.info),
    }
    head = json.dumps(content, allow_nan=False)
    return f'{head[:-1]}, "physical_to_logical": [\n{_lines(placement.phy2log)}\n]}}\n'


def sglang_rows(file: PlacementFile, num_hidden_layers: int | None) -> NDArray[np.int32]:
    """Return the (hidden layers, S) rows of an sglang file; see `render_placement`."""
    placement = file.placement
    hidden = max(file.layer_ids) + 1 if num_hidden_layers is None else num_hidden_layers
    if hidden <= max(file.layer_ids):
        raise InvalidInput(f"{hidden} hidden layers, the placement has layer {max(file.layer_ids)}")
    if hidden > MAX_HIDDEN_LAYERS:
        raise InvalidInput(f"{hidden} hidden layers, at most {MAX_HIDDEN_LAYERS} are written")
    in_order = np.arange(placement.num_slots, dtype=np.int32) % placement.num_logical_experts
    rows = np.tile(in_order, (hidden, 1))
    rows[list(file.layer_ids)] = placement.phy2log
    return rows


def _render_trtllm(file: PlacementFile) -> str:
    lines = [
        f"num_slots: {file.placement.num_slots}",
        "layer_updates_per_iter: 0",
        "initial_global_assignments:",
    ]
    for layer, row in zip(file.layer_ids, file.placement.phy2log, strict=True):
        lines.append(f"  {layer}: {json.dumps(row.tolist())}")
    return "\n".join(lines) + "\n"


def _render_ascend(file: PlacementFile) -> str:
    placement = file.placement
    refuse_duplicates(placement)
    by_rank = placement.phy2log.reshape(placement.num_layers, placement.num_ranks, -1)
    layers = [
        {
            "layer_id": layer,
            "device_count": placement.num_ranks,
            "device_list": [
                {"device_id": rank, "device_expert": experts.tolist()}
                for rank, experts in enumerate(table)
            ],
        }
        for layer, table in enumerate(by_rank)
    ]
    return json.dumps({"moe_layer_count": placement.num_layers, "layer_list": layers}) + "\n"


def _render_vllm(file: PlacementFile) -> str:
    return f"[\n{_lines(file.placement.phy2log)}\n]\n"


def _render_vllm_mapping(file: PlacementFile) -> str:
    placement = file.placement
    record = {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": placement.num_slots - placement.num_logical_experts,
        "num_slots": placement.num_slots,
        "initial_global_assignments": {
            str(layer): row for layer, row in enumerate(placement.phy2log.tolist())
        },
    }
    return json.dumps(record) + "\n"


def _render_vllm_ranks(file: PlacementFile) -> str:
    placement = file.placement
    replicas = placement.num_slots - placement.num_logical_experts
    if replicas:
        raise InfeasiblePlan(
            f"vllm-ranks files hold no replicas: {placement.num_slots} slots for"
            f" {placement.num_logical_experts} experts are {replicas} too many",
            Reason.UNSUPPORTED,
        )
    per_rank = placement.num_slots // placement.num_ranks
    ranks = np.argsort(placement.phy2log, axis=1, kind="stable") // per_rank
    other = (ranks != ranks[0]).any(axis=1)
    if other.any():
        raise InfeasiblePlan(
            f"vllm-ranks files hold one placement for all layers: {int(other.sum())} of"
            f" {len(other)} layers differ from layer {file.layer_ids[0]}, first: layer"
            f" {file.layer_ids[int(other.argmax())]}",
            Reason.UNSUPPORTED,
        )
    return json.dumps({"expert_to_ep_rank": ranks[0].tolist()}) + "\n"


def _lines(phy2log: NDArray[np.int32]) -> str:
    """Return one line for each layer, so that diff can compare two files."""
    return ",\n".join(json.dumps(row) for row in phy2log.tolist())


def _refuse_empty(file: PlacementFile, format_: PlacementFormat) -> None:
    empty = (file.placement.phy2log == EMPTY).sum(axis=1)
    if empty.any():
        row = int(empty.argmax())
        raise InfeasiblePlan(
            f"{format_} files cannot hold empty slots: {int(empty.sum())} in"
            f" {int((empty > 0).sum())} layers, most in layer {file.layer_ids[row]}"
            f" ({int(empty[row])} of {file.placement.num_slots})",
            Reason.UNSUPPORTED,
        )


_RENDERERS: dict[PlacementFormat, Callable[[PlacementFile], str]] = {
    PlacementFormat.NEUTRAL: _render_neutral,
    PlacementFormat.TRTLLM: _render_trtllm,
    PlacementFormat.ASCEND: _render_ascend,
    PlacementFormat.VLLM: _render_vllm,
    PlacementFormat.VLLM_MAPPING: _render_vllm_mapping,
    PlacementFormat.VLLM_RANKS: _render_vllm_ranks,
}


def write_replica_probabilities(
    path: Path,
    file: PlacementFile,
    mass: NDArray[np.float64],
    *,
    num_hidden_layers: int | None = None,
) -> None:
    """Write the probabilities by which a build of SGLang draws the replica of an expert.

    A *.pt file holds `physical_to_logical_map` and `physical_mass`, both (hidden layers, S): the
    share of a layer's tokens that each slot should get. The map must be that of
    `--init-expert-location`. Dense layers, which the engine does not read, get an even split.

    Source: HYGON-AI/sglang-das, pull request 386, benchmark/eplb/prepare_static_lp.py.

    Args:
        path: of the file.
        file: the placement.
        mass: (L, S) share of a layer's tokens, >= 0, 1 in sum over a layer.
        num_hidden_layers: as in `render_placement`.

    Raises:
        InvalidInput: torch is missing, or the file cannot be written.
    """
    try:
        import torch
    except ImportError as error:
        raise InvalidInput(
            "writing *.pt files needs torch: run `pip install 'evenkeel-moe[rank]'`"
        ) from error
    rows, experts = sglang_rows(file, num_hidden_layers), file.placement.num_logical_experts
    shares = np.empty(rows.shape)
    for layer, row in enumerate(rows):
        copies = np.bincount(row, minlength=experts)
        shares[layer] = 1.0 / (experts * copies[row])
    shares[list(file.layer_ids)] = mass
    try:
        torch.save(
            {
                "physical_to_logical_map": torch.from_numpy(rows.astype(np.int64)),
                "physical_mass": torch.from_numpy(shares).float(),
            },
            path,
        )
    except (OSError, RuntimeError) as error:
        raise InvalidInput(f"{path}: cannot be written: {error!s:.200}") from error
