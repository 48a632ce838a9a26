"""Probes for liveness and readiness, without a token."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter(tags=["health"])

SURVIVABLE = frozenset({"store", "planner"})
"""Components whose failure leaves the controller ready but degraded.

It still takes reports, answers reads and finishes running plans. Taking it out of rotation would
only disconnect the ranks as well. A store that never answered is another matter: its address may be
wrong, and no rank is connected yet."""


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Liveness: the event loop runs. Nothing else: a lost store must not restart the pod."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "A component is not ready"}})
async def readyz(request: Request) -> JSONResponse:
    """Readiness: requests are served, also by a standby; without store or planner `degraded`.

    Until the store has answered once, it is `unready`.
    """
    components = dict(await request.app.state.operations.healthy())
    broken = {name for name, state in components.items() if state != "ok"}
    status = "ok" if not broken else "degraded" if broken <= SURVIVABLE else "unready"
    return JSONResponse(
        {"status": status, "components": components}, 503 if status == "unready" else 200
    )
