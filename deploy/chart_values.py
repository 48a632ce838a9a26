"""The chart's default values: the thresholds that rules and dashboards share."""

from pathlib import Path
from typing import Any

import yaml

__all__ = ["CHART", "ROOT", "Bound", "alert_thresholds", "bound", "values"]

ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm" / "evenkeel"


def values() -> dict[str, Any]:
    """Return the chart's default values."""
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded


def alert_thresholds() -> dict[str, Any]:
    """Return the thresholds of the alerts: numbers, and durations as Prometheus writes them."""
    found: dict[str, Any] = values()["prometheusRule"]["thresholds"]
    return found


class Bound(float):
    """The default of an alert's threshold, which remembers its name.

    A dashboard shows the number. The chart puts the threshold of its release in its place.
    """

    name: str

    def __new__(cls, value: float, name: str) -> "Bound":
        """Return a float with the name of the threshold."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    def halfway_to_one(self) -> "Bound":
        """Return the mean of the threshold and 1, which the chart computes too."""
        return Bound((1 + self) / 2, f"{self.name}.halfwayToOne")


def bound(name: str) -> Bound:
    """Return the threshold of the alerts with this name in values.yaml."""
    return Bound(alert_thresholds()[name], name)
