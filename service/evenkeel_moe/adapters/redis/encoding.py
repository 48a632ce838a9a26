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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import zstandard
from numpy.typing import ArrayLike, NDArray

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

_VERSION = 1
_WINDOW_VERSION = 2
_WINDOW_LEVEL = -1
"""Compression level of zstd: higher ones search for repetitions that are not there."""
_PLAN_VERSION = 3
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
_MAX_PLAN_BYTES = 1 << 26
"""The most bytes of the JSON of a plan's maps and waves. They are packed in a few long texts, so
its number of values does not grow. With 2^22 cells and half a million transfers it has 42 MB."""
_MAX_MAP_BYTES, _MAX_MAP_VALUES = 1 << 25, 64
"""The same of a placement's JSON."""
_OBJECT_BYTES = 256
"""Memory of one transfer, batch or wave."""
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


async def pack_off_loop(placement: Placement) -> bytes:
    """Encode a large placement in a thread: it takes long, and leases must be renewed."""
    if placement.phy2log.size <= _LARGE_MAP:
        return pack_placement(placement)
    return await asyncio.to_thread(pack_placement, placement)


def pack_placement(placement: Placement) -> bytes:
    """Encode a placement."""
    return json.dumps(_placement_form(placement)).encode()


def unpack_placement(data: bytes, room: Room | None = None) -> Placement:
    """Decode a placement; without a room it has one of its own."""
    room = room or Room()
    return reading(
        lambda: _placement_of(stored.parse_json(data, _MAX_MAP_BYTES, _MAX_MAP_VALUES), room)
    )


def pack_plan_record(record: PlanRecord) -> bytes:
    """Encode a plan record without its maps, waves and story: little, however large the plan is."""
    plan = {**_form_of(record.plan, _PLAN_READERS), "num_waves": len(record.plan.waves)}
    return _pack_json(
        {
            "version": _PLAN_VERSION,
            "plan": plan,
            **_form_of(record, _RECORD_READERS),
            "num_rows": len(record.story),
        }
    )


def pack_plan_maps(plan: Plan) -> bytes:
    """Encode the maps and waves of a plan."""
    base, target = map(_placement_form, (plan.base, plan.target))
    return _pack_json({"base": base, "target": target, "waves": _waves_form(plan.waves)})


def pack_story_row(row: Mapping[str, Any]) -> bytes:
    """Encode one row of a plan's story."""
    return _pack_json(row)


def unpack_plan_record(
    record: bytes, maps: bytes, story: Sequence[bytes], room: Room | None = None
) -> PlanRecord:
    """Decode a plan record from its parts; without a room it has one of its own."""
    room = room or Room()
    return reading(lambda: _record_of(record, maps, story, room))


def _record_of(record: bytes, maps: bytes, story: Sequence[bytes], room: Room) -> PlanRecord:
    form = _unpack_json(record, stored.DOCUMENT_BYTES, room)
    if form["version"] != _PLAN_VERSION:
        raise Unreadable(f"plan of version {form['version']!r:.80}, expected {_PLAN_VERSION}")
    if form["num_rows"] != len(story):
        raise Unreadable(f"{len(story)} of {form['num_rows']!r:.80} rows of its story are here")
    plan = {name: read(form["plan"][name]) for name, read in _PLAN_READERS.items()}
    large = _unpack_json(maps, _MAX_PLAN_BYTES, room)
    plan["base"], plan["target"] = (_placement_of(large[name], room) for name in ("base", "target"))
    plan["waves"] = _waves_of(large["waves"], plan["base"].num_slots, room)
    rows = [stored.mapping(_unpack_json(row, stored.DOCUMENT_BYTES, room)) for row in story]
    values = {name: read(form[name]) for name, read in _RECORD_READERS.items()}
    return _checked(PlanRecord(plan=Plan(**plan), story=tuple(rows), **values))


def _pack_json(form: Mapping[str, Any]) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(json.dumps(form).encode())


def _unpack_json(data: bytes, most_bytes: int, room: Room) -> Any:
    size = frame_size(data)
    if size > most_bytes:
        raise Unreadable(f"unpacks to {size} bytes, at most {most_bytes}")
    room.take(size)
    return stored.parse_json(decompress(data, size), most_bytes)


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
        "phy2log": _array_form(placement.phy2log, "<i4"),
    }


def _placement_of(form: dict[str, Any], room: Room) -> Placement:
    return Placement(
        _array_of(form["phy2log"], form["shape"], room),
        stored.whole(form["ranks"]),
        stored.whole(form["experts"]),
    )


def _waves_form(waves: Sequence[Wave]) -> dict[str, Any]:
    """Pack all waves together: a plan may have thousands, and ten thousands of transfers."""
    batches = [batch for wave in waves for batch in wave.batches]
    transfers = [_FIELDS(t) for batch in batches for t in batch]
    return {
        "number": len(waves),
        "sizes": _array_form([(len(wave.layers), len(wave.batches)) for wave in waves]),
        "layers": _array_form([layer for wave in waves for layer in wave.layers]),
        "rows": _array_form([row for wave in waves for row in wave.rows], "<i4"),
        "batches": _array_form([len(batch) for batch in batches]),
        "transfers": _array_form(transfers),
    }


def _waves_of(form: dict[str, Any], num_slots: int, room: Room) -> tuple[Wave, ...]:
    """Unpack the waves of a plan, whose rows have `num_slots` entries each."""
    number = stored.whole(form["number"])
    room.take(_OBJECT_BYTES * number)
    sizes = _numbers_of(form["sizes"], [number, 2], room)
    layers = _numbers_of(form["layers"], [sum(size for size, _ in sizes)], room)
    rows = _array_of(form["rows"], [len(layers), num_slots], room)
    num_batches = sum(several for _, several in sizes)
    room.take(_OBJECT_BYTES * num_batches)
    lengths = _numbers_of(form["batches"], [num_batches], room)
    num_transfers = sum(lengths)
    room.take(_OBJECT_BYTES * num_transfers)
    table = _numbers_of(form["transfers"], [num_transfers, len(fields(Transfer))], room)
    transfers = iter([Transfer(*row) for row in table])
    batches = iter([tuple(itertools.islice(transfers, length)) for length in lengths])
    waves, begin = [], 0
    for index, (size, several) in enumerate(sizes):
        own = slice(begin, begin := begin + size)
        mine = tuple(itertools.islice(batches, several))
        waves.append(Wave(index, tuple(layers[own]), rows[own], mine))
    return tuple(waves)


def _numbers_of(text: str, shape: list[int], room: Room) -> list[Any]:
    array = _array_of(text, shape, room, "<i8")
    if array.min(initial=0) < 0:
        raise ValueError(f"{array.min()} is less than 0")
    numbers: list[Any] = array.tolist()
    return numbers


def _array_form(values: ArrayLike, dtype: str = "<i8") -> str:
    packed = zstandard.ZstdCompressor(level=3).compress(np.asarray(values, dtype).tobytes())
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


_WRITERS: dict[str, Callable[[Any], Any]] = {
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

_RECORD_READERS: dict[str, Callable[[Any], Any]] = {
    "phase": PlanPhase,
    "reason": Reason,
    "waves_committed": stored.whole,
    "updated_at": stored.number,
    "error": stored.optional_text,
    "approved_by": stored.optional_text,
    "request_digest": stored.optional_text,
    "delivered": _delivered_of,
}
"""Field of a PlanRecord, without its plan and its story -> conversion from JSON."""
