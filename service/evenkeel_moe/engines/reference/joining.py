"""Lets the processes of a group find each other, and agree on step and placement to begin with."""

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.state import SavedPlacement
from evenkeel_moe.model.placement import Placement

_distributed: Any = torch.distributed
_BEGINNING = "evenkeel/beginning"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Rank 0, which was in the group before if there was one, tells this to the other ranks."""

    generation: str
    first_step: int
    came_from: str
    """Generation of the group before, which had another size; empty if this one starts anew."""


def join(config: RankConfig, first_step: int, came_from: str) -> tuple[Any, Beginning]:
    """Wait for rank 0 of the group.

    Args:
        config: of this rank.
        first_step: what rank 0 tells the others, who know it from rank 0 alone.
        came_from: the same.

    Returns:
        (the store of the group, its beginning).
    """
    store, _, _ = next(
        _distributed.rendezvous(config.rendezvous, rank=config.rank, world_size=config.num_ranks)
    )
    if config.rank == 0:
        told = Beginning(str(uuid.uuid4()), first_step, came_from)
        store.set(_BEGINNING, json.dumps(asdict(told)))
    return store, Beginning(**json.loads(store.get(_BEGINNING)))


class Upcoming:
    """Sees in the configuration of the run that a group of another size is to follow.

    The supervisor replaces the file atomically. While nothing has changed, a look is one `stat`.

    Args:
        config: of a rank of the group that serves.
    """

    def __init__(self, config: RankConfig) -> None:
        self._path, self._group = config.file, config.group
        self._seen = _signature(self._path)
        self.config: RankConfig | None = None
        """The last look found this configuration of the next group; None if none is to follow."""

    def look(self) -> RankConfig | None:
        """Return the configuration of the next group; None if none is to follow."""
        now = _signature(self._path)
        if now != self._seen:
            self._seen = now
            found = RankConfig.from_json(self._path.read_text(encoding="utf-8"))
            self.config = found if found.former and found.group > self._group else None
        return self.config

    def refuse(self) -> None:
        """Act as if no group were to follow, until the file changes."""
        self.config = None


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


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
