"""The bytes in which plans, placements and window chunks are stored, and back.

Whatever is read may be old, cut off or written by something else: reading raises Unreadable and nothing
else, and the store drops what it cannot read instead of failing on it.
"""

import base64
import itertools
import json
import operator
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.ids import DeploymentId, Epoch, Generation, PlanId
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord, Transfer, Wave

__all__ = [
    "Unreadable",
    "pack_placement",
    "pack_plan",
    "pack_source",
    "pack_window",
    "unpack_placement",
    "unpack_plan",
    "unpack_source",
    "unpack_window",
]

_T = TypeVar("_T")
_VERSION = 1
_WINDOW_VERSION = 2
_WINDOW_LEVEL = -1
"""Of zstd: higher ones look for what is not there."""
_PLAN_VERSION = 2
_WINDOW_HEADER = struct.Struct("<BBIIII")
"""Version, bytes of a count, steps, layers, experts, ranks."""
_SOURCE_HEADER = struct.Struct("<BIII")
_FIELDS = operator.attrgetter(*(field.name for field in fields(Transfer)))
_MAX_BYTES = 1 << 30
"""No stored value may unpack to more."""
_BLOCK = 4096
"""Counts split into bytes at a time: they stay in the nearest cache for their next byte."""


class Unreadable(Exception):
    """Stored bytes that are not what was written."""


@kernel
def by_byte(counts: NDArray[np.uint32], planes: NDArray[np.uint8], first: int, apart: int) -> None:
    """Write the lowest byte of every count to planes[first:], the next to planes[first + apart:], ..., as many as fit."""
    for start in range(0, len(counts), _BLOCK):
        block = counts[start : start + _BLOCK]
        for byte in range(len(planes) // apart):
            plane = planes[first + byte * apart + start :][: len(block)]
            shift = np.uint32(8 * byte)
            for i in range(len(block)):
                plane[i] = np.uint8(block[i] >> shift)


def pack_window(*parts: LoadWindow) -> bytes:
    """One chunk of a window, given in consecutive parts, at least one; the source-side sums are stored apart.

    Counts go byte by byte, the lowest of all counts first: those are noise, which zstd passes over, and the higher
    ones nearly all alike. This takes a third of the time of whole numbers, and an eighth less room.
    """
    layers, experts = parts[0].counts.shape[1:]
    length = sum(map(len, parts))
    most = max(int(part.counts.max(initial=0)) for part in parts)
    width = max(1, -(-most.bit_length() // 8))
    header = _WINDOW_HEADER.pack(
        _WINDOW_VERSION, width, length, layers, experts, parts[0].tokens.shape[1]
    )
    size = length * layers * experts
    planes = np.empty(width * size, np.uint8)
    first = 0
    for part in parts:
        by_byte(part.counts.reshape(-1), planes, first, size)
        first += part.counts.size
    body = b"".join(
        (
            *(part.steps.astype("<i8").tobytes() for part in parts),
            *(part.epochs.astype("<i8").tobytes() for part in parts),
            *(part.tokens.astype("<i8").tobytes() for part in parts),
            *(part.compute_s.astype("<f8").tobytes() for part in parts),
            planes.data,
        )
    )
    return header + zstandard.ZstdCompressor(level=_WINDOW_LEVEL).compress(body)


def unpack_window(data: bytes) -> LoadWindow:
    """A chunk as it was packed, without source-side sums."""
    version, width, length, layers, experts, ranks = _unpack_header(_WINDOW_HEADER, data)
    if version != _WINDOW_VERSION or not 1 <= width <= 4:
        raise Unreadable(f"window chunk of version {version} with counts of {width} bytes")
    if 4 * length * layers * experts > _MAX_BYTES:
        raise Unreadable(f"window chunk of {length} x {layers} x {experts} counts")
    want = length * (16 + 16 * ranks + width * layers * experts)
    body = _decompress(data[_WINDOW_HEADER.size :], want)
    offset = 0

    def take(dtype: str, *shape: int) -> NDArray[Any]:
        nonlocal offset
        array = np.frombuffer(body, dtype, count=int(np.prod(shape)), offset=offset).reshape(shape)
        offset += array.nbytes
        return array

    steps, epochs = take("<i8", length), take("<i8", length)
    tokens, compute_s = take("<i8", length, ranks), take("<f8", length, ranks)
    counts = np.zeros((length, layers, experts), np.uint32)
    for byte in range(width):
        counts |= take("u1", length, layers, experts).astype(np.uint32) << np.uint32(8 * byte)
    return LoadWindow(
        counts,
        steps.astype(np.int64),
        epochs.astype(np.int64),
        tokens.astype(np.int64),
        compute_s.astype(np.float64),
    )


def pack_source(source: NDArray[np.uint32]) -> bytes:
    """(R, L, E) [tokens] source-side sums."""
    header = _SOURCE_HEADER.pack(_VERSION, *source.shape)
    return header + zstandard.ZstdCompressor(level=1).compress(source.astype("<u4").tobytes())


def unpack_source(data: bytes) -> NDArray[np.uint32]:
    """The sums as they were packed."""
    version, *shape = _unpack_header(_SOURCE_HEADER, data)
    if version != _VERSION:
        raise Unreadable(f"source sums of version {version}")
    body = _decompress(data[_SOURCE_HEADER.size :], 4 * int(np.prod(shape)))
    return np.frombuffer(body, "<u4").reshape(shape).astype(np.uint32)


def pack_placement(placement: Placement) -> bytes:
    """A map of its own."""
    return json.dumps(_placement_form(placement)).encode()


def unpack_placement(data: bytes) -> Placement:
    """The map as it was packed."""
    return _read(lambda: _placement_of(json.loads(data)))


def pack_plan(record: PlanRecord) -> bytes:
    """A plan record whole."""
    plan = record.plan
    form = {
        "version": _PLAN_VERSION,
        "plan": {
            "plan_id": plan.plan_id,
            "deployment": plan.deployment,
            "kind": plan.kind,
            "policy": plan.policy,
            "reason": plan.reason,
            "generation": plan.generation,
            "weights_version": plan.weights_version,
            "base_epoch": plan.base_epoch,
            "base": _placement_form(plan.base),
            "target": _placement_form(plan.target),
            "waves": [_wave_form(wave) for wave in plan.waves],
            "created_at": plan.created_at,
            "expires_at": plan.expires_at,
            "allow_duplicates": plan.allow_duplicates,
            "numbers": plan.numbers,
        },
        "phase": record.phase,
        "reason": record.reason,
        "waves_committed": record.waves_committed,
        "updated_at": record.updated_at,
        "error": record.error,
        "approved_by": record.approved_by,
        "request_digest": record.request_digest,
        "story": record.story,
    }
    return zstandard.ZstdCompressor(level=3).compress(json.dumps(form).encode())


def unpack_plan(data: bytes) -> PlanRecord:
    """The record as it was packed."""
    return _read(lambda: _plan_of(json.loads(_decompress(data, None))))


def _plan_of(form: dict[str, Any]) -> PlanRecord:
    body = form["plan"]
    plan = Plan(
        plan_id=PlanId(body["plan_id"]),
        deployment=DeploymentId(body["deployment"]),
        kind=PlanKind(body["kind"]),
        policy=body["policy"],
        reason=Reason(body["reason"]),
        generation=Generation(body["generation"]),
        weights_version=int(body["weights_version"]),
        base_epoch=Epoch(int(body["base_epoch"])),
        base=_placement_of(body["base"]),
        target=_placement_of(body["target"]),
        waves=tuple(_wave_of(wave) for wave in body["waves"]),
        created_at=float(body["created_at"]),
        expires_at=body["expires_at"],
        allow_duplicates=bool(body["allow_duplicates"]),
        numbers=dict(body["numbers"]),
    )
    return PlanRecord(
        plan=plan,
        phase=PlanPhase(form["phase"]),
        reason=Reason(form["reason"]),
        waves_committed=int(form["waves_committed"]),
        updated_at=float(form["updated_at"]),
        error=form["error"],
        approved_by=form["approved_by"],
        request_digest=form["request_digest"],
        story=tuple(form["story"]),
    )


def _placement_form(placement: Placement) -> dict[str, Any]:
    return {
        "shape": placement.phy2log.shape,
        "ranks": placement.num_ranks,
        "experts": placement.num_logical_experts,
        "phy2log": _array_form(placement.phy2log.astype("<i4")),
    }


def _placement_of(form: dict[str, Any]) -> Placement:
    return Placement(
        _array_of(form["phy2log"], form["shape"]), int(form["ranks"]), int(form["experts"])
    )


def _wave_form(wave: Wave) -> dict[str, Any]:
    return {
        "index": wave.index,
        "layers": wave.layers,
        "shape": wave.rows.shape,
        "rows": _array_form(wave.rows.astype("<i4")),
        # As one array: a plan may have ten thousand transfers, and is written again after every wave.
        "transfers": _array_form(np.array([_FIELDS(t) for t in wave.transfers], "<i8")),
        "batches": [len(batch) for batch in wave.batches],
    }


def _wave_of(form: dict[str, Any]) -> Wave:
    sizes = [int(size) for size in form["batches"]]
    table = _array_of(form["transfers"], [sum(sizes), len(fields(Transfer))], "<i8").tolist()
    transfers = iter([Transfer(*row) for row in table])
    batches = tuple(tuple(itertools.islice(transfers, size)) for size in sizes)
    rows = _array_of(form["rows"], form["shape"])
    return Wave(int(form["index"]), tuple(map(int, form["layers"])), rows, batches)


def _array_form(array: NDArray[np.integer[Any]]) -> str:
    packed = zstandard.ZstdCompressor(level=3).compress(array.tobytes())
    return base64.b64encode(packed).decode()


def _array_of(text: str, shape: list[int], dtype: str = "<i4") -> NDArray[Any]:
    kind = np.dtype(dtype)
    data = _decompress(base64.b64decode(text), kind.itemsize * int(np.prod(shape)))
    return np.frombuffer(data, kind).reshape(shape).astype(kind.newbyteorder("="))


def _unpack_header(header: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < header.size:
        raise Unreadable(f"{len(data)} bytes, the header alone has {header.size}")
    return header.unpack_from(data)


def _decompress(data: bytes, want: int | None) -> bytes:
    """The unpacked bytes, exactly `want` of them where that is known."""
    if want is not None and want > _MAX_BYTES:
        raise Unreadable(f"would unpack to {want} bytes, at most {_MAX_BYTES}")
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > _MAX_BYTES or (want is not None and size != want):
            raise Unreadable(f"unpacks to {size} bytes, expected {want}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Unreadable(f"not a zstd frame: {error}") from None


def _read(build: Callable[[], _T]) -> _T:
    try:
        return build()
    except (EvenkeelError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
