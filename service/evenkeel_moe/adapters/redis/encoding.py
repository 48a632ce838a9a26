"""The stored form of plans, placements and window chunks.

Stored bytes may be old, truncated or written by something else. Reading them raises Unreadable and
nothing else; the store skips what it cannot read.
"""

import asyncio
import base64
import itertools
import json
import math
import operator
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from evenkeel_moe.adapters.redis import stored_values as stored
from evenkeel_moe.adapters.redis.unpacking import (
    Room,
    Unreadable,
    decompress,
    frame_size,
    reading,
)
from evenkeel_moe.errors import Reason
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord, Transfer, Wave

_T = TypeVar("_T")
_VERSION = 1
_WINDOW_VERSION = 2
_WINDOW_LEVEL = -1
"""Compression level of zstd: higher ones search for repetitions that are not there."""
_PLAN_VERSION = 2
_WINDOW_HEADER = struct.Struct("<BBIIII")
"""Version, bytes of a count, steps, layers, experts, ranks."""
_SOURCE_HEADER = struct.Struct("<BIII")
"""Version, ranks, layers, experts."""
_LARGE_MAP = 1 << 15
"""Slots of all layers above which a map is packed in a thread."""
_FIELDS = operator.attrgetter(*(field.name for field in fields(Transfer)))
MAX_WINDOW_BYTES = 1 << 28
"""The most bytes of a window's steps that are kept; see `controller.ingest.group_memory`."""
_MAX_SOURCE_BYTES = 1 << 25
"""The most bytes of source-side sums that are kept."""
_MAX_PLAN_BYTES, _MAX_PLAN_VALUES = 1 << 26, 1 << 17
"""The most bytes and values of a plan's JSON. Its maps are packed in a few long texts: with 2^22
cells and half a million transfers it has 42 MB and 3000 values, and with 1024 waves 14,000."""
_MAX_MAP_BYTES, _MAX_MAP_VALUES = 1 << 25, 64
"""The same of a placement's JSON."""
_TRANSFER_BYTES = 256
"""Memory of one transfer."""
_BLOCK = 4096
"""Counts split into bytes at a time: they stay in the nearest cache until their last byte."""


@kernel
def by_byte(counts: NDArray[np.uint32], planes: NDArray[np.uint8], first: int, apart: int) -> None:
    """Write the lowest bytes of all counts to planes[first:], the next to planes[first + apart:].

    This continues with further bytes as long as `planes` has room.
    """
    for start in range(0, len(counts), _BLOCK):
        block = counts[start : start + _BLOCK]
        for byte in range(len(planes) // apart):
            plane = planes[first + byte * apart + start :][: len(block)]
            shift = np.uint32(8 * byte)
            for i in range(len(block)):
                plane[i] = np.uint8(block[i] >> shift)


def pack_window(*parts: LoadWindow) -> bytes:
    """Encode one chunk of a window, given as one or more consecutive parts.

    Source-side sums are stored apart. Counts are stored by byte, the lowest bytes of all counts
    first. Those are noise, which zstd skips; the higher bytes are nearly all equal. This takes a
    third of the time of whole numbers, and an eighth less space.
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


def unpack_window(data: bytes, sizes: tuple[int, int, int], most_steps: int) -> LoadWindow:
    """Decode a chunk, without source-side sums.

    Args:
        data: of the chunk.
        sizes: (L, E, R) of the deployment.
        most_steps: largest number of steps.

    Raises:
        Unreadable: it is no chunk of these sizes; nothing is then decompressed.
    """
    return reading(lambda: _window_of(data, sizes, most_steps))


def _window_of(data: bytes, sizes: tuple[int, int, int], most_steps: int) -> LoadWindow:
    version, width, length, layers, experts, ranks = _unpack_header(_WINDOW_HEADER, data)
    if version != _WINDOW_VERSION or not 1 <= width <= 4:
        raise Unreadable(f"window chunk of version {version} with counts of {width} bytes")
    if (layers, experts, ranks) != sizes or length > most_steps:
        raise Unreadable(
            f"window chunk of {length} steps x {layers} layers x {experts} experts, {ranks} ranks;"
            f" expected at most {most_steps} steps of {sizes}"
        )
    if length * (16 + 16 * ranks + 4 * layers * experts) > MAX_WINDOW_BYTES:
        raise Unreadable(f"window chunk of {length} x {layers} x {experts} counts")
    want = length * (16 + 16 * ranks + width * layers * experts)
    body = decompress(data[_WINDOW_HEADER.size :], want)
    offset = 0

    def take(dtype: str, *shape: int) -> NDArray[Any]:
        nonlocal offset
        array = np.frombuffer(body, dtype, count=int(np.prod(shape)), offset=offset).reshape(shape)
        offset += array.nbytes
        return array

    steps, epochs = take("<i8", length), take("<i8", length)
    tokens, compute_s = take("<i8", length, ranks), take("<f8", length, ranks)
    counts = np.zeros((length, layers, experts), "<u4")
    planes = counts.view(np.uint8).reshape(length, layers, experts, 4)
    for byte in range(width):
        planes[..., byte] = take("u1", length, layers, experts)
    if length == 0 or (np.diff(steps) <= 0).any() or min(steps[0], epochs.min()) < 0:
        raise ValueError("the steps do not rise from one to the next, or a number is below 0")
    if tokens.size and tokens.min() < 0:
        raise ValueError(f"a rank has {tokens.min()} tokens")
    return LoadWindow(
        counts.astype(np.uint32, copy=False),
        steps.astype(np.int64),
        epochs.astype(np.int64),
        tokens.astype(np.int64),
        compute_s.astype(np.float64),
    )


def pack_source(source: NDArray[np.uint32]) -> bytes:
    """Encode source-side sums, (R, L, E) [tokens]."""
    header = _SOURCE_HEADER.pack(_VERSION, *source.shape)
    return header + zstandard.ZstdCompressor(level=1).compress(source.astype("<u4").tobytes())


def unpack_source(data: bytes, sizes: tuple[int, int, int]) -> NDArray[np.uint32]:
    """Decode source-side sums.

    Args:
        data: of the sums.
        sizes: (R, L, E) of the deployment.

    Raises:
        Unreadable: they are not of these sizes; nothing is then decompressed.
    """
    return reading(lambda: _source_of(data, sizes))


def _source_of(data: bytes, sizes: tuple[int, int, int]) -> NDArray[np.uint32]:
    version, *found = _unpack_header(_SOURCE_HEADER, data)
    want = 4 * math.prod(sizes)
    if version != _VERSION or tuple(found) != sizes or want > _MAX_SOURCE_BYTES:
        raise Unreadable(f"source sums of version {version} and {tuple(found)}, expected {sizes}")
    body = decompress(data[_SOURCE_HEADER.size :], want)
    return np.frombuffer(body, "<u4").reshape(sizes).astype(np.uint32)


async def pack_off_loop(pack: Callable[[_T], bytes], value: _T, placement: Placement) -> bytes:
    """Pack a value with a large map in a thread: it takes long, and leases must be renewed."""
    if placement.phy2log.size <= _LARGE_MAP:
        return pack(value)
    return await asyncio.to_thread(pack, value)


def pack_placement(placement: Placement) -> bytes:
    """Encode a placement."""
    return json.dumps(_placement_form(placement)).encode()


def unpack_placement(data: bytes, room: Room | None = None) -> Placement:
    """Decode a placement; without a room it has one of its own."""
    room = room or Room()
    return reading(
        lambda: _placement_of(stored.parse_json(data, _MAX_MAP_BYTES, _MAX_MAP_VALUES), room)
    )


def pack_plan(record: PlanRecord) -> bytes:
    """Encode a whole plan record."""
    form = _form_of(record, _RECORD_READERS) | {
        "version": _PLAN_VERSION,
        "plan": _form_of(record.plan, [*_PLAN_READERS, *_MAP_READERS]),
    }
    return zstandard.ZstdCompressor(level=3).compress(json.dumps(form).encode())


def unpack_plan(data: bytes, room: Room | None = None) -> PlanRecord:
    """Decode a plan record; without a room it has one of its own."""
    return reading(lambda: _plan_of(data, room or Room()))


def _plan_of(data: bytes, room: Room) -> PlanRecord:
    size = frame_size(data)
    if size > _MAX_PLAN_BYTES:
        raise Unreadable(f"unpacks to {size} bytes, at most {_MAX_PLAN_BYTES}")
    room.take(size)
    form = stored.parse_json(decompress(data, size), _MAX_PLAN_BYTES, _MAX_PLAN_VALUES)
    plan = {name: read(form["plan"][name]) for name, read in _PLAN_READERS.items()}
    plan |= {name: read(form["plan"][name], room) for name, read in _MAP_READERS.items()}
    record = {
        name: read(form[name])
        for name, read in _RECORD_READERS.items()
        if name in form or name not in _NEWER
    }
    return _checked(PlanRecord(plan=Plan(**plan), **record))


def _checked(record: PlanRecord) -> PlanRecord:
    """Return a record whose parts fit each other: others count on it."""
    plan = record.plan
    base, waves = plan.base, plan.waves
    if plan.target.sizes != base.sizes or record.waves_committed > len(waves):
        raise ValueError(f"{record.waves_committed} of {len(waves)} waves, sizes {base.sizes}")
    for index, wave in enumerate(waves):
        layers, rows = wave.layers, wave.rows
        sound = (
            wave.index == index
            and len(set(layers)) == len(layers) > 0
            and all(layer < base.num_layers for layer in layers)
            and rows.shape == (len(layers), base.num_slots)
            and -1 <= rows.min()
            and rows.max() < base.num_logical_experts
            and all(
                t.layer in layers and max(t.src_slot, t.dst_slot) < base.num_slots
                for t in wave.transfers
            )
        )
        if not sound:
            raise ValueError(f"wave {index} does not fit a placement of {base.sizes}")
    return record


def _form_of(value: object, names: Iterable[str]) -> dict[str, Any]:
    form = {name: getattr(value, name) for name in names}
    return {name: _WRITERS.get(name, _same)(field) for name, field in form.items()}


def _same(value: Any) -> Any:
    return value


def _placement_form(placement: Placement) -> dict[str, Any]:
    return {
        "shape": placement.phy2log.shape,
        "ranks": placement.num_ranks,
        "experts": placement.num_logical_experts,
        "phy2log": _array_form(placement.phy2log.astype("<i4")),
    }


def _placement_of(form: dict[str, Any], room: Room) -> Placement:
    return Placement(
        _array_of(form["phy2log"], form["shape"], room),
        stored.whole(form["ranks"]),
        stored.whole(form["experts"]),
    )


def _wave_form(wave: Wave) -> dict[str, Any]:
    return {
        "index": wave.index,
        "layers": wave.layers,
        "shape": wave.rows.shape,
        "rows": _array_form(wave.rows.astype("<i4")),
        # One array: a plan may have ten thousand transfers, and is written after every wave.
        "transfers": _array_form(np.array([_FIELDS(t) for t in wave.transfers], "<i8")),
        "batches": [len(batch) for batch in wave.batches],
    }


def _wave_of(form: dict[str, Any], room: Room) -> Wave:
    sizes = [stored.whole(size) for size in form["batches"]]
    room.take(_TRANSFER_BYTES * sum(sizes))
    table_form = [sum(sizes), len(fields(Transfer))]
    table = _array_of(form["transfers"], table_form, room, "<i8").tolist()
    transfers = iter([Transfer(*map(stored.whole, row)) for row in table])
    batches = tuple(tuple(itertools.islice(transfers, size)) for size in sizes)
    rows = _array_of(form["rows"], form["shape"], room)
    layers = tuple(map(stored.whole, form["layers"]))
    return Wave(stored.whole(form["index"]), layers, rows, batches)


def _array_form(array: NDArray[np.integer[Any]]) -> str:
    packed = zstandard.ZstdCompressor(level=3).compress(array.tobytes())
    return base64.b64encode(packed).decode()


def _array_of(text: str, shape: list[int], room: Room, dtype: str = "<i4") -> NDArray[Any]:
    kind = np.dtype(dtype)
    want = kind.itemsize * math.prod(map(stored.whole, shape))
    room.take(want)
    data = decompress(base64.b64decode(text), want)
    return np.frombuffer(data, kind).reshape(shape).astype(kind.newbyteorder("="))


def _unpack_header(header: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < header.size:
        raise Unreadable(f"{len(data)} bytes, the header alone has {header.size}")
    return header.unpack_from(data)


def _delivered_of(form: dict[str, Any] | None) -> DeliveredGain | None:
    """Read a measured gain; its values are checked by `DeliveredGain`."""
    if form is None:
        return None
    gains = ("gain", "error", "lower", "upper", "modelled")
    known = {name: None if form[name] is None else float(form[name]) for name in gains}
    return DeliveredGain(
        at=float(form["at"]),
        **known,
        steps=int(form["steps"]),
        cost_source=str(form["cost_source"]),
        unknown_because=str(form["unknown_because"]),
    )


_NEWER = frozenset({"delivered"})
"""Fields that records of older versions lack; they then have their default."""

_WRITERS: dict[str, Callable[[Any], Any]] = {
    "base": _placement_form,
    "target": _placement_form,
    "waves": lambda waves: [_wave_form(wave) for wave in waves],
    "delivered": lambda delivered: None if delivered is None else asdict(delivered),
}
"""Fields whose JSON form is not the value itself."""

_PLAN_READERS: dict[str, Callable[[Any], Any]] = {
    "plan_id": stored.text,
    "deployment": stored.text,
    "kind": PlanKind,
    "policy": stored.text,
    "reason": Reason,
    "generation": stored.text,
    "weights_version": stored.whole,
    "base_epoch": stored.whole,
    "created_at": stored.number,
    "expires_at": stored.optional_number,
    "allow_duplicates": stored.flag,
    "numbers": stored.numbers,
}
"""Field of a Plan, without its maps -> conversion from JSON."""

_MAP_READERS: dict[str, Callable[[Any, Room], Any]] = {
    "base": _placement_of,
    "target": _placement_of,
    "waves": lambda waves, room: tuple(_wave_of(wave, room) for wave in waves),
}
"""The same of its maps, which are unpacked into a room."""

_RECORD_READERS: dict[str, Callable[[Any], Any]] = {
    "phase": PlanPhase,
    "reason": Reason,
    "waves_committed": stored.whole,
    "updated_at": stored.number,
    "error": stored.optional_text,
    "approved_by": stored.optional_text,
    "request_digest": stored.optional_text,
    "story": stored.rows,
    "delivered": _delivered_of,
}
"""Field of a PlanRecord, without its plan -> conversion from JSON."""
