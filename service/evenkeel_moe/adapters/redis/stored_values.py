"""Reads single values of stored JSON. A value of another form raises ValueError with what it is.

The store belongs to operators, but its bytes may be old, damaged or written by something else. A
value of a wrong type would otherwise raise far from here, where nobody expects it.
"""

import json
import math
import re
from typing import Any

_MAX_WHOLE = 1 << 63
_MAX_TEXT = 1 << 16
_MAX_DEPTH = 64
"""Nesting of a stored JSON value; our own have less than ten levels."""
DOCUMENT_BYTES, DOCUMENT_VALUES = 1 << 21, 1 << 15
"""The most bytes and values of a document or row. The largest has 320 audit rows of 11 values, each
of up to 4.6 kB if every character of its path, key and change is escaped."""
_SEPARATORS = (b",", b"[", b"{")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def parse_json(
    data: bytes, most_bytes: int = DOCUMENT_BYTES, most_values: int = DOCUMENT_VALUES
) -> Any:
    """Return a JSON value.

    The interpreter runs nothing else while it parses, so size and values are counted before.

    Raises:
        ValueError: it is too large, it is not JSON in UTF-8, it is nested too deep, or UTF-8 cannot
            encode a text of it.
    """
    if len(data) > most_bytes:
        raise ValueError(f"{len(data)} bytes of JSON, at most {most_bytes}")
    if (found := _count_values(data, most_values)) > most_values:
        raise ValueError(f"up to {found} JSON values, at most {most_values}")
    try:
        value = json.loads(data.decode())
        _check(value, _MAX_DEPTH)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return value


def text(value: Any) -> str:
    """Return a string that UTF-8 can encode."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{value!r:.80} is not a text of at most {_MAX_TEXT} characters")
    value.encode()
    return value


def optional_text(value: Any) -> str | None:
    """Return a string or None."""
    return None if value is None else text(value)


def number(value: Any) -> float:
    """Return a finite number; a whole one has at most 63 bits."""
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is not a finite number")
    return float(value)


def optional_number(value: Any) -> float | None:
    """Return a finite number or None."""
    return None if value is None else number(value)


def whole(value: Any) -> int:
    """Return a whole number from 0 to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_WHOLE:
        raise ValueError(f"{value!r:.80} is not a whole number from 0 to 2^63 - 1")
    return value


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is neither true nor false")
    return value


def numbers(value: Any) -> dict[str, float]:
    """Return numbers by name; those of a decision need not be finite."""
    found = mapping(value)
    for name, entry in found.items():
        if not _is_number(entry):
            raise ValueError(f"{name!r:.80} is {entry!r:.80}, which is not a number")
    return {name: float(entry) for name, entry in found.items()}


def mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not an object")
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < _MAX_WHOLE
    return isinstance(value, float)


def _count_values(data: bytes, most: int) -> int:
    """Return at least the number of values; names of an object count with their values.

    What callers choose may be full of commas, so texts are left out where that decides.
    """
    found = 1 + sum(map(data.count, _SEPARATORS))
    if found > most and len(data) <= DOCUMENT_BYTES:
        found = 1 + sum(map(_STRING.sub(b"", data).count, _SEPARATORS))
    return found


def _check(value: Any, levels: int) -> None:
    """Refuse values that later code cannot process: deep nesting and lone surrogates."""
    if levels == 0:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for name, entry in value.items():
            name.encode()
            _check(entry, levels - 1)
    elif isinstance(value, list):
        for entry in value:
            _check(entry, levels - 1)
