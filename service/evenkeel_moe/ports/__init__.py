"""Protocols between the core and the outside world: clock, stores and operations."""

from evenkeel_moe.ports.operations import (
    Advice,
    AuditEntry,
    DeploymentStatus,
    DeploymentView,
    LedElsewhere,
    NotLeading,
    Operations,
    PlanRequest,
    QuarantineRow,
    RankStatus,
    StoredResponse,
)
from evenkeel_moe.ports.stores import Clock, DeploymentStore, Lease, WindowStore

__all__ = [
    "Advice",
    "AuditEntry",
    "Clock",
    "DeploymentStatus",
    "DeploymentStore",
    "DeploymentView",
    "StoredResponse",
    "Lease",
    "LedElsewhere",
    "NotLeading",
    "Operations",
    "PlanRequest",
    "QuarantineRow",
    "RankStatus",
    "WindowStore",
]
