"""The last committed placement of a rank, saved for a restart."""

import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenkeel_moe.engines.reference.config import RankConfig
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


def first_placement(config: RankConfig) -> Placement:
    """Return the placement of a group without a saved one."""
    # What replicas do not take at the start is the KV cache of requests.
    begin = Placement.linear if config.requests_per_s else Placement.initial
    return begin(config.shape)


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
