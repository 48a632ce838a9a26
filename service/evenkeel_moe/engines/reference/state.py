"""The last committed placement of a rank, saved for a restart, and the group's choice."""

import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape


@dataclass(frozen=True, eq=False, slots=True)
class SavedPlacement:
    """A committed placement."""

    placement: Placement
    epoch: int
    generation: str
    """Generation of the group that committed it."""


def save_placement(path: Path, saved: SavedPlacement) -> None:
    """Replace the file atomically: a crash leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        np.savez(
            file,
            phy2log=saved.placement.phy2log,
            epoch=np.int64(saved.epoch),
            generation=np.frombuffer(saved.generation.encode(), np.uint8),
        )
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_placement(path: Path, shape: ModelShape) -> SavedPlacement | None:
    """Return the saved placement; None if it is missing, damaged, or has another shape."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            placement = Placement(archive["phy2log"], shape.num_ranks, shape.num_logical_experts)
            epoch, generation = int(archive["epoch"]), archive["generation"].tobytes().decode()
        placement.check(shape, allow_duplicates=True)
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
        EvenkeelError,
        RuntimeError,  # a damaged directory may claim encryption or an unknown compression
    ):
        return None
    return SavedPlacement(placement, epoch, generation)


def agree_on_placement(
    saved: SavedPlacement | None, initial: Placement, communicator: Communicator
) -> tuple[Placement, int, bool]:
    """Return the newest placement that any rank saved, the same on every rank; collective.

    A wave is committed once its gate passed, and the gate passes on all ranks or on none. So an
    epoch that one rank saved was committed by all, also by ranks that died before they could save
    it.

    Returns:
        (placement, epoch, warm); (`initial`, 0, False) if no rank saved one.
    """
    epoch = saved.epoch if saved is not None else 0
    mine = torch.tensor([epoch], device=communicator.device)
    epochs = communicator.all_gather(mine).reshape(-1).tolist()
    newest = max(epochs)
    if newest == 0:
        return initial, 0, False
    source = epochs.index(newest)
    rows = saved.placement.phy2log if saved is not None and epoch == newest else initial.phy2log
    table = torch.from_numpy(rows.astype(np.int64)).to(communicator.device)
    communicator.broadcast(table, source)
    placement = Placement(table.cpu().numpy(), initial.num_ranks, initial.num_logical_experts)
    return placement, newest, True
