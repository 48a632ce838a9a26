"""Checks of numbers and of arrays of them, for values that hold them."""

import sys

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput


def check_values(name: str, values: NDArray[np.float64], most: float = sys.float_info.max) -> None:
    """Check that all values are finite, not negative and at most `most`.

    Raises:
        InvalidInput: some value is not.
    """
    least, largest = values.min(), values.max()
    if 0 <= least and largest <= most:  # False with a NaN among the values
        return
    finite = np.isfinite(values)
    if not finite.all():
        raise InvalidInput(f"{name} holds {int((~finite).sum())} values that are not finite")
    if least < 0:
        raise InvalidInput(
            f"{name} holds {int((values < 0).sum())} negative values, smallest {least:g}"
        )
    raise InvalidInput(
        f"{name} holds {int((values > most).sum())} values above {most:g}, largest {largest:g}"
    )


_SEARCHED = 4096
"""Numbers of parts to each side that are tried: a count from a file may be a prime of any size."""


def undivided(count: int, what: str, parts: int, of: str, *, least: int = 1) -> str:
    """Return the words about a count that does not divide over parts; empty if it does.

    The words name the nearest counts that would do, and the numbers of parts if some are near.

    Args:
        count: of the things.
        what: their name, in the plural.
        parts: over which they must divide.
        of: their name, in the plural.
        least: the smallest count that is of use.
    """
    if parts < 1 or count < 0:
        return f"{count} {what} do not divide over {parts} {of}"
    if count % parts == 0:
        return ""
    below = count - count % parts
    counts = [near for near in (below, below + parts) if near >= max(least, 1)]
    first = min(parts - 1, count)
    fewer = range(first, max(first - _SEARCHED, 0), -1)
    more = range(parts + 1, min(parts + _SEARCHED, 100 * parts, count) + 1)
    nearest = (next((part for part in near if count % part == 0), 0) for near in (fewer, more))
    divisors = list(filter(None, nearest))
    others = f", or {_either(divisors)} {of}" if divisors else ""
    return f"{count} {what} do not divide over {parts} {of}: {_either(counts)} {what} would{others}"


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, dict.fromkeys(numbers)))
