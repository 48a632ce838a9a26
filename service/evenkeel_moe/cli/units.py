"""Moments as people read them on a terminal, where `-o json` prints the controller's numbers."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def moment(unix: float | None) -> str:
    """Return Unix seconds as UTC text, or `-` if they are unknown."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moments(unix: Sequence[float | None]) -> tuple[list[str], list[str]]:
    """Return moments as UTC text, and a line that names their day.

    If all are of one day they show only the time; else there is no line.
    """
    texts = [moment(one) for one in unix]
    days = {text[:10] for text in texts}
    if len(days) != 1 or None in unix:
        return texts, []
    return [text[11:] for text in texts], [f"all on {days.pop()}"]


def dated(
    rows: Sequence[Mapping[str, Any]], key: str = "at"
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows with their moments as `moments` writes them, and its line about their day."""
    texts, day = moments([row[key] for row in rows])
    return [{**row, key: text} for text, row in zip(texts, rows, strict=True)], day
