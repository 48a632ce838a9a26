"""Bounds what the bytes of the store may unpack to, and names what cannot be read.

A few stored bytes may decompress to gigabytes. Sizes are therefore compared with what the record
may need before anything is decompressed or parsed.
"""

from collections.abc import Callable
from typing import TypeVar

import zstandard

_T = TypeVar("_T")
READ_BYTES = 1 << 26
"""Stored bytes that one read takes; a plan of the most cells has up to half of it."""
READ_NAMES, NAMES_BYTES = 1 << 14, 1 << 22
"""The most names, or rows of a list, that one read takes, and the most bytes of names. There are
1000 plans and 64 epochs; deployments are listed for 90 days after they were led."""
_ROOM_BYTES = 1 << 28
"""The largest `Room`: as much as one window may have."""


class Unreadable(Exception):
    """Stored bytes that do not have the expected form."""


UnreadableRecord = Callable[[str, str, str], None]
"""Takes the kind of a record that cannot be read, its key and name, and what is wrong with it."""


def ignore_unreadable(_kind: str, _where: str, _why: str) -> None:
    """Take no note of a record that cannot be read."""


class Room:
    """The memory that the records of one read may still take when they are unpacked.

    What was taken is not given back, also if a record then proves unreadable: the room bounds the
    time of a read too.
    """

    def __init__(self, nbytes: int = _ROOM_BYTES) -> None:
        self._most = self._left = nbytes

    def take(self, nbytes: int) -> None:
        """Take bytes.

        Raises:
            Unreadable: so many are not left.
        """
        if nbytes > self._left:
            raise Unreadable(
                f"would take {nbytes} bytes unpacked, {self._left} of the {self._most} of one read"
                " are left"
            )
        self._left -= nbytes


def frame_size(data: bytes) -> int:
    """Return the bytes that a zstd frame says it unpacks to; 2^64 - 1 if it does not say.

    Raises:
        Unreadable: it is no zstd frame.
    """
    try:
        return zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as error:
        raise Unreadable(f"not a zstd frame: {error}") from None


def decompress(data: bytes, want: int) -> bytes:
    """Return the decompressed bytes of a zstd frame.

    Raises:
        Unreadable: it is no zstd frame of exactly `want` bytes.
    """
    size = frame_size(data)
    if size != want:
        raise Unreadable(f"unpacks to {size} bytes, expected {want}")
    try:
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Unreadable(f"not a zstd frame: {error}") from None


def reading(build: Callable[[], _T]) -> _T:
    """Return what `build` makes of stored bytes.

    Raises:
        Unreadable: it raised any error.
    """
    try:
        return build()
    except Unreadable:
        raise
    except Exception as error:  # whatever the bytes are, they are only not readable
        raise Unreadable(f"{type(error).__name__}: {error}"[:300]) from None


def stored_bytes(found: bytes | int) -> bytes:
    """Return a value as the scripts answer it: whole, or its length where it is too long.

    Raises:
        Unreadable: it is too long.
    """
    if isinstance(found, int):
        raise Unreadable(f"has {found} bytes, more than are left of what one read takes")
    return found
