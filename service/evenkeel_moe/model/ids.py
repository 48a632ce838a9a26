"""Identifiers as NewTypes, so that mypy finds one used in place of another."""

import re
from typing import NewType

DEPLOYMENT_ID = "[a-z0-9][a-z0-9._-]{0,62}"
"""Pattern of a `DeploymentId`: safe in keys, labels and paths."""
DeploymentId = NewType("DeploymentId", str)
"""Name of one EP group that serves one model component."""

Generation = NewType("Generation", str)
"""UUID that the EP group agrees on when it starts (R1)."""

EpRank = NewType("EpRank", int)
"""Rank inside the EP group, 0..R-1."""

Epoch = NewType("Epoch", int)
"""Version of the committed placement; +1 for each committed wave (R3). 0 before the first."""

PlanId = NewType("PlanId", str)
"""Id of a plan, unique within its deployment."""


def is_deployment_id(name: str) -> bool:
    """Return True if a name is one that a deployment may have."""
    return re.fullmatch(DEPLOYMENT_ID, name) is not None
