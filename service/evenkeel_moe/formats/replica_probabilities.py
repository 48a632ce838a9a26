"""Writes the probabilities by which a build of SGLang draws the replica of an expert.

A *.pt file holds `physical_to_logical_map` and `physical_mass`, both (hidden layers, S): the share
of a layer's tokens that each slot should get. The map must be that of `--init-expert-location`.

Source: HYGON-AI/sglang-das, pull request 386, benchmark/eplb/prepare_static_lp.py.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.placement_file import PlacementFile
from evenkeel_moe.formats.placement_writing import sglang_rows


def write_replica_probabilities(
    path: Path,
    file: PlacementFile,
    mass: NDArray[np.float64],
    *,
    num_hidden_layers: int | None = None,
) -> None:
    """Write the file; dense layers, which the engine does not read, get an even split.

    Args:
        path: of the file.
        file: the placement.
        mass: (L, S) share of a layer's tokens, >= 0, 1 in sum over a layer.
        num_hidden_layers: as in `render_placement`.

    Raises:
        ShapeMismatch: the shares are not (L, S).
        InvalidInput: shares are out of range, torch is missing, or the file cannot be written.
    """
    placement = file.placement
    if mass.shape != placement.phy2log.shape:
        raise ShapeMismatch(f"the shares are {mass.shape}, the map {placement.phy2log.shape}")
    sums = mass.sum(axis=1)
    if not (np.isfinite(mass) & (mass >= 0)).all() or np.abs(sums - 1.0).max() > 1e-6:
        raise InvalidInput(f"shares must be >= 0 and sum to 1, sums are {sums.min()}..{sums.max()}")
    try:
        import torch
    except ImportError as error:
        raise InvalidInput(
            "writing *.pt files needs torch: run `pip install 'evenkeel-moe[rank]'`"
        ) from error
    rows = sglang_rows(file, num_hidden_layers)
    shares = np.empty(rows.shape)
    for layer, row in enumerate(rows):
        copies = np.bincount(row, minlength=placement.num_logical_experts)
        shares[layer] = 1.0 / (placement.num_logical_experts * copies[row])
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
