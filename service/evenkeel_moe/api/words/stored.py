"""Words about stored rows, of which each may be damaged or of another version."""

from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")


def words_or_row(
    as_stored: str, words: Callable[_P, str], *args: _P.args, **kwargs: _P.kwargs
) -> str:
    """Return the words about a row; the row as it is stored if it has not the form they need."""
    try:
        return words(*args, **kwargs)
    except Exception:  # Whatever one row holds, the others are read.
        return as_stored
