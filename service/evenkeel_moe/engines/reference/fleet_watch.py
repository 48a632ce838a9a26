"""Tells an operator the newest step of a running fleet, and why it has no controller."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

PATIENCE_S = 5.0
"""Seconds without a controller after which the operator is told: one may start just now."""


class FleetWatch:
    """Follows the lines that the ranks write.

    Args:
        tell: takes a sentence for the operator. Each reason not to be connected is told once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.step: int | None = None
        """Newest step that any rank wrote; None before the first."""
        self._tell = tell
        self._unconnected: dict[int, tuple[float, str]] = {}
        """The ranks without a controller: since when, and the newest reason."""
        self._told: set[str] = set()

    def feed(self, lines: Iterable[Mapping[str, Any]], now: float) -> None:
        """Take the lines written since the last call; `now` is in monotonic seconds."""
        for line in lines:
            if line["kind"] == "step":
                self.step = max(line["step"], -1 if self.step is None else self.step)
            elif line["kind"] == "exit" or (line["kind"] == "link" and line["connected"]):
                self._unconnected.pop(line["rank"], None)
            elif line["kind"] == "link":
                since, _ = self._unconnected.get(line["rank"], (now, ""))
                self._unconnected[line["rank"]] = since, line["detail"]
        for since, why in list(self._unconnected.values()):
            if now - since >= PATIENCE_S and why not in self._told:
                self._told.add(why)
                self._tell(f"{why}; the ranks serve without a controller and keep trying")
        if self._told and not self._unconnected:
            self._told.clear()
            self._tell("the ranks are connected to a controller")
