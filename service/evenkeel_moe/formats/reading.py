"""Checks text, JSON and numbers from files that are not trusted."""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch

MAX_TEXT_BYTES = 512 << 20
"""Size of the largest recording in lines of text."""

MAX_JSON_CHARS = 16 << 20
"""Length of the longest JSON text. A placement of 100 layers x 1000 slots has 500,000; an empty
list takes 20 times as much memory as its letters."""

_ARCHIVE = b"PK\x03\x04"
"""The first bytes of files of torch and numpy."""

MAX_COUNTS = 1 << 29
"""Most counts of steps x layers x experts: 20,000 steps of 58 layers x 256 experts, and more."""

MAX_EXPERTS = 1 << 16
"""Most experts of a layer; models have up to some thousand."""

MAX_CELLS = 1 << 22
"""Most values of a map of layers x slots, as many as the controller takes from a rank."""

MAX_INT = 2**31 - 1
"""Greatest whole number accepted from a file."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Prefix every error raised inside with the name of the file."""
    try:
        yield
    except EvenkeelError as error:
        raise type(error)(f"{path}: {error}", error.reason) from error


def read_text(path: Path, most: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        InvalidInput: the file is missing, not readable, too large, or not UTF-8.
    """
    try:
        data = bytearray()
        with path.open("rb") as file:
            # In parts: a read of `most` bytes would ask for so much memory.
            while len(data) <= most and (part := file.read(1 << 20)):
                data += part
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}") from error
    if len(data) > most:
        raise InvalidInput(f"more than the {most} bytes that are read")
    if data.startswith(_ARCHIVE):
        raise InvalidInput(
            "an archive, as torch and numpy write, not text; docs/formats.md says what is read"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error


def parse_json(text: str) -> Any:
    """Parse JSON more strictly than Python does: refuse NaN and repeated keys.

    Raises:
        InvalidInput: the text is not such JSON.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            key, times = Counter(key for key, _ in pairs).most_common(1)[0]
            raise InvalidInput(f"key {shown(key)} occurs {times} times in one object")
        return mapping

    def constant(name: str) -> Any:
        raise InvalidInput(f"{name} is not JSON")

    if len(text) > MAX_JSON_CHARS:
        raise InvalidInput(f"{len(text)} characters of JSON, at most {MAX_JSON_CHARS} are read")
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InvalidInput(f"JSON that cannot be read: {error}") from error


def shown(value: object) -> str:
    """Return at most 60 letters about a value from a file."""
    # Not repr(): with aliases, a few lines of YAML can stand for gigabytes of text.
    return f"{reprlib.repr(value):.60}"


def listed(values: Iterable[object]) -> str:
    """Return the first 8 values from a file, and how many more there are."""
    every = list(values)
    more = f" and {len(every) - 8} more" if len(every) > 8 else ""
    return ", ".join(f"{value!s:.40}" for value in every[:8]) + more


def as_mapping(
    value: object, what: str, keys: Sequence[str], optional: Sequence[str] | None = ()
) -> dict[Any, Any]:
    """Return `value` if it is a mapping with the right keys.

    Args:
        value: as parsed.
        what: its name in errors.
        keys: the required keys.
        optional: other keys that are allowed; None allows all.

    Raises:
        InvalidInput: it is not a mapping, or keys are missing or unknown.
    """
    if not isinstance(value, dict):
        raise InvalidInput(f"{what} must be a mapping, is {type(value).__name__}")
    missing = [key for key in keys if key not in value]
    known = None if optional is None else {*keys, *optional}
    unknown = [] if known is None else [key for key in value if key not in known]
    if missing or unknown:
        lacks = f"; missing: {', '.join(missing)}" if missing else ""
        out = "it" if len(unknown) == 1 else "them"
        has = f"; unknown: {listed(unknown)} (take {out} out)" if unknown else ""
        raise InvalidInput(f"{what} must have the keys {', '.join(keys)}{lacks}{has}")
    return value


def as_list(value: object, what: str) -> list[Any]:
    """Return `value` if it is a list.

    Raises:
        InvalidInput: it is not.
    """
    if not isinstance(value, list):
        raise InvalidInput(f"{what} must be a list, is {type(value).__name__}")
    return value


def check_layer_ids(layer_ids: Sequence[int], layers: int) -> None:
    """Check the ids of hidden layers, one for each of `layers` rows.

    Raises:
        ShapeMismatch: there are more or fewer ids than rows.
        InvalidInput: the ids do not rise, or are out of range.
    """
    if len(layer_ids) != layers:
        raise ShapeMismatch(f"{len(layer_ids)} layer ids for {layers} layers")
    least, most = min(layer_ids, default=0), max(layer_ids, default=0)
    if list(layer_ids) != sorted(set(layer_ids)) or least < 0 or most > MAX_INT:
        raise InvalidInput(f"layer ids must rise within 0..{MAX_INT}, got {listed(layer_ids)}")


def as_int(value: object, what: str, least: int = 0, most: int = MAX_INT) -> int:
    """Return `value` if it is a whole number (not a bool) within bounds.

    Raises:
        InvalidInput: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        digits = isinstance(value, str) and value.lstrip("+-")[:1].isdecimal()
        form = " in plain digits, without quotes" if digits else ""
        raise InvalidInput(f"{what} must be a whole number{form}, is {shown(value)}")
    if not least <= value <= most:
        raise InvalidInput(f"{what} is {str(value):.40}, must be {least}..{most}")
    return value


def expert_rows(rows: object, what: str, least: int) -> NDArray[np.int32]:
    """Convert lists of expert ids to an (L, S) int32 array.

    Args:
        rows: as parsed.
        what: their name in errors.
        least: the smallest id allowed: 0, or -1 where slots may be empty.

    Raises:
        InvalidInput: they are not lists of whole numbers.
        ShapeMismatch: there are no rows, or rows differ in length.
    """
    table = _lists(rows, what)
    if not table or not table[0]:
        raise ShapeMismatch(f"{what} is empty: {len(table)} rows")
    if isinstance(table[0][0], list):
        raise InvalidInput(
            f"{what} row 0 holds lists: a row is the experts of all slots, rank after rank"
        )
    check_size((len(table), len(table[0])), MAX_CELLS, f"{what} rows x slots")
    for index, row in enumerate(table):
        if len(row) != len(table[0]):
            raise ShapeMismatch(
                f"{what} row {index} has {len(row)} slots, row 0 has {len(table[0])}"
            )
        for slot, expert in enumerate(row):
            as_int(expert, f"{what} row {index} slot {slot}", least)
    return np.array(table, np.int32)


def token_rows(rows: object, what: str) -> NDArray[np.int64]:
    """Convert lists of token counts to an (L, S) int64 array.

    Raises:
        InvalidInput: they are not lists of whole numbers from 0 to 2^53.
        ShapeMismatch: there are no rows, or rows differ in length.
    """
    table = _lists(rows, what)
    for index, row in enumerate(table):
        for slot, tokens in enumerate(row):
            number = isinstance(tokens, int | float) and not isinstance(tokens, bool)
            if not number or not 0 <= tokens <= 2**53:
                raise InvalidInput(
                    f"{what} row {index} slot {slot} is {shown(tokens)}, counts are 0..2^53"
                )
    sizes = {len(row) for row in table}
    if len(sizes) != 1 or 0 in sizes:
        raise ShapeMismatch(f"{what} must have rows of one length, has {sorted(sizes)[:8]}")
    return token_counts(np.array(table, np.float64), what)


def _lists(rows: object, what: str) -> list[list[Any]]:
    return [as_list(row, f"{what} row {index}") for index, row in enumerate(as_list(rows, what))]


def check_dimensions(values: NDArray[Any], what: str, dimensions: str) -> None:
    """Check that an array has these dimensions, named with commas between, and none of them is 0.

    Raises:
        ShapeMismatch: it has others.
    """
    if values.ndim != len(dimensions.split(",")) or 0 in values.shape:
        raise ShapeMismatch(f"{what} must be ({dimensions}), none of them 0, got {values.shape}")


def check_size(shape: Sequence[int], most: int, what: str) -> None:
    """Check the number of values of an array before there is memory for it.

    Raises:
        InvalidInput: there are more than `most`.
    """
    size = math.prod(shape)
    if size > most:
        product = f"{' x '.join(map(str, shape))} = " if len(shape) > 1 else ""
        raise InvalidInput(f"{what}: {product}{size}, at most {most} are read")


def check_counts(steps: int, layers: int, experts: int) -> None:
    """Check the size of the counts of a recording before there is memory for them.

    Raises:
        InvalidInput: there are too many experts in a layer, or too many counts in all.
    """
    if experts > MAX_EXPERTS:
        raise InvalidInput(f"{experts} experts in a layer, at most {MAX_EXPERTS} are read")
    check_size((steps, layers, experts), MAX_COUNTS, "steps x layers x experts")


def token_counts(values: NDArray[Any], what: str) -> NDArray[np.int64]:
    """Convert an array of token counts to int64.

    Raises:
        InvalidInput: a value is not a number, not finite, not whole, negative, above 2^53, or
            above 2048 in float16, which rounds it; or there are more than `MAX_COUNTS`.
    """
    check_size(values.shape, MAX_COUNTS, what)
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
    # float32 rounds large totals by a share that does not matter; float16 by up to one in 2048.
    limit = 2048 if values.dtype == np.float16 else 2**53
    if values.size and (values.min() < 0 or int(values.max()) > limit):
        raise InvalidInput(
            f"{what} holds {values.min()}..{values.max()}, counts of type {values.dtype} are"
            f" 0..{limit}"
        )
    return values.astype(np.int64)
