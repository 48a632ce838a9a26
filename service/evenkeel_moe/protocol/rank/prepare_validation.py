"""A rank's checks of a Prepare, before it touches anything: format, ranges and space."""

import numpy as np

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Prepare


def prepare_refusal(
    prepare: Prepare, placement: Placement, rank: int, shape: ModelShape, staging_bytes: int
) -> tuple[Reason, str] | None:
    """Return the reason why this rank cannot take the wave, with the numbers; None if it can."""
    body = prepare.body
    layers, slots = body.layers, placement.num_slots
    if (
        not layers
        or len(set(layers)) != len(layers)
        or min(layers) < 0
        or max(layers) >= shape.num_layers
    ):
        return Reason.MALFORMED, f"layers {layers} of {shape.num_layers}"
    if body.rows.shape != (len(layers), slots) or not np.issubdtype(body.rows.dtype, np.integer):
        rows = f"{body.rows.dtype} {body.rows.shape}"
        return Reason.MALFORMED, f"rows are {rows}, not ({len(layers)}, {slots})"
    try:
        new = placement.with_rows(layers, body.rows)
    except EvenkeelError as error:
        return error.reason, str(error)
    checksums, transfers = prepare.checksums, body.transfers
    if len(checksums) != len(transfers):
        return Reason.MALFORMED, f"{len(checksums)} checksums for {len(transfers)} transfers"
    # Lists are faster to read: a wave may have thousands of transfers, and the rank's lock is held.
    before = {layer: placement.phy2log[layer].tolist() for layer in layers}
    after = {layer: new.phy2log[layer].tolist() for layer in layers}
    needed = 0
    for transfer in transfers:
        layer, expert = transfer.layer, transfer.logical_expert
        src, dst = transfer.src_slot, transfer.dst_slot
        if layer not in before or not (0 <= src < slots and 0 <= dst < slots):
            return Reason.MALFORMED, f"{transfer} is outside the wave"
        if before[layer][src] != expert:
            return Reason.NO_SOURCE, f"slot {src} of layer {layer} does not hold {transfer}"
        if after[layer][dst] != expert:
            return Reason.MALFORMED, f"{transfer} does not end where the rows put it"
        if dst // placement.slots_per_rank == rank:
            needed += transfer.nbytes
    if needed > staging_bytes:
        return Reason.STAGING_TOO_SMALL, f"{needed} bytes to stage, room for {staging_bytes}"
    return None
