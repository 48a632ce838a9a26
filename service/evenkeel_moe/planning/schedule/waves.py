"""Schedules the waves of a plan: the layers that change together, and their transfers.

Rules R10 and R11 of the switch: within a batch a rank has at most one peer, and every rank runs the
same list of batches. Every received expert waits in staging. With pooled slots, a slot that was
empty takes a buffer that was free before the wave; a slot that changes its expert keeps its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, Reason, ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.schedule.partial_layers import (
    partial_row,
    room_needed,
    vacated_rows,
    whole_row,
)


def schedule_waves(
    base: Placement,
    target: Placement,
    shape: ModelShape,
    topology: Topology,
    staging_bytes: int | Sequence[int] | None,
) -> tuple[Wave, ...]:
    """Schedule waves that lead from `base` to exactly `target`.

    Args:
        base: the committed placement.
        target: the placement to reach; relabel it first, no moves are saved here.
        shape: sizes, bytes of an expert, pooled or fixed slots.
        topology: a receiver prefers a source on its own rank, then on its node, then any; among
            equal ones the rank that has sent least in the wave so far.
        staging_bytes: receive buffer of every rank, or one value for all; None means no bound.

    Returns:
        Waves of whole layers, none if nothing changes. A layer appears once, unless it is too large
        for a wave: then it changes in steps, each of which leaves every expert a replica and gives
        no rank a duplicate that neither `base` nor `target` has.

    Raises:
        ShapeMismatch: placements or topology of another deployment.
        InfeasiblePlan: an expert has no replica, staging or pool are too small even for steps, or
            steps of layers take the room of each other without end.

    Order: by layer; with pooled slots first those that leave no rank fuller. Transfers of a batch
        are ordered by (layer, destination slot).
    """
    for placement in (base, target):
        placement.check_sizes(shape)
        placement.check_placed()
    if topology.num_ranks != shape.num_ranks:
        raise ShapeMismatch(f"topology has {topology.num_ranks} ranks, shape {shape.num_ranks}")
    room = _Room.at_start(base, shape, staging_bytes)
    rows = base.phy2log.copy()
    waves: list[Wave] = []
    most_waves = 4 * int((rows != target.phy2log).sum()) + 1
    while (pending := _pending_layers(rows, target.phy2log, shape)).size:
        chosen = (
            _layers_that_fit(rows, target.phy2log, pending, room)
            or _layers_that_fit(rows, target.phy2log, pending, room, in_steps=True)
            or vacated_rows(rows, target.phy2log, room.buffers)
        )
        if not chosen or len(waves) == most_waves:
            raise _no_step_fits(rows, target.phy2log, pending, room)
        layers = tuple(sorted(chosen))
        new_rows = np.stack([chosen[layer] for layer in layers])
        transfers = _transfers(rows, layers, new_rows, shape, topology)
        waves.append(Wave(len(waves), layers, new_rows, _batches(transfers, shape)))
        room.end_wave(rows[list(layers)], new_rows)
        rows[list(layers)] = new_rows
    return tuple(waves)


@dataclass(slots=True)
class _Room:
    """The room of every rank: in staging for each wave, and in free buffers over the whole plan."""

    num_ranks: int
    staging: NDArray[np.int64]
    """(R,) experts that fit into the staging of a rank; constant."""
    buffers: NDArray[np.int64]
    """(R,) pool buffers free before the wave; a huge number if slots are fixed."""
    offered: NDArray[np.int64]
    """(R,) staging in bytes, for the error message."""

    @classmethod
    def at_start(
        cls, base: Placement, shape: ModelShape, staging_bytes: int | Sequence[int] | None
    ) -> "_Room":
        unbounded = np.full(shape.num_ranks, np.iinfo(np.int64).max // 2)
        staging = offered = unbounded
        if staging_bytes is not None:
            offered = np.broadcast_to(np.asarray(staging_bytes, np.int64), (shape.num_ranks,))
            # An expert of unknown size has at least a byte.
            staging = offered // max(shape.bytes_per_expert, 1)
        buffers = unbounded
        if shape.pool_slots_per_rank is not None:
            buffers = shape.pool_slots_per_rank - base.used_per_rank()
        return cls(shape.num_ranks, staging, buffers, offered)

    def left(self) -> NDArray[np.int64]:
        """Return the (2, R) room of each rank in a wave that starts now, as in `room_needed`."""
        return np.stack([self.staging, self.buffers])

    def end_wave(self, old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
        """Subtract the buffers that the wave filled and add those it freed."""
        taken = (new >= 0).sum(axis=0) - (old >= 0).sum(axis=0)
        self.buffers = self.buffers - taken.reshape(self.num_ranks, -1).sum(axis=1)


def _pending_layers(
    rows: NDArray[np.int32], target: NDArray[np.int32], shape: ModelShape
) -> NDArray[np.int64]:
    """Return the layers to change; with pooled slots first those that leave no rank fuller."""
    layers = np.nonzero((rows != target).any(axis=1))[0]
    if not shape.pooled:
        return layers
    # Buffers that a layer takes for good, from the rank that gives most.
    taken = (target[layers] >= 0).astype(np.int64) - (rows[layers] >= 0)
    by_rank = taken.reshape(len(layers), shape.num_ranks, shape.slots_per_rank).sum(axis=2)
    return layers[np.lexsort((layers, by_rank.max(axis=1)))]


def _layers_that_fit(
    rows: NDArray[np.int32],
    target: NDArray[np.int32],
    pending: NDArray[np.int64],
    room: _Room,
    *,
    in_steps: bool = False,
) -> dict[int, NDArray[np.int32]]:
    """Fit layers into one wave; returns layer -> new row.

    Whole layers are taken where they fit; steps of layers in layer order, until the room is used
    up.
    """
    left = room.left()
    chosen: dict[int, NDArray[np.int32]] = {}
    for layer in pending.tolist():
        row = (partial_row if in_steps else whole_row)(rows[layer], target[layer], left)
        if (row != rows[layer]).any():
            chosen[layer] = row
        elif in_steps and chosen:
            break
    return chosen


def _no_step_fits(
    rows: NDArray[np.int32], target: NDArray[np.int32], pending: NDArray[np.int64], room: _Room
) -> InfeasiblePlan:
    """Return the error that names the rank with the largest shortage."""
    layer = int(pending[0])
    needed = room_needed(rows[layer], target[layer], room.num_ranks)
    over = needed - room.left()
    pool, rank = divmod(int(over.argmax()), room.num_ranks)
    if over[pool, rank] <= 0:
        return InfeasiblePlan(
            f"layer {layer} has room, but steps of {len(pending)} layers take the free buffers of"
            " the pool from each other without end",
            Reason.POOL_EXCEEDED,
        )
    if pool:
        return InfeasiblePlan(
            f"layer {layer} fills {needed[1, rank]} empty slots on rank {rank}:"
            f" {room.buffers[rank]} pool buffers are free, and no step of it fits",
            Reason.POOL_EXCEEDED,
        )
    return InfeasiblePlan(
        f"layer {layer} needs room for {needed[0, rank]} experts on rank {rank}: staging holds"
        f" {room.staging[rank]} ({room.offered[rank]} bytes), and no step of it fits",
        Reason.STAGING_TOO_SMALL,
    )


def _transfers(
    rows: NDArray[np.int32],
    layers: tuple[int, ...],
    new_rows: NDArray[np.int32],
    shape: ModelShape,
    topology: Topology,
) -> list[Transfer]:
    """Create a transfer for every slot that needs bytes, from a holder before the wave."""
    per_rank = shape.slots_per_rank
    node = topology.node_of_rank
    sent = [0] * shape.num_ranks
    wanted: list[tuple[int, int, int, list[int]]] = []
    for layer, new in zip(layers, new_rows, strict=True):
        holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(rows[layer].tolist()):
            holders.setdefault(expert, []).append(slot)
        for dst in np.nonzero((new != rows[layer]) & (new >= 0))[0].tolist():
            rank, sources = dst // per_rank, holders[int(new[dst])]
            same_rank = [slot for slot in sources if slot // per_rank == rank]
            same_node = [slot for slot in sources if node[slot // per_rank] == node[rank]]
            wanted.append((layer, dst, int(new[dst]), same_rank or same_node or sources))
    # Transfers with the fewest sources first, so that the others can avoid busy ranks.
    transfers: list[Transfer] = []
    for layer, dst, expert, sources in sorted(
        wanted, key=lambda row: (len(row[3]), row[0], row[1])
    ):
        src = min(sources, key=lambda slot: (sent[slot // per_rank], slot))
        if src // per_rank != dst // per_rank:
            sent[src // per_rank] += 1
        transfers.append(Transfer(layer, expert, src, dst, shape.bytes_per_expert))
    return transfers


def _batches(transfers: list[Transfer], shape: ModelShape) -> tuple[tuple[Transfer, ...], ...]:
    """Divide transfers into batches by edge colouring.

    Within a batch a rank has one peer, and sends to it and receives from it at most once.
    """
    per_rank = shape.slots_per_rank
    ordered = sorted(transfers, key=lambda t: (t.layer, t.dst_slot))
    src = np.array([t.src_slot // per_rank for t in ordered], np.int64)
    dst = np.array([t.dst_slot // per_rank for t in ordered], np.int64)
    colour = _colour(src, dst, shape.num_ranks)
    batches: list[list[Transfer]] = [[] for _ in range(int(colour.max(initial=-1)) + 1)]
    for transfer, batch in zip(ordered, colour.tolist(), strict=True):
        batches[batch].append(transfer)
    return tuple(tuple(batch) for batch in batches)


@kernel
def _colour(src: NDArray[np.int64], dst: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return the (n,) batch of each transfer; ranks with the most rounds left come first."""
    count = src.shape[0]
    batch = np.full(count, -1, np.int64)
    pairs = np.zeros((num_ranks, num_ranks), np.int64)
    for i in range(count):
        if src[i] == dst[i]:
            batch[i] = 0
        else:
            pairs[src[i], dst[i]] += 1
    # Rounds each pair needs, both directions at once. A rank needs at least the sum over its peers.
    rounds = np.maximum(pairs, pairs.T)
    left = rounds.sum(axis=1)
    peer = np.empty(num_ranks, np.int64)
    current = 0
    while left.max() > 0:
        peer[:] = -1
        for a in np.argsort(-left, kind="mergesort"):
            if peer[a] >= 0 or left[a] == 0:
                continue
            best = -1
            for b in range(num_ranks):
                if rounds[a, b] > 0 and peer[b] < 0 and (best < 0 or left[b] > left[best]):
                    best = b
            if best >= 0:
                peer[a] = best
                peer[best] = a
        for a in range(num_ranks):
            b = peer[a]
            if b > a:
                rounds[a, b] -= 1
                rounds[b, a] -= 1
                left[a] -= 1
                left[b] -= 1
        for i in range(count):
            if batch[i] < 0 and peer[src[i]] == dst[i]:
                batch[i] = current
                # One transfer per direction: mark it as used for the rest of this batch.
                peer[src[i]] = -2 - dst[i]
        current += 1
    return batch
