"""The chart's default values: the thresholds that rules and dashboards share."""

from pathlib import Path
from typing import Any

import yaml

__all__ = ["CHART", "ROOT", "alert_thresholds", "values"]

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
