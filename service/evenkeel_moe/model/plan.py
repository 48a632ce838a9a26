"""Plan, Wave and Transfer: an accepted proposal, one atomic step of it, one copy of an expert."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.delivered import DeliveredGain, GainPair
from evenkeel_moe.model.ids import DeploymentId, Epoch, Generation, PlanId
from evenkeel_moe.model.placement import EMPTY, Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy of one expert's tensors. Slots are global; both may be on the same rank."""

    layer: int
    logical_expert: int
    src_slot: int
    dst_slot: int
    nbytes: int
    """0 if the size of an expert is not known."""


@dataclass(frozen=True, eq=False, slots=True)
class Wave:
    """Whole layers that change together and raise the epoch by one."""

    index: int
    """Position in the plan, from 0."""
    layers: tuple[int, ...]
    rows: NDArray[np.int32]
    """(len(layers), S) the new rows of phy2log."""
    batches: tuple[tuple[Transfer, ...], ...]
    """Every rank runs them in this order. Within a batch each rank has at most one peer (R10);
    copies inside a rank need none."""

    def __post_init__(self) -> None:
        """Check that the parts fit each other.

        Raises:
            InvalidInput: they do not.
        """
        layers, rows = set(self.layers), self.rows
        if not layers or len(layers) < len(self.layers) or min(layers) < 0:
            raise InvalidInput(f"wave {self.index} has layers {self.layers}")
        sizes_fit = rows.ndim == 2 and len(rows) == len(self.layers)
        if not sizes_fit or rows.dtype.kind != "i" or rows.min(initial=0) < EMPTY:
            raise InvalidInput(
                f"wave {self.index} has {rows.dtype} rows {rows.shape} from {rows.min(initial=0)}"
                f" on for {len(layers)} layers"
            )
        for t in self.transfers:
            slots = t.src_slot, t.dst_slot
            if t.layer not in layers or min(slots) < 0 or max(slots) >= rows.shape[1]:
                raise InvalidInput(f"wave {self.index}: {t} is outside it")

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in batch order."""
        return tuple(transfer for batch in self.batches for transfer in batch)

    def _between_ranks(self, slots_per_rank: int) -> tuple[Transfer, ...]:
        return tuple(
            t
            for t in self.transfers
            if t.src_slot // slots_per_rank != t.dst_slot // slots_per_rank
        )

    def moves(self, slots_per_rank: int) -> int:
        """Return the copies between ranks."""
        return len(self._between_ranks(slots_per_rank))

    def nbytes(self, slots_per_rank: int) -> int | None:
        """Return the bytes copied between ranks; None if the size of an expert is not known."""
        return _bytes_between_ranks((self,), slots_per_rank)


def _bytes_between_ranks(waves: Sequence[Wave], slots_per_rank: int) -> int | None:
    sizes = [t.nbytes for wave in waves for t in wave._between_ranks(slots_per_rank)]
    return sum(sizes) if all(sizes) else None


@dataclass(frozen=True, slots=True)
class WaveKey:
    """Identifies a wave on the wire and in the gate."""

    generation: Generation
    plan_id: PlanId
    wave_index: int
    weights_version: int
    base_epoch: Epoch = Epoch(0)
    """Base epoch of the plan. It distinguishes plans with the same id, which are possible after the
    store lost data: once a wave of the first has swapped, the second has a later base."""

    @property
    def epoch(self) -> Epoch:
        """The epoch that the wave leads to: each wave before it raised the base epoch by one."""
        return Epoch(self.base_epoch + self.wave_index + 1)

    @property
    def fingerprint(self) -> int:
        """62-bit hash; never 0."""
        return hash_of(
            f"{self.generation}/{self.plan_id}/{self.wave_index}/{self.weights_version}"
            f"/{self.base_epoch}"
        )


def hash_of(text: str) -> int:
    """Return a 62-bit hash, which fits a signed word; never 0."""
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2) | 1


class PlanKind(StrEnum):
    """The origin of a plan."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"
    ROLLBACK = "rollback"
    EVACUATION = "evacuation"
    """Leaves no expert on retiring ranks alone."""

    @property
    def seeks_gain(self) -> bool:
        """True if plans of this kind are made to save MoE time. Others may cost some."""
        return self in (PlanKind.AUTOMATIC, PlanKind.MANUAL)


class PlanPhase(StrEnum):
    """Phases in the life of a plan. The last five are terminal."""

    PROPOSED = "proposed"
    """Waits for approval."""
    APPROVED = "approved"
    """Accepted, not started."""
    MIGRATING = "migrating"
    PAUSED = "paused"
    """The fleet runs no steps; this is no fault."""
    STALLED = "stalled"
    """Cannot continue, for its Reason; a recovery or a new generation ends it (R14)."""
    COMMITTED = "committed"
    ABORTED = "aborted"
    """Ended early; its committed waves stay."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"
    """Violated an invariant, or became stale before its first wave (R16, R17)."""

    @property
    def terminal(self) -> bool:
        """True if the plan has ended."""
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


_REPLACED = (
    Reason.STALE_BASE,
    Reason.GENERATION_CHANGED,
    Reason.WEIGHTS_VERSION_CHANGED,
)
"""Reasons for which a plan that has not begun is useless, although nothing is wrong with it."""


def phase_text(phase: str, reason: str) -> str:
    """Return the phase of a plan as people call it.

    A record has the phase `refused` both for plans that break a rule and for plans that were
    replaced before they began; the reason tells them apart.
    """
    return "superseded" if phase == PlanPhase.REFUSED and reason in _REPLACED else phase


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Bounds on one plan; None means no bound."""

    max_moves: int | None = None
    """Copies between ranks."""
    max_bytes: int | None = None
    """Bytes between ranks. Copies of unknown size exceed any bound."""
    max_layers: int | None = None

    def exceeded(self, waves: Sequence[Wave], slots_per_rank: int) -> str | None:
        """Return which limit the waves of a plan exceed, and by what; None if they keep all."""
        moves = sum(wave.moves(slots_per_rank) for wave in waves)
        nbytes = _bytes_between_ranks(waves, slots_per_rank)
        layers = len({layer for wave in waves for layer in wave.layers})
        for name, need, most in (
            ("max_moves", moves, self.max_moves),
            ("max_bytes", math.inf if nbytes is None else nbytes, self.max_bytes),
            ("max_layers", layers, self.max_layers),
        ):
            if most is not None and need > most:
                shown = "copies of unknown size" if need == math.inf else need
                return f"needs {shown}, the limit {name} is {most}"
        return None


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """An immutable proposal: a target placement, and the waves that lead to it from the base."""

    plan_id: PlanId
    deployment: DeploymentId
    kind: PlanKind
    policy: str
    """Name of the policy; `rollback` for rollbacks."""
    reason: Reason
    """The reason it was made."""
    generation: Generation
    weights_version: int
    base_epoch: Epoch
    base: Placement
    target: Placement
    waves: tuple[Wave, ...]
    created_at: float
    """Unix seconds."""
    expires_at: float | None = None
    """Unix seconds at which a proposal that nobody approved is EXPIRED."""
    allow_duplicates: bool = False
    cost_source: CostSource | None = None
    """Source of the cost model that it was scored by; None if it was not scored."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Figures behind the decision: balancedness_mean, balancedness_expected, gain, copies, ..."""

    def __post_init__(self) -> None:
        """Check that the waves fit the maps.

        Raises:
            InvalidInput: they do not, or a number cannot be right.
        """
        base = self.base
        if self.target.sizes != base.sizes:
            raise InvalidInput(f"base of {base.sizes}, target of {self.target.sizes}")
        for index, wave in enumerate(self.waves):
            if (
                wave.index != index
                or max(wave.layers) >= base.num_layers
                or wave.rows.shape[1] != base.num_slots
                or wave.rows.max(initial=0) >= base.num_logical_experts
            ):
                raise InvalidInput(
                    f"wave {index} calls itself {wave.index} and has layers {wave.layers}, rows"
                    f" {wave.rows.shape} of experts up to {wave.rows.max(initial=0)}; the placement"
                    f" has (layers, slots, ranks, experts) = {base.sizes}"
                )
        times = self.created_at, self.expires_at or 0.0
        if not all(map(math.isfinite, times)) or min(self.weights_version, self.base_epoch) < 0:
            raise InvalidInput(
                f"plan of {times}, weights {self.weights_version}, epoch {self.base_epoch}"
            )

    @property
    def moves(self) -> int:
        """Copies between ranks in all waves."""
        return sum(wave.moves(self.target.slots_per_rank) for wave in self.waves)

    @property
    def nbytes(self) -> int | None:
        """Bytes copied between ranks in all waves; null if the size of an expert is not known."""
        return _bytes_between_ranks(self.waves, self.target.slots_per_rank)

    def key(self, wave_index: int) -> WaveKey:
        """Return the key of one wave."""
        return WaveKey(
            self.generation, self.plan_id, wave_index, self.weights_version, self.base_epoch
        )


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan and its state, as stored; each change replaces it."""

    plan: Plan
    phase: PlanPhase
    reason: Reason
    """The reason for the phase."""
    waves_committed: int
    updated_at: float
    error: str | None = None
    """Message of the error that ended the plan, with its numbers."""
    made_by: str | None = None
    """The name of the token that made the plan; None if the planner did, or it is unknown."""
    approved_by: str | None = None
    wave_sent: bool = False
    """True once a wave was sent out."""
    wave_agreed: bool = False
    """True once all ranks agreed on the wave after the committed ones. Commit waits until this is
    stored, so without it no rank has swapped that wave (R12)."""
    cancel_requested: bool = False
    """True once an operator asked a leader to stop the plan."""
    request_digest: str | None = None
    """Digest of the request that created it: the same id with another request is a conflict."""
    story: tuple[dict[str, Any], ...] = ()
    """Events of the plan in order, each a row {at, event, ...}, for people."""
    delivered: DeliveredGain | None = None
    """The measured gain; None before it was measured, and if the plan was not carried out."""

    def __post_init__(self) -> None:
        """Check the progress.

        Raises:
            InvalidInput: it cannot be right.
        """
        waves, done = len(self.plan.waves), self.waves_committed
        if not 0 <= done <= waves - self.wave_agreed or not math.isfinite(self.updated_at):
            raise InvalidInput(
                f"{done} of {waves} waves at {self.updated_at}, next agreed: {self.wave_agreed}"
            )

    @property
    def phase_text(self) -> str:
        """The phase as people call it."""
        return phase_text(self.phase, self.reason)

    @property
    def gain_pair(self) -> GainPair | None:
        """The gain of its verdict with the delivered one; None if it had no verdict, as a rollback,
        or what it delivered is unknown."""
        delivered, numbers = self.delivered, self.plan.numbers
        modelled = numbers.get("gain_modelled", numbers.get("gain"))
        if modelled is None or delivered is None:
            return None
        if delivered.gain is None or delivered.error is None:
            return None
        return GainPair(modelled, delivered.gain, delivered.error)

    @property
    def has_begun(self) -> bool:
        """True if a wave of the plan was ever sent out."""
        return self.wave_sent or self.waves_committed > 0
