"""What survives a restart: the last placement each rank committed, and how the group picks one."""

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

__all__ = ["SavedPlacement", "agree_on_placement", "load_placement", "save_placement"]


@dataclass(frozen=True, eq=False, slots=True)
class SavedPlacement:
    """A committed placement."""

    placement: Placement
    epoch: int
    generation: str
    """Of the group that committed it."""


def save_placement(path: Path, saved: SavedPlacement) -> None:
    """Replace the file in one step: a crash leaves the old one or the new one."""
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
    """The saved placement; None when there is none, it is damaged, or is of another shape."""
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
    ):
        return None
    except (
        RuntimeError
    ):  # a bit of the directory says: encrypted, or packed in a way zipfile does not know
        return None
    return SavedPlacement(placement, epoch, generation)


def agree_on_placement(
    saved: SavedPlacement | None, initial: Placement, communicator: Communicator
) -> tuple[Placement, int, bool]:
    """The newest placement any rank has saved, the same on every rank.

    A wave is committed once its gate passed, and the gate passes on all ranks or none; so one rank
    that saved an epoch proves it, also for ranks that died before they could save it.

    Returns:
        (placement, epoch, warm); `initial` at epoch 0, not warm, when no rank has saved any.
    """
    epoch = saved.epoch if saved is not None else 0
    epochs = (
        communicator.all_gather(torch.tensor([epoch], device=communicator.device))
        .reshape(-1)
        .tolist()
    )
    newest = max(epochs)
    if newest == 0:
        return initial, 0, False
    source = epochs.index(newest)
    rows = saved.placement.phy2log if saved is not None and epoch == newest else initial.phy2log
    table = torch.from_numpy(rows.astype(np.int64)).to(communicator.device)
    communicator.broadcast(table, source)
    placement = Placement(table.cpu().numpy(), initial.num_ranks, initial.num_logical_experts)
    return placement, newest, True
