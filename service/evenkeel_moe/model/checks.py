"""Checks of arrays of numbers, for values that hold them."""

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
