"""Compiles kernels for one thread, without fastmath: the same bytes come out on any machine."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile a function without the GIL and cache it on disk. `numba.njit` with types."""
    return cast(_F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: _F) -> _F:
    """Compile a function into the kernels that call it.

    In a short loop, counting references to the arguments would take longer than the work.
    """
    return cast(
        _F, numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")(function)
    )


index: Callable[[int], int] = cast(Any, np.int64)
"""Gives an argument of a kernel the type int64.

Numba compiles a kernel once more for each literal, such as -1, and for elements of int32 arrays.
"""
