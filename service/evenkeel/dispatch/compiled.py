"""How the CPU kernels of dispatch are compiled."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["kernel"]

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile for one thread, cached on disk, without the GIL, so that it runs beside the engine's own thread."""
    return cast(_F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
