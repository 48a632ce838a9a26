"""Placement: the logical expert of each slot, immutable, with the maps that follow from it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason, ShapeMismatch
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.topology import ModelShape

EMPTY = -1
"""phy2log value of an empty slot."""


@dataclass(frozen=True, eq=False)
class Placement:
    """phy2log and the maps derived from it. rank = slot // slots_per_rank."""

    phy2log: NDArray[np.int32]
    """(L, S) logical expert of each slot, or EMPTY."""
    num_ranks: int
    num_logical_experts: int

    def __post_init__(self) -> None:
        phy2log = np.array(self.phy2log, dtype=np.int32, order="C", copy=True)
        if phy2log.ndim != 2:
            raise ShapeMismatch(f"phy2log must be (layers, slots), got shape {phy2log.shape}")
        least = self.num_logical_experts
        words = undivided(phy2log.shape[1], "slots", self.num_ranks, "ranks", least=least)
        if words:
            raise ShapeMismatch(words)
        low, high = (int(phy2log.min()), int(phy2log.max())) if phy2log.size else (0, 0)
        if low < EMPTY or high >= self.num_logical_experts:
            raise ShapeMismatch(
                f"phy2log holds {low}..{high},"
                f" experts are 0..{self.num_logical_experts - 1} and {EMPTY} is empty",
                Reason.EXPERT_OUT_OF_RANGE,
            )
        phy2log.flags.writeable = False
        object.__setattr__(self, "phy2log", phy2log)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.sizes == other.sizes and np.array_equal(self.phy2log, other.phy2log)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return int(self.phy2log.shape[0])

    @property
    def num_slots(self) -> int:
        """Number of slots of a layer, S."""
        return int(self.phy2log.shape[1])

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(L, S, R, E)."""
        return self.num_layers, self.num_slots, self.num_ranks, self.num_logical_experts

    @property
    def slots_per_rank(self) -> int:
        """Number of slots of one rank in one layer."""
        return self.num_slots // self.num_ranks

    @cached_property
    def logcnt(self) -> NDArray[np.int32]:
        """(L, E) int32 - number of replicas of each logical expert."""
        layers, experts = self.num_layers, self.num_logical_experts
        first = experts * np.arange(layers)[:, None]
        counted = np.bincount((self.phy2log + first)[self.phy2log >= 0], minlength=layers * experts)
        counts = counted.reshape(layers, experts).astype(np.int32)
        counts.flags.writeable = False
        return counts

    @property
    def replicas_by_layer(self) -> NDArray[np.int64]:
        """(L,) replicas beyond one of each expert; of a layer that lacks experts, less."""
        filled: NDArray[np.int64] = self.logcnt.sum(axis=1, dtype=np.int64)
        return filled - self.num_logical_experts

    @cached_property
    def only_rank(self) -> NDArray[np.int32]:
        """(L, E) int32 - the only rank with replicas of an expert; -1 if several or none have."""
        sizes = self.num_layers, self.num_logical_experts
        lowest, highest = np.full(sizes, self.num_ranks, np.int32), np.full(sizes, -1, np.int32)
        layer, slot = np.nonzero(self.phy2log >= 0)
        rank = self.rank_of_slot()[slot]
        np.minimum.at(lowest, (layer, self.phy2log[layer, slot]), rank)
        np.maximum.at(highest, (layer, self.phy2log[layer, slot]), rank)
        only = np.where(lowest == highest, highest, -1).astype(np.int32)
        only.flags.writeable = False
        return only

    @cached_property
    def even_shares(self) -> NDArray[np.float64]:
        """(L, S) share of its expert's tokens in each slot, split evenly; 0 in empty slots."""
        copies = np.take_along_axis(self.logcnt, np.maximum(self.phy2log, 0), axis=1)
        shares = np.where(self.phy2log >= 0, 1.0 / np.maximum(copies, 1), 0.0)
        shares.flags.writeable = False
        return shares

    @cached_property
    def log2phy(self) -> NDArray[np.int32]:
        """(L, E, Xmax) int32 - slots of each logical expert in slot order, padded with -1."""
        width = max(1, int(self.logcnt.max(initial=0)))
        table = np.full((self.num_layers, self.num_logical_experts, width), -1, np.int32)
        fill = np.zeros((self.num_layers, self.num_logical_experts), np.int32)
        for layer, slot in zip(*np.nonzero(self.phy2log >= 0), strict=True):
            expert = self.phy2log[layer, slot]
            table[layer, expert, fill[layer, expert]] = slot
            fill[layer, expert] += 1
        table.flags.writeable = False
        return table

    def slots_by_expert(self) -> list[list[list[int]]]:
        """Return the slots of each logical expert of each layer, in slot order.

        Unlike `log2phy` this takes no more room than phy2log, also if one expert of a hostile map
        has every spare slot.
        """
        experts = np.arange(self.num_logical_experts + 1)
        found = []
        for row in self.phy2log:
            order = np.argsort(row, kind="stable")
            slots, ends = order.tolist(), np.searchsorted(row[order], experts).tolist()
            found.append([slots[start:end] for start, end in pairwise(ends)])
        return found

    @cached_property
    def digest(self) -> str:
        """32 hex digits over shape and content; equal digests mean equal maps."""
        header = (",".join(map(str, self.sizes)) + ";").encode()
        return hashlib.blake2b(
            header + self.phy2log.astype("<i4").tobytes(), digest_size=16
        ).hexdigest()

    def rank_of_slot(self) -> NDArray[np.int32]:
        """Return the rank of each slot, (S,) int32."""
        return (np.arange(self.num_slots, dtype=np.int32) // self.slots_per_rank).astype(np.int32)

    def held(self, layer: int) -> NDArray[np.bool_]:
        """Return (E, R), True where a rank holds a replica of an expert in a layer."""
        held = np.zeros((self.num_logical_experts, self.num_ranks), np.bool_)
        filled = np.flatnonzero(self.phy2log[layer] >= 0)
        held[self.phy2log[layer, filled], filled // self.slots_per_rank] = True
        return held

    def with_rows(self, layers: tuple[int, ...], rows: NDArray[np.int32]) -> "Placement":
        """Return this placement with some layers replaced; rows: (len(layers), S) int32."""
        phy2log = self.phy2log.copy()
        phy2log[list(layers)] = rows
        return Placement(phy2log, self.num_ranks, self.num_logical_experts)

    def used_per_rank(self) -> NDArray[np.int64]:
        """Return the number of filled slots of each rank over all layers, (R,) int64."""
        filled = (self.phy2log >= 0).reshape(self.num_layers, self.num_ranks, self.slots_per_rank)
        return np.asarray(filled.sum(axis=(0, 2)), np.int64)

    def check(
        self, shape: ModelShape, *, allow_duplicates: bool = False, fill_slots: bool = False
    ) -> None:
        """Check the invariants of R17.

        Args:
            fill_slots: True if no slot may be empty. Rows of pooled slots may have empty slots all
                the same, because an empty one has no buffer.

        Raises:
            ShapeMismatch: another shape than the deployment's.
            InfeasiblePlan: an expert without a replica, a duplicate on a rank, an exceeded pool, or
                an empty slot that must be filled.
        """
        self.check_sizes(shape)
        self.check_placed()
        if not allow_duplicates:
            duplicate = self.first_duplicate()
            if duplicate is not None:
                layer, rank, expert = duplicate
                raise InfeasiblePlan(
                    f"layer {layer} rank {rank} holds expert {expert} more than once",
                    Reason.DUPLICATE_ON_RANK,
                )
        empty = self.phy2log == EMPTY
        if fill_slots and not shape.pooled and empty.any():
            layer, slot = np.argwhere(empty)[0]
            raise InfeasiblePlan(
                f"{int(empty.sum())} slots are empty, first: layer {layer} slot {slot};"
                " the engine needs an expert in each",
                Reason.EMPTY_SLOTS,
            )
        if shape.pool_slots_per_rank is not None:
            used = self.used_per_rank()
            worst = int(used.argmax())
            if used[worst] > shape.pool_slots_per_rank:
                raise InfeasiblePlan(
                    f"rank {worst} would hold {used[worst]} experts,"
                    f" its pool has {shape.pool_slots_per_rank} slots",
                    Reason.POOL_EXCEEDED,
                )

    def check_sizes(self, other: "ModelShape | Placement") -> None:
        """Check that layers, slots, ranks and experts are those of a shape or another placement.

        Raises:
            ShapeMismatch: they are not.
        """
        if self.sizes != other.sizes:
            raise ShapeMismatch(f"placement is (L, S, R, E) = {self.sizes}, must be {other.sizes}")

    def check_placed(self) -> None:
        """Check that every expert has a replica.

        Raises:
            InfeasiblePlan: one has none.
        """
        missing = np.argwhere(self.logcnt == 0)
        if len(missing):
            layer, expert = missing[0]
            raise InfeasiblePlan(
                f"{len(missing)} experts without a replica, first: layer {layer} expert {expert}",
                Reason.EXPERT_WITHOUT_REPLICA,
            )

    def first_duplicate(self) -> tuple[int, int, int] | None:
        """Return (layer, rank, expert) of the first expert held twice by a rank; None if none."""
        by_rank = np.sort(
            self.phy2log.reshape(self.num_layers, self.num_ranks, self.slots_per_rank), axis=2
        )
        twice = (by_rank[:, :, 1:] == by_rank[:, :, :-1]) & (by_rank[:, :, 1:] >= 0)
        where = np.argwhere(twice)
        if not len(where):
            return None
        layer, rank, position = where[0]
        return int(layer), int(rank), int(by_rank[layer, rank, position])

    @classmethod
    def initial(cls, shape: ModelShape) -> "Placement":
        """Return the placement that engines start with.

        Each rank first gets a contiguous block of the experts 0..E-1. If E does not divide by R,
        the first ranks get one expert more; with pooled slots those ranks change from layer to
        layer, so that no pool is exceeded. Then the spare slots within the budget repeat the
        experts from 0 on, slot by slot over all ranks, never the same expert twice on a rank.
        """
        return cls._in_order(shape, replicas=True)

    @classmethod
    def linear(cls, shape: ModelShape) -> "Placement":
        """Return `initial` without the repeated experts: the spare slots stay empty."""
        return cls._in_order(shape, replicas=False)

    @classmethod
    def _in_order(cls, shape: ModelShape, *, replicas: bool) -> "Placement":
        layers, ranks, experts = shape.num_layers, shape.num_ranks, shape.num_logical_experts
        budget, step = shape.slots_per_rank, 0
        if shape.pool_slots_per_rank is not None:
            budget, step = min(budget, shape.pool_slots_per_rank // layers), experts % ranks
        firsts = [layer * step % ranks for layer in range(layers)]
        filled = budget if replicas else 0
        rows = {first: _initial_row(shape, filled, first) for first in set(firsts)}
        return cls(np.stack([rows[first] for first in firsts]), ranks, experts)


def _initial_row(shape: ModelShape, budget: int, first: int) -> NDArray[np.int32]:
    """Return one layer of `Placement.initial`, (S,).

    Args:
        shape: sizes of the deployment.
        budget: slots that each rank fills with replicas too; 0 for none.
        first: first of the ranks that hold one expert more, if E does not divide by R.
    """
    ranks, experts, per_rank = shape.num_ranks, shape.num_logical_experts, shape.slots_per_rank
    row = np.full((ranks, per_rank), EMPTY, np.int32)
    base, extra = divmod(experts, ranks)
    start = 0
    for rank in range(ranks):
        count = base + ((rank - first) % ranks < extra)
        row[rank, :count] = np.arange(start, start + count)
        start += count
    spare = 0
    for local in range(budget):
        for rank in range(ranks):
            if row[rank, local] != EMPTY:
                continue
            for offset in range(experts):
                expert = (spare + offset) % experts
                if expert not in row[rank]:
                    row[rank, local] = expert
                    spare = expert + 1
                    break
    return row.ravel()
