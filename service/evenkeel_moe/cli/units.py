"""Moments as people read them on a terminal, where `-o json` prints the controller's numbers."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def moment(unix: float | None) -> str:
    """Return Unix seconds as UTC text, or `-` if they are unknown."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S")


def dated(
    rows: Sequence[Mapping[str, Any]], key: str = "at"
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows with their moments as UTC text, and a line that names their day.

    If all are of one day they show only the time; else there is no line.
    """
    dated_rows = [{**row, key: moment(row[key])} for row in rows]
    days = {row[key][:10] for row in dated_rows}
    if len(days) != 1 or days == {"-"}:
        return dated_rows, []
    return [{**row, key: row[key][11:]} for row in dated_rows], [f"all on {days.pop()}"]
