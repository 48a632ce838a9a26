"""Protocols between the core and the outside world: clock, stores and operations."""

from evenkeel_moe.ports.operations import (
    Advice,
    AuditEntry,
    CycleOutcome,
    DeploymentStatus,
    DeploymentView,
    KeptAnswer,
    LedElsewhere,
    NotLeading,
    Operations,
    PlanRequest,
    QuarantineRow,
    RankStatus,
)
from evenkeel_moe.ports.stores import Clock, DeploymentStore, Lease, WindowStore

__all__ = [
    "Advice",
    "AuditEntry",
    "Clock",
    "CycleOutcome",
    "DeploymentStatus",
    "DeploymentStore",
    "DeploymentView",
    "KeptAnswer",
    "Lease",
    "LedElsewhere",
    "NotLeading",
    "Operations",
    "PlanRequest",
    "QuarantineRow",
    "RankStatus",
    "WindowStore",
]
