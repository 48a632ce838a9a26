"""How kernels are compiled: on one thread, without fastmath, so that the same input gives the same bytes on any machine."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["inlined", "kernel"]

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Cached on disk, without the GIL; the typed face of `numba.njit`."""
    return cast(_F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: _F) -> _F:
    """Like `kernel`, pasted into the kernels that call it: counting references to the arrays handed over would
    cost a short loop more than its work."""
    return cast(
        _F, numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")(function)
    )
