"""Routes for analysis: heat maps of load, quarantine, audit, log level, the caller's token."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray

from evenkeel_moe.api.context import About, Asked, Paging
from evenkeel_moe.api.large_bodies import LargeBodyRoute
from evenkeel_moe.api.schema_base import shown
from evenkeel_moe.api.schemas import (
    AuditPage,
    AuditRowOut,
    Cells,
    HeatMapOut,
    LogLevelBody,
    QuarantineOut,
    TokenOut,
)
from evenkeel_moe.api.words.health import is_stale
from evenkeel_moe.api.words.requests import request_text
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics

router = APIRouter(tags=["insight"], route_class=LargeBodyRoute)

MOST_CELLS = 65_536
"""Largest number of cells of both matrices together: 61 layers of 256 experts on 320 ranks fit."""
_AUDIT_SHOWN = 1024
"""Number of newest rows that the pages cover."""


@router.get("/deployments/{deployment}/heatmap")
async def get_heatmap(
    about: About,
    phase: Annotated[
        Phase | None, Query(description="Default: the windows of all phases together.")
    ] = None,
    first_layer: Annotated[int, Query(ge=0, le=2**31, description="Layer of the first row.")] = 0,
) -> HeatMapOut:
    """Return the load as a multiple of each layer's mean: layers x experts, and layers x ranks."""
    async with about.turns:
        view = await about.view()
        windows = [view.window(one) for one in ([phase] if phase is not None else Phase)]
        # Summing a large window takes most of a second: not on the event loop, which serves ranks.
        rows = await asyncio.to_thread(_heat_map_of, windows, view.placement(), first_layer)
    status = view.status()
    connected = sum(rank.fresh for rank in status.ranks)
    return shown(
        HeatMapOut,
        status,
        phase=phase,
        ranks_connected=connected,
        is_past=not connected or is_stale(status, about.bounds),
        first_layer=first_layer,
        **rows,
    )


def _heat_map_of(
    windows: list[LoadWindow | None], placement: Placement | None, first_layer: int
) -> dict[str, Any]:
    """Return `heat_map` of the windows that are known, and empty the list.

    The thread would hold its arguments a little longer than the request's turn lasts.
    """
    known = [window for window in windows if window is not None]
    windows.clear()
    return heat_map(known, placement, first_layer)


def heat_map(
    windows: Sequence[LoadWindow],
    placement: Placement | None,
    first_layer: int,
    most_cells: int = MOST_CELLS,
) -> dict[str, Any]:
    """Return fields of a `HeatMapOut` for the windows of one or all phases; None is unknown.

    Args:
        windows: each with (T, L, E) counts; windows without steps are ignored.
        placement: the committed placement; None leaves `ranks` unknown.
        first_layer: layer of the first row; after the last layer there are no rows.
        most_cells: bound of both matrices together: as many whole layers as fit, at least one.
    """
    known = [window for window in windows if len(window)]
    steps = sum(len(window) for window in known)
    num_layers = known[0].counts.shape[1] if known else None
    found: dict[str, Any] = {
        "steps": steps,
        "newest_step": max((int(window.steps[-1]) for window in known), default=None),
        "num_layers": num_layers,
        "next_layer": None,
        "tokens_per_layer": None,
        "experts": None,
        "ranks": None,
    }
    if num_layers is None:
        return found
    width = known[0].counts.shape[2] + (0 if placement is None else placement.num_ranks)
    end = min(num_layers, first_layer + max(1, most_cells // width))
    total = sum((window.counts.sum(axis=0, dtype=np.float64) for window in known), np.float64(0))
    load: NDArray[np.float64] = np.asarray(total) / steps
    rows = slice(first_layer, end)
    found["next_layer"] = end if end < num_layers else None
    found["tokens_per_layer"] = load[rows].sum(axis=1).tolist()
    found["experts"] = _shares(load[rows])
    # A window of another shape than the placement gives no load by rank.
    if placement is not None and load.shape == (
        placement.num_layers,
        placement.num_logical_experts,
    ):
        found["ranks"] = _shares(metrics.rank_load(load[None], placement)[0][rows])
    return found


def _shares(load: NDArray[np.float64]) -> Cells:
    """Return each cell divided by its row's mean; None in rows without load."""
    means = load.mean(axis=1)
    return [
        (row / mean).tolist() if mean > 0 else [None] * len(row)
        for row, mean in zip(load, means, strict=True)
    ]


@router.get("/deployments/{deployment}/quarantine")
async def get_quarantine(about: About) -> QuarantineOut:
    """Return the rejected parts of reports: their number by reason, and the newest few in words."""
    rows = await about.operations.quarantine(about.deployment)
    return QuarantineOut.model_validate({"deployment": about.deployment, "items": rows})


@router.delete("/deployments/{deployment}/quarantine", status_code=204)
async def clear_quarantine(about: About) -> None:
    """Reset the counts and drop the samples; metrics are not reset. Needs role admin."""
    await about.operations.clear_quarantine(about.deployment, about.caller)


@router.get("/deployments/{deployment}/audit")
async def list_audit(about: About, paging: Paging) -> AuditPage:
    """List the requests for changes of this deployment, newest first, with caller and outcome."""
    return _audit_page(await about.operations.audit(about.deployment, _AUDIT_SHOWN), paging)


@router.get("/audit")
async def list_replica_audit(asked: Asked, paging: Paging) -> AuditPage:
    """List the changes asked of this controller replica since it started, newest first."""
    return _audit_page(await asked.operations.audit(None, _AUDIT_SHOWN), paging)


def _audit_page(rows: Sequence[Mapping[str, Any]], paging: Paging) -> AuditPage:
    chosen, after = paging.page(rows, lambda row: str(row["id"]))
    items = [AuditRowOut(**row, text=request_text(row)) for row in chosen]
    return AuditPage(items=items, next_page_token=after)


@router.get("/token")
async def get_token(asked: Asked) -> TokenOut:
    """Return name and role of the token of this request: they say what its holder may do."""
    return TokenOut.model_validate(asked.token)


@router.get("/log-level")
async def get_log_level(asked: Asked) -> LogLevelBody:
    """Return the log level of the replica that answers."""
    return LogLevelBody.model_validate({"level": asked.operations.log_level()})


@router.put("/log-level")
async def set_log_level(asked: Asked, body: LogLevelBody) -> LogLevelBody:
    """Set the log level of the replica that answers, until its next start."""
    asked.operations.set_log_level(body.level, asked.caller)
    return await get_log_level(asked)
