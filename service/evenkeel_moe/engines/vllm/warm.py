"""Warm start: moves vLLM's experts to the placement of a file before vLLM serves.

vLLM cannot start from a file, so the plugin runs vLLM's own copies and commit once.
"""

from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.plan_agreement import ROW, Gather, find_disagreement, map_digest
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.vllm.state import VllmModelState, read_map
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.formats import read_placement

_log = structlog.get_logger(__name__)


def start_from_file(
    settings: GuestSettings,
    model_state: VllmModelState,
    num_ranks: int,
    engine: Any,
    ep_group: Any,
    gather: Gather,
) -> None:
    """Move the experts to the placement of a file; collective, while vLLM loads the model.

    Args:
        settings: name a neutral file, with the same contents on every rank.
        model_state: of the target model.
        num_ranks: R.
        engine: vLLM's `eplb_state` module.
        ep_group: device group of the EP ranks.
        gather: see `plan_agreement.Gather`.

    Raises:
        Unsupported: the file cannot be used, and nobody else would place the experts.
    """
    path, current = settings.placement, read_map(model_state)
    target = _read(path, model_state, num_ranks, current) if settings.places else None
    row = np.zeros(len(ROW), np.int64)
    row[ROW.index("ordered")] = int(target is not None)
    row[ROW.index("target")] = 0 if target is None else map_digest(target)
    row[ROW.index("base")] = map_digest(current)
    problem = find_disagreement(gather(row))
    if problem or target is None:
        detail = problem or "no rank has a usable file"
        if not settings.places:
            detail = "it needs mode place, in which new weights are led to the slots of the file"
        _log.warning("warm_start_left_out", path=path, detail=detail)
        if settings.record and settings.places:
            raise Unsupported(f"the placement file {path} is left out, and nobody plans: {detail}")
        return
    moved = move_experts(model_state, target, engine, ep_group)
    _log.info("warm_start", path=path, slots_changed=moved, slots=current.size)


def move_experts(
    model_state: VllmModelState, target: NDArray[np.int64], engine: Any, ep_group: Any
) -> int:
    """Move the experts to a map with vLLM's own copies and commit; collective, between two steps.

    Args:
        model_state: of the target model; nothing of it may be in flight.
        target: (L, S) the map to go to.
        engine: vLLM's `eplb_state` module.
        ep_group: device group of the EP ranks.

    Returns:
        The number of slots that changed their expert.
    """
    current = read_map(model_state)
    moved = int((target != current).sum())
    if not moved:
        return 0
    new = torch.from_numpy(np.ascontiguousarray(target))
    state: Any = model_state
    # The asynchronous worker sets a stream of its own before each of its rearrangements.
    state.communicator.set_stream(None)
    engine.rearrange_expert_weights_inplace(
        state.physical_to_logical_map,
        new,
        state.model.expert_weights,
        state.expert_buffer,
        ep_group,
        state.communicator,
    )
    engine._commit_eplb_maps(state, new_physical_to_logical_map=new)
    return moved


def _read(
    path: str, model_state: VllmModelState, num_ranks: int, current: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return the (L, S) int64 map of the file; None, with a log line, if it does not fit."""
    experts = int(model_state.model.num_logical_experts)
    try:
        file = read_placement(Path(path), num_ranks=num_ranks, num_logical_experts=experts)
    except (EvenkeelError, OSError) as error:
        _log.error("placement_file_unusable", path=path, detail=str(error)[:300])
        return None
    phy2log = file.placement.phy2log
    if phy2log.shape != current.shape:
        _log.error("placement_file_unusable", path=path, have=phy2log.shape, want=current.shape)
        return None
    return phy2log.astype(np.int64)
