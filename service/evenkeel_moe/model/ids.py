"""Identifiers as NewTypes, so that mypy finds one used in place of another."""

from typing import NewType

DeploymentId = NewType("DeploymentId", str)
"""Name of one EP group that serves one model component: `[a-z0-9][a-z0-9._-]{0,62}`."""

Generation = NewType("Generation", str)
"""UUID that the EP group agrees on when it starts (R1)."""

EpRank = NewType("EpRank", int)
"""Rank inside the EP group, 0..R-1."""

Epoch = NewType("Epoch", int)
"""Version of the committed placement; +1 for each committed wave (R3). 0 before the first."""

PlanId = NewType("PlanId", str)
"""Id of a plan, unique within its deployment."""
