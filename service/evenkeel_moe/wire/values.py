"""The values both directions share: checks, shapes, maps, waves."""

import math

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, PeerViolation, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Leader, RankIdentity
from evenkeel_moe.v1 import common_pb2 as pb

__all__ = [
    "MAX_CELLS",
    "MAX_TERM",
    "check_count",
    "check_seconds",
    "check_text",
    "decode_identity",
    "decode_key",
    "decode_leader",
    "decode_placement",
    "decode_reason",
    "decode_shape",
    "decode_wave",
    "encode_identity",
    "encode_key",
    "encode_leader",
    "encode_placement",
    "encode_shape",
    "encode_wave",
    "is_deployment_id",
]

MAX_CELLS = 1 << 26
"""Most (layer, slot) or (layer, expert) cells a deployment may have: no peer makes us allocate more."""
_MAX_TEXT = 4096
_MAX_INT = (1 << 63) - 1
MAX_TERM = 1 << 52
"""The store's scripts count terms as doubles: above 2**53 the next term would be the same one."""
_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")


def is_deployment_id(text: str) -> bool:
    """Whether text is `[a-z0-9][a-z0-9._-]{0,62}`: safe in keys, labels and paths."""
    return 1 <= len(text) <= 63 and text[0] not in "._-" and _ID_CHARS.issuperset(text)


def check_text(what: str, text: str, most: int = _MAX_TEXT, *, empty: bool = True) -> str:
    """The text if it is not too long, and not empty where that is no answer."""
    if len(text) > most:
        raise PeerViolation(f"{what} has {len(text)} characters, at most {most} are allowed")
    if not text and not empty:
        raise PeerViolation(f"{what} is empty")
    return text


def check_count(what: str, value: int, most: int = _MAX_INT) -> int:
    """The value if it fits; unsigned fields reach 2**64 and every store and array of ours is signed."""
    if not 0 <= value <= most:
        raise PeerViolation(f"{what} is {value}, at most {most} is allowed")
    return value


def check_seconds(what: str, value: float, *, above_zero: bool = False) -> float:
    """The value if it is a finite, not negative duration."""
    if not math.isfinite(value):
        raise PeerViolation(f"{what} is {value}", Reason.NOT_FINITE)
    if value < 0 or (above_zero and value == 0):
        raise PeerViolation(
            f"{what} is {value}, must {'be above' if above_zero else 'not be below'} 0"
        )
    return value


def decode_reason(what: str, text: str) -> Reason:
    """A Reason from its wire name."""
    try:
        return Reason(text)
    except ValueError:
        raise PeerViolation(f"{what} {text[:80]!r} is not a known reason") from None


def encode_leader(leader: Leader) -> pb.Leader:
    """Leader to wire."""
    return pb.Leader(leader_id=leader.leader_id, term=leader.term)


def decode_leader(message: pb.Leader) -> Leader:
    """Leader from wire."""
    if message.term < 1:
        raise PeerViolation("leader term is 0, terms start at 1")
    return Leader(
        check_text("leader id", message.leader_id, 256, empty=False),
        check_count("term", message.term, MAX_TERM),
    )


def encode_identity(identity: RankIdentity) -> pb.RankIdentity:
    """RankIdentity to wire."""
    return pb.RankIdentity(
        deployment=identity.deployment,
        rank=identity.rank,
        generation=identity.generation,
        incarnation=identity.incarnation,
    )


def decode_identity(message: pb.RankIdentity) -> RankIdentity:
    """RankIdentity from wire."""
    if not is_deployment_id(message.deployment):
        raise PeerViolation(
            f"deployment {message.deployment[:80]!r} is not [a-z0-9][a-z0-9._-]{{0,62}}"
        )
    return RankIdentity(
        DeploymentId(message.deployment),
        EpRank(message.rank),
        Generation(check_text("generation", message.generation, 128, empty=False)),
        check_count("incarnation", message.incarnation),
    )


def encode_shape(shape: ModelShape) -> pb.ModelShape:
    """ModelShape to wire."""
    return pb.ModelShape(
        num_layers=shape.num_layers,
        num_logical_experts=shape.num_logical_experts,
        num_ranks=shape.num_ranks,
        slots_per_rank=shape.slots_per_rank,
        top_k=shape.top_k,
        bytes_per_expert=shape.bytes_per_expert,
        num_expert_groups=shape.num_expert_groups,
        pool_slots_per_rank=shape.pool_slots_per_rank,
    )


def decode_shape(message: pb.ModelShape) -> ModelShape:
    """ModelShape from wire, bounded by MAX_CELLS."""
    slots = message.num_ranks * message.slots_per_rank
    cells = message.num_layers * max(slots, message.num_logical_experts)
    if cells > MAX_CELLS:
        raise PeerViolation(
            f"{message.num_layers} layers x {max(slots, message.num_logical_experts)} slots or experts ="
            f" {cells} cells, at most {MAX_CELLS} are allowed",
            Reason.WRONG_SHAPE,
        )
    try:
        return ModelShape(
            num_layers=message.num_layers,
            num_logical_experts=message.num_logical_experts,
            num_ranks=message.num_ranks,
            slots_per_rank=message.slots_per_rank,
            top_k=message.top_k,
            bytes_per_expert=check_count("bytes_per_expert", message.bytes_per_expert),
            num_expert_groups=message.num_expert_groups,
            pool_slots_per_rank=(
                message.pool_slots_per_rank if message.HasField("pool_slots_per_rank") else None
            ),
        )
    except PeerViolation:
        raise
    except EvenkeelError as error:
        raise PeerViolation(str(error), Reason.WRONG_SHAPE) from None


def encode_placement(placement: Placement) -> pb.PlacementMap:
    """Placement to wire."""
    return pb.PlacementMap(
        num_layers=placement.num_layers,
        num_slots=placement.num_slots,
        num_ranks=placement.num_ranks,
        num_logical_experts=placement.num_logical_experts,
        physical_to_logical=placement.phy2log.astype("<i4").tobytes(),
    )


def decode_placement(message: pb.PlacementMap) -> Placement:
    """Placement from wire."""
    rows = _decode_rows("map", message.physical_to_logical, message.num_layers, message.num_slots)
    try:
        return Placement(rows, message.num_ranks, message.num_logical_experts)
    except EvenkeelError as error:
        raise PeerViolation(str(error), error.reason) from None


def _decode_rows(what: str, data: bytes, rows: int, slots: int) -> NDArray[np.int32]:
    if not 0 < rows * slots <= MAX_CELLS:
        raise PeerViolation(
            f"{what} of {rows} layers x {slots} slots, 1 to {MAX_CELLS} cells are allowed"
        )
    if len(data) != 4 * rows * slots:
        raise PeerViolation(
            f"{what} has {len(data)} bytes, {rows} layers x {slots} slots x 4 = {4 * rows * slots}",
            Reason.BAD_LENGTH,
        )
    return np.frombuffer(data, "<i4").reshape(rows, slots).astype(np.int32)


def encode_key(key: WaveKey) -> pb.WaveKey:
    """WaveKey to wire."""
    return pb.WaveKey(
        generation=key.generation,
        plan_id=key.plan_id,
        wave_index=key.wave_index,
        weights_version=key.weights_version,
        base_epoch=key.base_epoch,
    )


def decode_key(message: pb.WaveKey) -> WaveKey:
    """WaveKey from wire."""
    return WaveKey(
        Generation(check_text("generation", message.generation, 128, empty=False)),
        PlanId(check_text("plan id", message.plan_id, 128, empty=False)),
        message.wave_index,
        check_count("weights version", message.weights_version),
        Epoch(check_count("plan's base epoch", message.base_epoch)),
    )


def encode_wave(wave: Wave) -> pb.Wave:
    """Wave to wire."""
    return pb.Wave(
        index=wave.index,
        layers=wave.layers,
        num_slots=int(wave.rows.shape[1]),
        rows=wave.rows.astype("<i4").tobytes(),
        batches=[
            pb.Batch(
                transfers=[
                    pb.Transfer(
                        layer=t.layer,
                        logical_expert=t.logical_expert,
                        src_slot=t.src_slot,
                        dst_slot=t.dst_slot,
                        nbytes=t.nbytes,
                    )
                    for t in batch
                ]
            )
            for batch in wave.batches
        ],
    )


def decode_wave(message: pb.Wave) -> Wave:
    """Wave from wire; whether it fits the deployment is for the rank to screen."""
    rows = _decode_rows("wave", message.rows, len(message.layers), message.num_slots)
    layers = tuple(message.layers)
    if len(set(layers)) != len(layers):
        raise PeerViolation(f"wave {message.index} names a layer twice: {layers}")
    batches = tuple(
        tuple(_decode_transfer(t, message.num_slots) for t in batch.transfers)
        for batch in message.batches
    )
    return Wave(message.index, layers, rows, batches)


def _decode_transfer(message: pb.Transfer, num_slots: int) -> Transfer:
    if message.src_slot >= num_slots or message.dst_slot >= num_slots:
        raise PeerViolation(
            f"transfer from slot {message.src_slot} to {message.dst_slot}, there are {num_slots} slots"
        )
    return Transfer(
        message.layer,
        message.logical_expert,
        message.src_slot,
        message.dst_slot,
        check_count("nbytes", message.nbytes),
    )
