"""Answer bodies of the routes that look closer: heat maps, quarantine, audit."""

from typing import Literal

from pydantic import BaseModel

__all__ = [
    "AuditPage",
    "AuditRowOut",
    "HeatMapOut",
    "LogLevelBody",
    "QuarantineOut",
    "QuarantineRowOut",
    "QuarantineSampleOut",
]

Cells = list[list[float | None]]


class HeatMapOut(BaseModel):
    """Load by layer as shares of the layer's mean: 1 is balanced; null is unknown, never zero."""

    deployment: str
    epoch: int | None
    """Null before the ranks told it."""
    phase: str | None
    """Null: all phases, every step counted alike."""
    steps: int
    """Of the window; 0 leaves every matrix null."""
    newest_step: int | None
    num_layers: int | None
    """Of the model."""
    first_layer: int
    """Layer of the first row."""
    next_layer: int | None
    """Ask with this `first_layer` for the rows that did not fit; null when these are the last."""
    tokens_per_layer: list[float] | None
    """(rows) mean per step, an expert's token counted for each expert it went to."""
    experts: Cells | None
    """(rows, experts); null in a layer without load."""
    ranks: Cells | None
    """(rows, ranks) under the committed placement; null before it is known."""


class QuarantineSampleOut(BaseModel):
    """Words of one rejection."""

    rank: int
    detail: str


class QuarantineRowOut(BaseModel):
    """What was rejected for one reason."""

    reason: str
    rank_steps: int
    """One for each rank's report of one step, since the deployment came to this replica or was last cleared."""
    samples: list[QuarantineSampleOut]
    """The newest few, newest last."""


class QuarantineOut(BaseModel):
    """What was rejected of the ranks' reports, by reason."""

    deployment: str
    items: list[QuarantineRowOut]


class AuditRowOut(BaseModel):
    """One request for a change."""

    at: float
    """Unix seconds."""
    id: str
    deployment: str | None
    by: str
    """Name of the token."""
    role: str
    method: str
    path: str
    status: int
    """HTTP status of the answer."""
    idempotency_key: str | None
    trace_id: str | None = None
    """As in `traceparent` and in the log; null in rows of older versions."""


class AuditPage(BaseModel):
    """Audit rows, newest first."""

    items: list[AuditRowOut]
    next_page_token: str | None


class LogLevelBody(BaseModel, extra="forbid"):
    """How much one replica says."""

    level: Literal["debug", "info", "warning", "error"]
