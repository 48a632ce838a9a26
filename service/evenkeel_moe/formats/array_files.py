"""Reads and writes files of arrays, of numpy and of torch; no code of such a file is run."""

import io
import math
import warnings
import zipfile
import zlib
from collections.abc import Collection, Mapping
from lzma import LZMAError
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import MAX_CELLS, MAX_COUNTS, check_size, token_counts

_BROKEN_HEADER = (
    *(ValueError, KeyError, TypeError, SyntaxError, TokenError, OverflowError, MemoryError),
)
"""numpy raises these for a broken header, with the wrong text in the message."""

MAX_ARRAY_BYTES = 4 << 30
"""Most bytes to which the arrays of a file may unpack."""

_FREE_BYTES = 64 << 20
_MAX_RATIO = 200
_MAX_CELLS_OF_BYTE = 64
"""An array may unpack to `_FREE_BYTES`, or else to so many bytes and values for each packed byte.
Zeros alone reach 230 to 1000 bytes; a recording of which nine tenths are empty stays below 160
bytes and 30 values."""

_SMALL_BYTES = 16 << 20
"""Most bytes of an array whose values become objects of Python."""

_MAX_PICKLE_BYTES = 16 << 20
"""Most bytes of a file of torch beside the tensors: names, numbers and lists. A pass takes 200
bytes; in mode per_token each of its tokens takes 6 more."""


def load_npz(
    path: Path, names: tuple[str, ...], small: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """Return those of the named arrays that a file has; pickles are never opened.

    Args:
        path: of the file.
        names: of the arrays.
        small: those of them that are small, because their values become objects of Python.

    Raises:
        InvalidInput: the file or an array is malformed or too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(archive, path.stat().st_size, names, small)
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in names if name in archive.files}
    except (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, OSError, RuntimeError) as error:
        raise InvalidInput(f"not a readable npz file: {error}") from error
    except _BROKEN_HEADER as error:
        text = " ".join(str(error).split())
        raise InvalidInput(f"holds an array that cannot be read: {text:.200}") from error


def _check_members(
    archive: zipfile.ZipFile, size: int, names: Collection[str], small: Collection[str]
) -> None:
    """Check what the named arrays of an npz file of a size unpack to, by their headers."""
    total = 0
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name not in names:
            continue
        with archive.open(info) as file:
            if npy.read_magic(file) == (1, 0):
                shape, _, dtype = npy.read_array_header_1_0(file)
            else:
                shape, _, dtype = npy.read_array_header_2_0(file)
            held = info.file_size - file.tell()
        claimed = math.prod(shape) * dtype.itemsize
        if claimed > held:
            raise InvalidInput(f"{name} claims {claimed} bytes, the file holds {held} of them")
        packed = min(info.compress_size, size)
        _check_unpacked(packed, info.file_size, math.prod(shape), name, _MAX_RATIO)
        if name in small:
            check_size((info.file_size,), _SMALL_BYTES, f"bytes of {name}")
        total += info.file_size
    check_size((total,), MAX_ARRAY_BYTES, "bytes of its arrays")


def _check_unpacked(packed: int, unpacked: int, values: int, what: str, ratio: int) -> None:
    """Check the size to which a part of a file unpacks, before it is unpacked.

    Args:
        packed: bytes in the file.
        unpacked: bytes afterwards.
        values: numbers afterwards.
        what: name of the part in errors.
        ratio: bytes that a packed byte may become, in large parts.

    Raises:
        InvalidInput: it unpacks to more than is read.
    """
    most = min(MAX_ARRAY_BYTES, max(_FREE_BYTES, ratio * packed))
    if unpacked > most:
        raise InvalidInput(
            f"{what:.60} unpacks from {packed} to {unpacked} bytes, at most {most} are read"
        )
    if unpacked > _FREE_BYTES:
        most = _MAX_CELLS_OF_BYTE * packed
        check_size((values,), most, f"values of {what:.60}, packed in {packed} bytes")


def load_torch(path: Path) -> dict[Any, Any]:
    """Return the mapping in a file of torch; it runs no code from the file.

    Raises:
        InvalidInput: the file holds something else, or torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise InvalidInput(
            "reading *.pt files needs torch: run `pip install 'evenkeel-moe[rank]'`, or convert the"
            " dump to npz on a machine with torch"
        ) from error
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            # An error follows where torch cannot read another version of pickle.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            # weights_only: loads tensors and plain containers, and runs no code from the file.
            content = torch.load(path, map_location="cpu", weights_only=True)
    except InvalidInput:
        raise
    # A broken pickle stream raises whatever error its opcodes ran into.
    except Exception as error:
        text = " ".join(f"{type(error).__name__} {error}".split())
        raise InvalidInput(f"torch cannot read it: {text:.200}") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"holds a {type(content).__name__}, must be a mapping")
    return content


def _check_archive(path: Path) -> None:
    """Check the size of what is in a file of torch, before it is unpacked.

    Raises:
        InvalidInput: it is too large, or the file is no archive, as torch writes since version 1.6.
    """
    if not zipfile.is_zipfile(path):
        raise InvalidInput("torch cannot read it: no archive as torch writes, or cut short")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = min(sum(info.compress_size for info in members), path.stat().st_size)
    unpacked = sum(info.file_size for info in members)
    _check_unpacked(packed, unpacked, 0, "the file, which torch never packs,", 1)
    beside = sum(info.file_size for info in members if info.filename.endswith(".pkl"))
    if beside > _MAX_PICKLE_BYTES:
        raise InvalidInput(
            f"{beside} bytes beside its tensors, at most {_MAX_PICKLE_BYTES} are read: record"
            " fewer passes"
        )


def as_array(value: object, what: str) -> NDArray[Any]:
    """Return a tensor or a number of a file of torch as an array.

    A tensor may claim any shape over a few bytes that it repeats, so it may do so only if small.

    Raises:
        InvalidInput: it is neither, its type rounds counts, or it is larger than what is read or
            than what the file holds.
    """
    if isinstance(value, int | float):
        return np.asarray(value)
    tensor: Any = value
    if not hasattr(tensor, "untyped_storage"):
        raise InvalidInput(f"{what} must hold numbers, is a {type(tensor).__name__}")
    if str(tensor.dtype) == "torch.bfloat16":
        raise InvalidInput(
            f"{what} is bfloat16, which rounds counts above 256: dump it as int32 or float32"
        )
    try:
        check_size(tensor.shape, MAX_COUNTS, what)
        held = tensor.untyped_storage().nbytes()
        claimed = tensor.numel() * tensor.element_size()
        if claimed > held and tensor.numel() > MAX_CELLS:
            raise InvalidInput(f"{what} claims {claimed} bytes, the file holds {held} of them")
        return np.asarray(tensor)
    except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"{what} is not an array: {error!s:.120}") from error


def tensor_counts(value: object, what: str) -> NDArray[np.int64]:
    """Return the token counts in a tensor; see `as_array` and `token_counts`."""
    return token_counts(as_array(value, what), what)


def one_number(arrays: Mapping[str, NDArray[Any]], name: str) -> int | None:
    """Return the whole number in an array; None if there is no such array.

    Raises:
        InvalidInput, ShapeMismatch: the array does not hold one whole number.
    """
    if name not in arrays:
        return None
    if arrays[name].size != 1:
        raise ShapeMismatch(f"{name} must be one number, got shape {arrays[name].shape}")
    return int(token_counts(arrays[name], name).reshape(-1)[0])


def write_file(path: Path | str, content: str | bytes) -> None:
    """Write a file; text is encoded as UTF-8.

    Raises:
        InvalidInput: the folder is missing, or permission or space is lacking; the message names
            the file.
    """
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror or error}") from error


def write_npz(path: Path | str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name; equal arrays give equal bytes. Errors are those of `write_file`."""
    buffer = io.BytesIO()
    # The stub declares a flag among the keywords, which arrays by name do not match.
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_file(path, buffer.getvalue())


def smallest(counts: NDArray[np.int64]) -> NDArray[Any]:
    """Return counts in the smallest type that holds them."""
    most = int(counts.max())
    dtype = np.uint16 if most < 2**16 else np.uint32 if most < 2**32 else np.int64
    return np.asarray(counts.astype(dtype))
