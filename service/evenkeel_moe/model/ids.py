"""Names of things. NewTypes, so that mypy keeps a step from being used as an epoch."""

from typing import NewType

DeploymentId = NewType("DeploymentId", str)
"""One EP group serving one model component; key of all state. `[a-z0-9][a-z0-9._-]{0,62}`."""

Generation = NewType("Generation", str)
"""UUID agreed by the EP group when it starts (R1)."""

EpRank = NewType("EpRank", int)
"""0..R-1 inside the EP group."""

Epoch = NewType("Epoch", int)
"""Version of the committed placement; +1 for each committed wave (R3). 0 means none yet."""

Term = NewType("Term", int)
"""Leadership number that fences old leaders (R2)."""

PlanId = NewType("PlanId", str)
Step = NewType("Step", int)
"""One forward pass of the engine, counted since the generation began."""
