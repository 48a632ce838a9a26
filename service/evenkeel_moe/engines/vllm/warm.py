"""Warm start: vLLM has no file for it, so its own copies and its own commit run once, before it serves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.engines.guest.plan_agreement import ROW, digest_of, judge
from evenkeel_moe.engines.vllm.state import VllmModelState, read_map
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.formats import PlacementFile, read_placement

__all__ = ["start_from_file"]

_log = structlog.get_logger(__name__)


def start_from_file(
    path: str,
    model_state: VllmModelState,
    num_ranks: int,
    engine: Any,
    ep_group: Any,
    gather: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> None:
    """Move the experts to where a placement file has them; collective, while the model is being loaded.

    Args:
        path: neutral file; the same contents on every rank.
        model_state: of the target model.
        num_ranks: R.
        engine: vLLM's `eplb_state` module.
        ep_group: device group of the EP ranks.
        gather: see `Orders.answer`.
    """
    current = read_map(model_state)
    target = _read(path, model_state, num_ranks, current)
    row = np.zeros(len(ROW), np.int64)
    row[ROW.index("ordered")] = int(target is not None)
    row[ROW.index("target")] = 0 if target is None else digest_of(target)
    row[ROW.index("base")] = digest_of(current)
    verdict = judge(gather(row))
    if verdict or target is None:
        _log.warning(
            "warm_start_left_out", path=path, detail=verdict or "no rank has a usable file"
        )
        return
    new = torch.from_numpy(target)
    state: Any = model_state
    engine.rearrange_expert_weights_inplace(
        state.physical_to_logical_map,
        new,
        state.model.expert_weights,
        state.expert_buffer,
        ep_group,
        state.communicator,
    )
    engine._commit_eplb_maps(state, new_physical_to_logical_map=new)
    moved = int((target != current).sum())
    _log.info("warm_start", path=path, slots_changed=moved, slots=current.size)


def _read(
    path: str, model_state: VllmModelState, num_ranks: int, current: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """(L, S) int64 of the file; None, and a word, where it does not fit."""
    experts = int(model_state.model.num_logical_experts)
    try:
        file: PlacementFile = read_placement(
            Path(path), num_ranks=num_ranks, num_logical_experts=experts
        )
    except (EvenkeelError, OSError) as error:
        _log.error("placement_file_unusable", path=path, detail=str(error)[:300])
        return None
    if file.placement.phy2log.shape != current.shape:
        _log.error(
            "placement_file_unusable",
            path=path,
            have=file.placement.phy2log.shape,
            want=current.shape,
        )
        return None
    return file.placement.phy2log.astype(np.int64)
