"""Reads the tensors in files of torch; no code of such a file is run."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats.reading import MAX_CELLS, MAX_COUNTS, check_size, check_unpacked

_MAX_PICKLE_BYTES = 16 << 20
"""Most bytes beside the tensors: names, numbers and lists. A pass takes 200 bytes; in mode
per_token each of its tokens takes 6 more."""


def load_dump(path: Path) -> dict[Any, Any]:
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
        _check_dump(path)
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


def _check_dump(path: Path) -> None:
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
    check_unpacked(packed, unpacked, 0, "the file, which torch never packs,", 1)
    sizes = [info.file_size for info in members if info.filename.endswith(".pkl")]
    if sum(sizes) > _MAX_PICKLE_BYTES:
        raise InvalidInput(
            f"{sum(sizes)} bytes beside its tensors, at most {_MAX_PICKLE_BYTES} are read: record"
            " fewer passes"
        )


def as_array(value: object, what: str) -> NDArray[Any]:
    """Return a tensor or a number as an array.

    Raises:
        InvalidInput: it is neither, its type rounds counts, or it is larger than what is read or
            than what the file holds.
    """
    if str(getattr(value, "dtype", None)) == "torch.bfloat16":
        raise InvalidInput(
            f"{what} is bfloat16, which rounds counts above 256: dump it as int32 or float32"
        )
    try:
        if not isinstance(value, int | float):
            _check_tensor(value, what)
        return np.asarray(value)
    except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"{what} is not an array: {error!s:.120}") from error


def _check_tensor(tensor: Any, what: str) -> None:
    """Check that a value is a tensor, of a size that is read.

    A tensor may claim any shape over a few bytes that it repeats, so it may do so only if small.
    """
    if not hasattr(tensor, "untyped_storage"):
        raise InvalidInput(f"{what} must hold numbers, is a {type(tensor).__name__}")
    check_size(tensor.shape, MAX_COUNTS, what)
    held = tensor.untyped_storage().nbytes()
    claimed = tensor.numel() * tensor.element_size()
    if claimed > held and tensor.numel() > MAX_CELLS:
        raise InvalidInput(f"{what} claims {claimed} bytes, the file holds {held} of them")
