"""Probes: alive, and ready. Neither needs a token."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from evenkeel_moe.api.context import OperationsOf

__all__ = ["router"]

router = APIRouter(tags=["health"])

SURVIVABLE = frozenset({"store", "planner"})
"""Without these the controller still takes reports, answers reads and ends what it began, so it stays ready, degraded:
taking it out of rotation would only cut the ranks off as well."""


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process runs its event loop. Touches nothing else: a dead store must not restart the pod."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "A component is not ready"}})
async def readyz(operations: OperationsOf) -> JSONResponse:
    """Whether reports and requests are served; a standby is ready, a lost store or planner is `degraded`."""
    components = dict(await operations.healthy())
    broken = {name for name, state in components.items() if state != "ok"}
    status = "ok" if not broken else "degraded" if broken <= SURVIVABLE else "unready"
    return JSONResponse(
        {"status": status, "components": components}, 503 if status == "unready" else 200
    )
