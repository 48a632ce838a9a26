"""The largest messages that a rank can rightly send, and get."""

from evenkeel_moe.model.load import STEP
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.wire.reports import MAX_REPORT_STEPS

MAX_HELLO_BYTES = 1 << 16
"""A Hello has a few kilobytes: 64 capabilities of 64 characters and some names."""
_OTHER_BYTES = 1 << 18
"""Names, texts and curves."""
_SLOT_BYTES = 64
"""4 of a row, 8 of a checksum, at most 41 of a transfer and 7 of its batch."""


def most_message_bytes(shape: ModelShape) -> int:
    """Return the most bytes of a rank's message after its Hello, from the shape it declared.

    The largest are a report of all the steps that one may hold, and a state with the whole
    placement and all checksums.
    """
    layers, experts = shape.num_layers, shape.num_logical_experts
    step = STEP.itemsize + 4 * layers * max(shape.slots_per_rank, experts)
    state = 4 * layers * shape.num_slots + 10 * layers * experts
    return _OTHER_BYTES + max(MAX_REPORT_STEPS * step, state)


def most_order_bytes(shape: ModelShape) -> int:
    """Return the most bytes of a controller's message to a rank of a shape.

    The largest is a Prepare that writes every slot: its rows, and for each slot a transfer, a batch
    and a checksum.
    """
    return _OTHER_BYTES + _SLOT_BYTES * shape.num_layers * shape.num_slots
