"""Works on the layers of a large problem in several threads: kernels run without the GIL."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def map_layers(work: Callable[[int], _T], layers: Sequence[int], threads: int) -> list[_T]:
    """Return `work` of each layer, in the order of the layers."""
    if threads < 2 or len(layers) < 2:
        return list(map(work, layers))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, layers))
