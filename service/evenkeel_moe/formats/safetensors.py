"""The safetensors container, read with numpy: a JSON header behind its length, then raw tensors.

Source: huggingface/safetensors, the format section of its README: 8 bytes little-endian header length, the
header `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data the offsets point into.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats.reading import as_int, as_list, as_mapping, parse_json

__all__ = ["read_tensors"]

_DTYPES = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The limit the format's own reader sets."""
MAX_DIMENSIONS = 32
"""Statistics have one; numpy takes no more than 32 in its older versions."""


def read_tensors(path: Path) -> dict[str, NDArray[np.generic]]:
    """Every tensor of a file by name.

    Raises:
        InvalidInput: not such a file, truncated, or a tensor whose shape and bytes disagree.
    """
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}") from error
    if len(blob) < 8:
        raise InvalidInput(f"{len(blob)} bytes, a safetensors file has at least 8")
    length = int.from_bytes(blob[:8], "little")
    if length > min(len(blob) - 8, MAX_HEADER_BYTES):
        raise InvalidInput(f"header of {length} bytes announced, {len(blob) - 8} bytes follow")
    try:
        header = parse_json(blob[8 : 8 + length].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"header is not UTF-8: byte {error.start}") from error
    if not isinstance(header, dict):
        raise InvalidInput(f"header must be a mapping, is {type(header).__name__}")
    data = memoryview(blob)[8 + length :]
    return {
        name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"
    }


def _tensor(name: str, entry: object, data: memoryview) -> NDArray[np.generic]:
    what = f"tensor {name!r}"
    fields = as_mapping(entry, what, ("dtype", "shape", "data_offsets"))
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise InvalidInput(f"{what} has dtype {fields['dtype']!r:.40}, known: {', '.join(_DTYPES)}")
    shape = [as_int(size, f"{what} shape") for size in as_list(fields["shape"], f"{what} shape")]
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidInput(f"{what} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are read")
    offsets = as_list(fields["data_offsets"], f"{what} data_offsets")
    if len(offsets) != 2:
        raise InvalidInput(f"{what} has {len(offsets)} data offsets, must be 2")
    begin, end = (as_int(offset, f"{what} data offset", most=len(data)) for offset in offsets)
    need = math.prod(shape) * np.dtype(dtype).itemsize
    if end - begin != need:
        raise InvalidInput(
            f"{what} {shape} of {dtype[1:]} needs {need} bytes, offsets {begin}..{end} give {end - begin}"
        )
    return np.frombuffer(data[begin:end], dtype).reshape(shape)
