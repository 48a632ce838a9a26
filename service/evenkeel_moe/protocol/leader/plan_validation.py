"""Checks of a plan before any rank hears of it (R17) and of a wave before Prepare (R10, R11)."""

from collections.abc import Sequence

import numpy as np

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, Wave
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.wave_checks import transfers_refusal

Refusal = tuple[Reason, str]
"""The reason of a refusal, and a sentence with the numbers."""


def placement_at(plan: Plan, waves_done: int) -> Placement:
    """Return the placement after the first `waves_done` waves of a plan.

    Raises:
        EvenkeelError: the rows of a wave do not fit the base.
    """
    phy2log = plan.base.phy2log.copy()
    for wave in plan.waves[:waves_done]:
        phy2log[list(wave.layers)] = wave.rows
    return Placement(phy2log, plan.base.num_ranks, plan.base.num_logical_experts)


def plan_refusal(plan: Plan, shape: ModelShape) -> Refusal | None:
    """Return the reason why a plan as a whole is not valid; None if it is valid.

    Base and target must be valid placements, and the waves must lead from the base to the target.
    """
    try:
        plan.base.check(shape, allow_duplicates=True)
        plan.target.check(shape, allow_duplicates=plan.allow_duplicates)
    except EvenkeelError as error:
        return error.reason, str(error)
    if placement_at(plan, len(plan.waves)) != plan.target:
        return Reason.INVALID_INPUT, "the waves do not lead from the base to the target"
    return None


def wave_refusal(
    wave: Wave,
    before: Placement,
    shape: ModelShape,
    staging_bytes: Sequence[int],
    *,
    allow_duplicates: bool,
) -> Refusal | None:
    """Return the reason why a wave is not valid on the placement before it; None if it is valid.

    The placement after the wave must be valid. Every slot that changes gets its bytes by exactly
    one transfer, from a slot that holds the expert before the wave. Each rank's share must fit its
    staging.
    """
    after = before.with_rows(wave.layers, wave.rows)
    try:
        duplicates = allow_duplicates or before.first_duplicate() is not None
        after.check(shape, allow_duplicates=duplicates)
    except EvenkeelError as error:
        return error.reason, str(error)
    refusal = transfers_refusal(wave, before, after, Reason.INVALID_INPUT)
    if refusal is not None:
        return refusal
    needed = np.zeros(shape.num_ranks, np.int64)
    for t in wave.transfers:
        needed[t.dst_slot // shape.slots_per_rank] += t.nbytes
    over = np.nonzero(needed > np.asarray(staging_bytes))[0]
    if len(over):
        rank = int(over[0])
        detail = f"rank {rank} must stage {needed[rank]} bytes, it offers {staging_bytes[rank]}"
        return Reason.STAGING_TOO_SMALL, detail
    return batch_refusal(wave, shape)


def batch_refusal(wave: Wave, shape: ModelShape) -> Refusal | None:
    """R10: refuse a batch in which a rank has a second peer, or sends to its peer twice."""
    for number, batch in enumerate(wave.batches):
        peers: dict[int, int] = {}
        pairs = set()
        for t in batch:
            src, dst = t.src_slot // shape.slots_per_rank, t.dst_slot // shape.slots_per_rank
            if src == dst:
                continue
            if (
                peers.setdefault(src, dst) != dst
                or peers.setdefault(dst, src) != src
                or (src, dst) in pairs
            ):
                return Reason.LIMIT_EXCEEDED, f"batch {number}: {t} gives a rank a second peer"
            pairs.add((src, dst))
    return None


def pool_refusal(wave: Wave, before: Placement, shape: ModelShape) -> Refusal | None:
    """R11: refuse a wave that fills more empty pooled slots than buffers were free before it.

    A slot that changes from one expert to another keeps its buffer: its bytes come from staging.
    """
    if shape.pool_slots_per_rank is None:
        return None
    old = before.phy2log[list(wave.layers)]
    incoming = ((old < 0) & (wave.rows >= 0)).sum(axis=0).reshape(shape.num_ranks, -1).sum(axis=1)
    free = shape.pool_slots_per_rank - before.used_per_rank()
    over = np.nonzero(incoming > free)[0]
    if not len(over):
        return None
    rank = int(over[0])
    return (
        Reason.POOL_EXCEEDED,
        f"rank {rank} must fill {incoming[rank]} buffers, {free[rank]} are free",
    )
