"""The Triton kernel that adds the time of a CUDA device to a total; needs Triton."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


@triton.jit  # type: ignore[untyped-decorator]
def _add_time(total, SIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add SIGN * now to total[0] and, if SIGN is positive, 1 to total[1]; run by one thread."""
    tl.atomic_add(total, SIGN * cuda.globaltimer(), sem="relaxed")
    if SIGN > 0:
        tl.atomic_add(total + 1, 1, sem="relaxed")


def add_time(total: Tensor, sign: int) -> None:
    """Queue the kernel on the current stream.

    Args:
        total: (2,) int64 on the device: nanoseconds, and the number of intervals that ended.
        sign: -1 where an interval begins, 1 where it ends.
    """
    _add_time[(1,)](total, sign, num_warps=1)
