"""Codecs of the values that messages contain: identities, keys, shapes, placements, waves."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, PeerViolation, Reason
from evenkeel_moe.model.ids import DEPLOYMENT_ID, is_deployment_id
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Leader, Lineage, RankIdentity
from evenkeel_moe.protocol.terms import MAX_TERM
from evenkeel_moe.v1 import common_pb2 as pb
from evenkeel_moe.wire.fields import MessageCodec, count, nested, text

MAX_CELLS = 1 << 22
"""Largest number of (layer, slot) or (layer, expert) cells of a deployment: ten times that of 92
layers with 4096 slots. It bounds what a peer can make us allocate, and how long the event loop
works on one map."""
MAX_LAYERS = 1024
"""Largest number of layers: some work is done layer by layer. The deepest models have about 130."""


def is_allowed_size(layers: int, width: int) -> bool:
    """Return True if a deployment may have so many layers of so many slots or experts."""
    return layers <= MAX_LAYERS and layers * width <= MAX_CELLS


# --- identities and keys --------------------------------------------------------------------


def _check_identity(identity: RankIdentity) -> None:
    name = identity.deployment
    if not is_deployment_id(name):
        raise PeerViolation(f"deployment {name[:80]!r} is not {DEPLOYMENT_ID}")


_NAME = text(128, empty=False)
_LEADER = MessageCodec(
    Leader, pb.Leader, leader_id=text(256, empty=False), term=count(MAX_TERM, least=1)
)
_IDENTITY = MessageCodec(RankIdentity, pb.RankIdentity, check=_check_identity, generation=_NAME)
_LINEAGE = MessageCodec(Lineage, pb.Lineage, generation=_NAME)
_WAVE_KEY = MessageCodec(WaveKey, pb.WaveKey, generation=_NAME, plan_id=_NAME)

# --- shapes and placements ------------------------------------------------------------------

_SHAPE = MessageCodec(ModelShape, pb.ModelShape, invalid=Reason.WRONG_SHAPE)


def _decode_shape(message: pb.ModelShape) -> ModelShape:
    width = max(message.num_ranks * message.slots_per_rank, message.num_logical_experts)
    cells = message.num_layers * width
    if not is_allowed_size(message.num_layers, width):
        raise PeerViolation(
            f"{message.num_layers} layers x {width} slots or experts = {cells} cells,"
            f" at most {MAX_LAYERS} layers and {MAX_CELLS} cells are allowed",
            Reason.WRONG_SHAPE,
        )
    return _SHAPE.decode(message)


def encode_placement(placement: Placement) -> pb.PlacementMap:
    """Return the message for a placement."""
    return pb.PlacementMap(
        num_layers=placement.num_layers,
        num_slots=placement.num_slots,
        num_ranks=placement.num_ranks,
        num_logical_experts=placement.num_logical_experts,
        physical_to_logical=placement.phy2log.astype("<i4").tobytes(),
    )


def decode_placement(message: pb.PlacementMap) -> Placement:
    """Return the placement.

    Raises:
        PeerViolation: it cannot be right.
    """
    rows = _decode_rows("map", message.physical_to_logical, message.num_layers, message.num_slots)
    try:
        return Placement(rows, message.num_ranks, message.num_logical_experts)
    except EvenkeelError as error:
        raise PeerViolation(str(error), error.reason) from None


def _decode_rows(what: str, data: bytes, rows: int, slots: int) -> NDArray[np.int32]:
    if not (0 < rows * slots and is_allowed_size(rows, slots)):
        raise PeerViolation(
            f"{what} of {rows} layers x {slots} slots, 1 to {MAX_LAYERS} layers and 1 to"
            f" {MAX_CELLS} cells are allowed"
        )
    if len(data) != 4 * rows * slots:
        raise PeerViolation(
            f"{what} has {len(data)} bytes, {rows} layers x {slots} slots x 4 = {4 * rows * slots}",
            Reason.BAD_LENGTH,
        )
    return np.frombuffer(data, "<i4").reshape(rows, slots).astype(np.int32)


# --- waves ----------------------------------------------------------------------------------

_TRANSFER = MessageCodec(Transfer, pb.Transfer)


def encode_wave(wave: Wave) -> pb.Wave:
    """Return the message for a wave."""
    return pb.Wave(
        index=wave.index,
        layers=wave.layers,
        num_slots=int(wave.rows.shape[1]),
        rows=wave.rows.astype("<i4").tobytes(),
        batches=[pb.Batch(transfers=map(_TRANSFER.encode, batch)) for batch in wave.batches],
    )


def decode_wave(message: pb.Wave) -> Wave:
    """Return the wave. Whoever uses it checks that it fits the deployment.

    Raises:
        PeerViolation: it cannot be right.
    """
    rows = _decode_rows("wave", message.rows, len(message.layers), message.num_slots)
    _check_transfers(message, rows.size)
    batches = tuple(tuple(map(_TRANSFER.decode, batch.transfers)) for batch in message.batches)
    try:
        return Wave(message.index, tuple(message.layers), rows, batches)
    except EvenkeelError as error:
        raise PeerViolation(str(error), error.reason) from None


def _check_transfers(message: pb.Wave, slots: int) -> None:
    """Refuse more transfers than slots to write, before they are read: there may be millions."""
    batches = len(message.batches)
    found = batches if batches > slots else sum(len(one.transfers) for one in message.batches)
    if max(batches, found) > slots:
        raise PeerViolation(
            f"wave {message.index} has {found} transfers in {batches} batches for {slots} slots",
            Reason.LIMIT_EXCEEDED,
        )


message_codec = partial(
    MessageCodec,
    types={
        Leader: nested(_LEADER.decode, _LEADER.encode),
        RankIdentity: nested(_IDENTITY.decode, _IDENTITY.encode),
        Lineage: nested(_LINEAGE.decode, _LINEAGE.encode),
        WaveKey: nested(_WAVE_KEY.decode, _WAVE_KEY.encode),
        ModelShape: nested(_decode_shape, _SHAPE.encode),
        Placement: nested(decode_placement, encode_placement),
        Wave: nested(decode_wave, encode_wave),
    },
)
"""A `MessageCodec` that knows the values above."""
