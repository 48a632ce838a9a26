"""Checks that every reader needs: text, JSON and numbers from files nobody vouches for."""

import json
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch

__all__ = [
    "as_int",
    "as_list",
    "as_mapping",
    "check_layer_ids",
    "expert_rows",
    "naming",
    "parse_json",
    "read_text",
    "token_counts",
]

MAX_TEXT_BYTES = 512 << 20
"""A placement of 100 layers x 1000 slots takes 500 kB; far beyond that it is another kind of file."""

MAX_INT = 2**31 - 1
"""Of numbers in files."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Put the file's name in front of every error raised inside."""
    try:
        yield
    except EvenkeelError as error:
        raise type(error)(f"{path}: {error}", error.reason) from error


def read_text(path: Path) -> str:
    """A UTF-8 file's text.

    Raises:
        InvalidInput: not there, not readable, too large, or not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise InvalidInput(f"{size} bytes, at most {MAX_TEXT_BYTES} are read")
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error


def parse_json(text: str) -> Any:
    """JSON without the liberties Python takes: no NaN, no key twice.

    Raises:
        InvalidInput: anything else.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            key, times = Counter(key for key, _ in pairs).most_common(1)[0]
            raise InvalidInput(f"key {key!r} occurs {times} times in one object")
        return mapping

    def constant(name: str) -> Any:
        raise InvalidInput(f"{name} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InvalidInput(f"not JSON that can be read: {error}") from error


def as_mapping(
    value: object, what: str, keys: Sequence[str], optional: Sequence[str] | None = ()
) -> dict[Any, Any]:
    """A mapping with exactly these keys; `optional` ones may be there too, with None any others.

    Raises:
        InvalidInput: not a mapping, keys missing or unknown ones present.
    """
    if not isinstance(value, dict):
        raise InvalidInput(f"{what} must be a mapping, is {type(value).__name__}")
    missing = [key for key in keys if key not in value]
    unknown = [
        str(key)
        for key in value
        if optional is not None and key not in keys and key not in optional
    ]
    if missing or unknown:
        raise InvalidInput(
            f"{what} must have the keys {', '.join(keys)}; missing: {', '.join(missing) or 'none'};"
            f" unknown: {', '.join(unknown[:8]) or 'none'}"
        )
    return value


def as_list(value: object, what: str) -> list[Any]:
    """A list.

    Raises:
        InvalidInput: anything else.
    """
    if not isinstance(value, list):
        raise InvalidInput(f"{what} must be a list, is {type(value).__name__}")
    return value


def check_layer_ids(layer_ids: Sequence[int], layers: int) -> None:
    """Ids of hidden layers, one for each of `layers` rows.

    Raises:
        ShapeMismatch: more or fewer of them.
        InvalidInput: not rising, or beyond what files hold.
    """
    if len(layer_ids) != layers:
        raise ShapeMismatch(f"{len(layer_ids)} layer ids for {layers} layers")
    least, most = min(layer_ids, default=0), max(layer_ids, default=0)
    if list(layer_ids) != sorted(set(layer_ids)) or least < 0 or most > MAX_INT:
        raise InvalidInput(f"layer ids must rise within 0..{MAX_INT}, got {list(layer_ids)}")


def as_int(value: object, what: str, least: int = 0, most: int = MAX_INT) -> int:
    """A whole number within bounds; True is no number.

    Raises:
        InvalidInput: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        # Not repr: aliases make a few lines of YAML a value of gigabytes.
        raise InvalidInput(f"{what} must be a whole number, is {reprlib.repr(value):.80}")
    if not least <= value <= most:
        raise InvalidInput(f"{what} is {str(value):.40}, must be {least}..{most}")
    return value


def expert_rows(rows: object, what: str, least: int) -> NDArray[np.int32]:
    """A rectangular list of lists of expert ids, (L, S) int32.

    Args:
        rows: as parsed.
        what: how to name it in errors.
        least: smallest id allowed: 0, or -1 where slots may be empty.

    Raises:
        InvalidInput: not lists of whole numbers.
        ShapeMismatch: no rows, or rows of different length.
    """
    table = [as_list(row, f"{what} row {index}") for index, row in enumerate(as_list(rows, what))]
    if not table or not table[0]:
        raise ShapeMismatch(f"{what} is empty: {len(table)} rows")
    for index, row in enumerate(table):
        if len(row) != len(table[0]):
            raise ShapeMismatch(
                f"{what} row {index} has {len(row)} slots, row 0 has {len(table[0])}"
            )
        for slot, expert in enumerate(row):
            as_int(expert, f"{what} row {index} slot {slot}", least)
    return np.array(table, np.int32)


def token_counts(values: NDArray[Any], what: str) -> NDArray[np.int64]:
    """An array of token counts as int64; floats must be whole.

    Raises:
        InvalidInput: not numbers, not finite, negative, not whole, or beyond 2^53.
    """
    if values.dtype.kind not in "iuf":
        raise InvalidInput(f"{what} must hold numbers, holds {values.dtype}")
    if values.dtype.kind == "f":
        bad = ~np.isfinite(values)
        if bad.any():
            raise InvalidInput(f"{what} holds {int(bad.sum())} values that are not finite")
        if (values != np.floor(values)).any():
            raise InvalidInput(
                f"{what} holds {int((values != np.floor(values)).sum())} counts that are not whole"
            )
    if values.size and (values.min() < 0 or values.max() > 2**53):
        raise InvalidInput(f"{what} holds {values.min()}..{values.max()}, counts are 0..2^53")
    return values.astype(np.int64)
