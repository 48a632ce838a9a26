"""Reads the tensors in files of torch; no code of such a file is run."""

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput


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
        with warnings.catch_warnings():
            # An error follows where torch cannot read another version of pickle.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            # weights_only: loads tensors and plain containers, and runs no code from the file.
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"torch cannot read it: {str(error).splitlines()[0]:.200}") from error
    # A broken pickle stream raises whatever error its opcodes ran into.
    except (
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:
        raise InvalidInput(
            f"torch cannot read it: {type(error).__name__} {error!s:.200}"
        ) from error
    if not isinstance(content, dict):
        raise InvalidInput(f"holds a {type(content).__name__}, must be a mapping")
    return content


def as_array(value: object, what: str) -> NDArray[Any]:
    """Return a tensor as an array.

    Raises:
        InvalidInput: it is none, or its type rounds counts.
    """
    if str(getattr(value, "dtype", None)) == "torch.bfloat16":
        raise InvalidInput(
            f"{what} is bfloat16, which rounds counts above 256: dump it as int32 or float32"
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"{what} is not an array: {error!s:.120}") from error
