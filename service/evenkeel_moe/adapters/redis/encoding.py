"""The stored form of plans, placements and window chunks.

Maps and waves are stored as the protocol sends them, the rest as JSON, and counts by byte. What
cannot be read raises Unreadable and nothing else: the store skips it and names it.
"""

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar, get_type_hints

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, create_model
from pydantic_core import from_json

from evenkeel_moe.jit import kernel
from evenkeel_moe.model.ids import DeploymentId, PlanId, is_deployment_id
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanRecord
from evenkeel_moe.v1 import common_pb2 as pb
from evenkeel_moe.wire.values import (
    decode_placement,
    decode_wave,
    encode_placement,
    encode_wave,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_VERSION = 1
_WINDOW_VERSION = 2
_WINDOW_LEVEL = -1
"""Compression level of zstd: higher ones search for repetitions that are not there."""
_WINDOW_HEADER = struct.Struct("<BBIIII")
"""Version, bytes of a count, steps, layers, experts, ranks."""
_SOURCE_HEADER = struct.Struct("<BIII")
"""Version, ranks, layers, experts."""
_MOST_BYTES = 1 << 28
"""Bytes to which a record may unpack: a damaged one may claim any number."""
_BLOCK = 4096
"""Counts split into bytes at a time: they stay in the nearest cache until their last byte."""


class Unreadable(Exception):
    """Stored bytes that do not have the expected form."""


UnreadableRecord = Callable[[str, str, str], None]
"""Takes the kind of a record that cannot be read, its key and name, and what is wrong with it."""


def ignore_unreadable(_kind: str, _where: str, _why: str) -> None:
    """Take no note of a record that cannot be read."""


def _reads(build: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function that is given stored bytes raise Unreadable in place of any other error."""

    @functools.wraps(build)
    def read(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return build(*args, **kwargs)
        except Unreadable:
            raise
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Unreadable(f"{where}: {first['msg']}") from None
        except Exception as error:  # whatever the bytes are, they are only not readable
            raise Unreadable(f"{type(error).__name__}: {error}"[:300]) from None

    return read


# --- names ----------------------------------------------------------------------------------


@_reads
def unpack_deployment_id(name: bytes) -> DeploymentId:
    """Decode the name of a deployment; Unreadable if it is none."""
    text = name.decode()
    if not is_deployment_id(text):
        raise Unreadable("it is no name")
    return DeploymentId(text)


@_reads
def unpack_plan_id(row: tuple[bytes, float]) -> tuple[PlanId, float]:
    """Decode the id of a plan, which has a time; Unreadable if it is none."""
    return PlanId(row[0].decode()), float(row[1])


# --- windows --------------------------------------------------------------------------------


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


@_reads
def unpack_window(data: bytes, sizes: tuple[int, int, int], most_steps: int) -> LoadWindow:
    """Decode a chunk, without source-side sums.

    Args:
        data: of the chunk.
        sizes: (L, E, R) of the deployment.
        most_steps: largest number of steps.

    Raises:
        Unreadable: it is no chunk of these sizes; nothing is then decompressed.
    """
    version, width, length, layers, experts, ranks = _WINDOW_HEADER.unpack_from(data)
    if version != _WINDOW_VERSION or not 1 <= width <= 4:
        raise Unreadable(f"window chunk of version {version} with counts of {width} bytes")
    if (layers, experts, ranks) != sizes or length > most_steps:
        raise Unreadable(
            f"window chunk of {length} steps x {layers} layers x {experts} experts, {ranks} ranks;"
            f" expected at most {most_steps} steps of {sizes}"
        )
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
    counts = np.zeros((length, layers, experts), "<u4")
    planes = counts.view(np.uint8).reshape(length, layers, experts, 4)
    for byte in range(width):
        planes[..., byte] = take("u1", length, layers, experts)
    if length == 0 or (np.diff(steps) <= 0).any() or min(steps[0], epochs.min()) < 0:
        raise ValueError("the steps do not rise from one to the next, or a number is below 0")
    if tokens.size and tokens.min() < -1:
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


@_reads
def unpack_source(data: bytes, sizes: tuple[int, int, int]) -> NDArray[np.uint32]:
    """Decode source-side sums.

    Args:
        data: of the sums.
        sizes: (R, L, E) of the deployment.

    Raises:
        Unreadable: they are not of these sizes; nothing is then decompressed.
    """
    version, *found = _SOURCE_HEADER.unpack_from(data)
    if version != _VERSION or tuple(found) != sizes:
        raise Unreadable(f"source sums of version {version} and {tuple(found)}, expected {sizes}")
    body = _decompress(data[_SOURCE_HEADER.size :], 4 * math.prod(sizes))
    return np.frombuffer(body, "<u4").reshape(sizes).astype(np.uint32)


# --- placements and plans -------------------------------------------------------------------


def pack_placement(placement: Placement) -> bytes:
    """Encode a placement."""
    return _compress(encode_placement(placement).SerializeToString())


@_reads
def unpack_placement(data: bytes) -> Placement:
    """Decode a placement.

    Raises:
        Unreadable: it is none.
    """
    return decode_placement(pb.PlacementMap.FromString(_decompress(data)))


def pack_plan_record(record: PlanRecord) -> bytes:
    """Encode a plan record without its maps, waves and story: little, however large the plan is."""
    form = _RECORD.model_validate(record).model_dump(mode="json")
    # Waves for people and tools that read the record without its maps.
    form |= {"num_waves": len(record.plan.waves), "num_rows": len(record.story)}
    return _compress(json.dumps(form).encode())


def pack_plan_maps(plan: Plan) -> bytes:
    """Encode the maps and waves of a plan."""
    base, target = map(encode_placement, (plan.base, plan.target))
    waves = map(encode_wave, plan.waves)
    return _compress(pb.PlanMaps(base=base, target=target, waves=waves).SerializeToString())


def pack_story_row(row: Mapping[str, Any]) -> bytes:
    """Encode one row of a plan's story; the rows one after another are the story."""
    return _compress(json.dumps(row).encode() + b"\n")


@_reads
def unpack_plan_record(record: bytes, maps: bytes, story: bytes) -> PlanRecord:
    """Decode a plan record from its parts.

    Raises:
        Unreadable: a part is no such part, or the parts do not fit each other.
    """
    form = unpack_object(_decompress(record))
    values = dict(_RECORD.model_validate(form))
    large = pb.PlanMaps.FromString(_decompress(maps))
    plan = Plan(
        **dict(values.pop("plan")),
        base=decode_placement(large.base),
        target=decode_placement(large.target),
        waves=tuple(map(decode_wave, large.waves)),
    )
    del values["version"]
    with zstandard.ZstdDecompressor().stream_reader(story, read_across_frames=True) as frames:
        rows = tuple(unpack_object(row, _STORY_ROW) for row in frames.readall().splitlines())
    if len(rows) != form["num_rows"]:
        raise Unreadable(f"its story has {len(rows)} of {form['num_rows']} rows")
    return PlanRecord(plan=plan, story=rows, **values)


@_reads
def unpack_object(data: bytes, form: type[BaseModel] | None = None) -> dict[str, Any]:
    """Decode a JSON object. With a form, check the fields that others count on.

    Raises:
        Unreadable: it is none, or has another form.
    """
    value = from_json(data)
    if not isinstance(value, dict):
        raise Unreadable(f"{value!r:.80} is not an object")
    if form is not None:
        form.model_validate(value)
    return value


def _stored_model(values: type, *omitted: str, **added: Any) -> type[BaseModel]:
    """Return the stored form of a dataclass without some of its fields, with others added."""
    hints = {name: (hint, ...) for name, hint in get_type_hints(values).items()}
    fields = {name: hint for name, hint in hints.items() if name not in omitted} | added
    return create_model(f"Stored{values.__name__}", __config__=_CONFIG, **fields)


_CONFIG = ConfigDict(from_attributes=True, ser_json_inf_nan="constants")
_PLAN = _stored_model(Plan, "base", "target", "waves")
_RECORD = _stored_model(PlanRecord, "story", plan=(_PLAN, ...), version=(Literal[8], 8))
_STORY_ROW = create_model("StoredStoryRow", __config__=_CONFIG, event=(str, ...))
DECISION = create_model(
    "StoredDecision",
    __config__=ConfigDict(strict=True),  # The row itself is used: `"5"` is no number.
    at=(FiniteFloat, ...),
    reason=(str, ...),
    numbers=(dict[str, float], {}),
)
"""Pages and gauges need these fields of a row of the decision log."""


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data)


def _decompress(data: bytes, want: int | None = None) -> bytes:
    """Decompress a zstd frame, of `want` bytes if given."""
    size = zstandard.frame_content_size(data)
    if size > _MOST_BYTES or (want is not None and size != want):
        raise Unreadable(f"unpacks to {size} bytes, expected {want or _MOST_BYTES}")
    return zstandard.ZstdDecompressor().decompress(data)
