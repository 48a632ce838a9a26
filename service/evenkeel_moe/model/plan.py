"""Plan > Wave > Transfer: one accepted proposal, one atomic step of it, one copy."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, Generation, PlanId
from evenkeel_moe.model.placement import Placement

__all__ = [
    "Plan",
    "PlanKind",
    "PlanLimits",
    "PlanPhase",
    "PlanRecord",
    "Transfer",
    "Wave",
    "WaveKey",
]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy of one expert's tensors. Slots are global; src and dst may be on the same rank."""

    layer: int
    logical_expert: int
    src_slot: int
    dst_slot: int
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Wave:
    """Whole layers that change together and raise the epoch by one."""

    index: int
    """Position in the plan, from 0."""
    layers: tuple[int, ...]
    rows: NDArray[np.int32]
    """(len(layers), S) the new phy2log rows."""
    batches: tuple[tuple[Transfer, ...], ...]
    """Run in this order by every rank; within a batch each rank has at most one peer (R10).
    Copies inside one rank count as no peer."""

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in batch order."""
        return tuple(transfer for batch in self.batches for transfer in batch)

    def nbytes(self, slots_per_rank: int) -> int:
        """Bytes that cross between ranks."""
        return sum(
            t.nbytes
            for t in self.transfers
            if t.src_slot // slots_per_rank != t.dst_slot // slots_per_rank
        )


@dataclass(frozen=True, slots=True)
class WaveKey:
    """What identifies a wave on the wire and in the gate."""

    generation: Generation
    plan_id: PlanId
    wave_index: int
    weights_version: int
    base_epoch: Epoch = Epoch(0)
    """Of the plan. A store that forgot a plan may be given another by the same id: once a wave of the first
    has swapped, the second builds on a later epoch."""

    @property
    def fingerprint(self) -> int:
        """62-bit hash, the h of the gate vector; never 0."""
        text = f"{self.generation}/{self.plan_id}/{self.wave_index}/{self.weights_version}/{self.base_epoch}"
        return (
            int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
        ) | 1


class PlanKind(StrEnum):
    """Where a plan came from."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"
    ROLLBACK = "rollback"


class PlanPhase(StrEnum):
    """Life of a plan. The last five are terminal."""

    PROPOSED = "proposed"
    """Waits for approval."""
    APPROVED = "approved"
    """Accepted, not begun."""
    MIGRATING = "migrating"
    PAUSED = "paused"
    """The fleet runs no steps; nothing is wrong."""
    STALLED = "stalled"
    """Cannot finish for a stated Reason; ends by recovery or a new generation (R14)."""
    COMMITTED = "committed"
    ABORTED = "aborted"
    """Ended early; waves already committed stay."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"
    """Broke an invariant or went stale before its first wave (R16, R17)."""

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen to the plan."""
        return self in _TERMINAL


_TERMINAL = frozenset(
    {
        PlanPhase.COMMITTED,
        PlanPhase.ABORTED,
        PlanPhase.CANCELLED,
        PlanPhase.EXPIRED,
        PlanPhase.REFUSED,
    }
)


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Bounds on one plan; None means no bound."""

    max_moves: int | None = None
    """Copies between ranks."""
    max_bytes: int | None = None
    max_layers: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """One proposal, immutable: an absolute target, and the waves that reach it from its base."""

    plan_id: PlanId
    deployment: DeploymentId
    kind: PlanKind
    policy: str
    """Policy name; `rollback` for rollbacks."""
    reason: Reason
    """Why it was planned."""
    generation: Generation
    weights_version: int
    base_epoch: Epoch
    base: Placement
    target: Placement
    waves: tuple[Wave, ...]
    created_at: float
    """Unix seconds."""
    expires_at: float | None = None
    """A proposal not approved by then is EXPIRED."""
    allow_duplicates: bool = False
    numbers: dict[str, float] = field(default_factory=dict)
    """What the decision rested on: balancedness_before/after, predicted_gain, copies_raw, ..."""

    @property
    def moves(self) -> int:
        """Copies between ranks over all waves."""
        per_rank = self.target.slots_per_rank
        return sum(
            t.src_slot // per_rank != t.dst_slot // per_rank
            for wave in self.waves
            for t in wave.transfers
        )

    @property
    def nbytes(self) -> int:
        """Bytes between ranks over all waves."""
        return sum(wave.nbytes(self.target.slots_per_rank) for wave in self.waves)

    def key(self, wave_index: int) -> WaveKey:
        """The key of one wave."""
        return WaveKey(
            self.generation, self.plan_id, wave_index, self.weights_version, self.base_epoch
        )


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The mutable half of a plan as stored: replaced whole at every change."""

    plan: Plan
    phase: PlanPhase
    reason: Reason
    """Why it is in this phase."""
    waves_committed: int
    updated_at: float
    error: str | None = None
    """Terminal error in words with the numbers in it."""
    approved_by: str | None = None
    request_digest: str | None = None
    """Digest of the request body that created it: same id with another body is a conflict."""
    story: tuple[dict[str, Any], ...] = ()
    """Rows {at, event, ...} in order: what happened to this plan and why."""
