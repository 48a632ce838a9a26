"""Works on the layers of a large problem in several threads: kernels run without the GIL."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def map_layers(work: Callable[[int], _T], layers: Sequence[int], threads: int) -> list[_T]:
    """Return `work` of each layer, in the order of the layers.

    Two layers are never worked on at the same time if their numbers leave the same remainder when
    they are divided by `threads`: such layers may share memory.
    """
    if threads < 2 or len(layers) < 2:
        return [work(layer) for layer in layers]
    found: dict[int, _T] = {}

    def work_on(remainder: int) -> None:
        for layer in layers:
            if layer % threads == remainder:
                found[layer] = work(layer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work_on, range(threads)))
    return [found[layer] for layer in layers]
