"""The check that a wave's transfers carry exactly what its rows change.

The leader makes it before it sends Prepare (R17). Each rank makes it again before it stages,
because a bug of a planner or of the leader must not reach the weights.
"""

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave


def transfers_refusal(
    wave: Wave, before: Placement, after: Placement, malformed: Reason
) -> tuple[Reason, str] | None:
    """Return the reason why transfers and rows do not fit each other; None if they fit.

    Every slot that gets another expert must be written by exactly one transfer, from a slot that
    holds the expert before the wave. A slot that keeps its expert may be written again with it.

    Args:
        wave: layers and rows fit the placements.
        before: the placement before the wave.
        after: the placement after it.
        malformed: the reason for a transfer that is wrong in itself.
    """
    # Lists are faster to read: a wave may have thousands of transfers, and a rank holds its lock.
    old = {layer: before.phy2log[layer].tolist() for layer in wave.layers}
    new = {layer: after.phy2log[layer].tolist() for layer in wave.layers}
    written: set[tuple[int, int]] = set()
    for transfer in wave.transfers:
        layer, expert = transfer.layer, transfer.logical_expert
        src, dst = transfer.src_slot, transfer.dst_slot
        if old[layer][src] != expert or expert < 0:
            return Reason.NO_SOURCE, f"{transfer}: the source slot holds expert {old[layer][src]}"
        if new[layer][dst] != expert:
            return malformed, f"{transfer} does not end where the rows put it"
        if (layer, dst) in written:
            return malformed, f"{transfer} writes a slot a second time"
        written.add((layer, dst))
    bare = [
        (layer, slot)
        for layer in wave.layers
        for slot, expert in enumerate(new[layer])
        if expert >= 0 and expert != old[layer][slot] and (layer, slot) not in written
    ]
    if bare:
        layer, slot = bare[0]
        return (
            Reason.NO_SOURCE,
            f"{len(bare)} slots change without a transfer, first: layer {layer} slot {slot}",
        )
    return None
