"""Writes files, with typed errors."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput


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


def smallest(counts: NDArray[np.int64]) -> NDArray[Any]:
    """Return counts in the smallest type that holds them."""
    most = int(counts.max())
    dtype = np.uint16 if most < 2**16 else np.uint32 if most < 2**32 else np.int64
    return np.asarray(counts.astype(dtype))
