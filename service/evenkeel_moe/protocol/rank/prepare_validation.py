"""A rank's checks of a Prepare, before it touches anything: form, transfers, checksums, space."""

from collections.abc import Sequence

import numpy as np

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Prepare
from evenkeel_moe.protocol.wave_checks import transfers_refusal


def prepare_refusal(
    prepare: Prepare,
    placement: Placement,
    rank: int,
    shape: ModelShape,
    staging_bytes: int,
    registered: Sequence[int],
) -> tuple[Reason, str] | None:
    """Return the reason why this rank cannot take the wave, with the numbers; None if it can.

    Args:
        placement: the rank's placement before the wave.
        registered: (L * E) unsigned 64-bit checksums, layer-major, as registered at load (R4).
    """
    body = prepare.body
    layers, slots = body.layers, placement.num_slots
    if max(layers) >= shape.num_layers or body.rows.shape[1] != slots:
        found = f"layers {layers}, rows {body.rows.shape}"
        return Reason.MALFORMED, f"{found}; there are {shape.num_layers} layers of {slots} slots"
    try:
        new = placement.with_rows(layers, body.rows)
    except EvenkeelError as error:
        return error.reason, str(error)
    for layer, row in zip(layers, body.rows, strict=True):
        missing = shape.num_logical_experts - len(np.unique(row[row >= 0]))
        if missing:
            detail = f"{missing} experts of layer {layer} would have no replica"
            return Reason.EXPERT_WITHOUT_REPLICA, detail
    refusal = transfers_refusal(body, placement, new, Reason.MALFORMED)
    if refusal is not None:
        return refusal
    told = {transfer.nbytes for transfer in body.transfers} - {shape.bytes_per_expert}
    if told:
        detail = f"a transfer of {min(told)} bytes, an expert has {shape.bytes_per_expert}"
        return Reason.MALFORMED, detail
    refusal = _checksums_refusal(prepare, shape, registered)
    if refusal is not None:
        return refusal
    per_rank = placement.slots_per_rank
    needed = sum(t.nbytes for t in body.transfers if t.dst_slot // per_rank == rank)
    if needed > staging_bytes:
        return Reason.STAGING_TOO_SMALL, f"{needed} bytes to stage, room for {staging_bytes}"
    return None


def _checksums_refusal(
    prepare: Prepare, shape: ModelShape, registered: Sequence[int]
) -> tuple[Reason, str] | None:
    """R4: refuse a wave unless it gives the checksum of every transfer as registered at load."""
    checksums, transfers = prepare.checksums, prepare.body.transfers
    if len(checksums) != len(transfers):
        return Reason.MALFORMED, f"{len(checksums)} checksums for {len(transfers)} transfers"
    experts = shape.num_logical_experts
    if len(registered) != shape.num_layers * experts:
        wanted = f"(layers, experts) = ({shape.num_layers}, {experts})"
        return Reason.OBSERVE_ONLY, f"{len(registered)} checksums are registered, {wanted}"
    for transfer, checksum in zip(transfers, checksums, strict=True):
        known = registered[transfer.layer * experts + transfer.logical_expert]
        if checksum != known:
            detail = f"{transfer} with checksum {checksum:#x}, registered is {known:#x}"
            return Reason.CHECKSUM_MISMATCH, detail
    return None
