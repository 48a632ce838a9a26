"""Every query of the rules and the dashboards, and what they name."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tests.deploy.chart import CHART, ROOT

TARGET_LABELS = {"job", "instance", "namespace"}
"""Labels that Prometheus adds to every series."""
RULES = ROOT / "deploy" / "prometheus" / "evenkeel.rules.yaml"
ALERT_LABELS = {"alertname", "alertstate", "severity", "deployment"}
"""Labels that Prometheus adds to ALERTS, and those of our alerts that panels use."""
_METRIC = re.compile(r"\b((?:evenkeel|process)_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Query:
    where: str
    expr: str

    @property
    def metrics(self) -> set[str]:
        """Names as scraped, without those of Prometheus itself."""
        return {name for name, _ in _METRIC.findall(self.expr)} - {"up"}

    @property
    def labels(self) -> set[str]:
        """Label names in matchers and groupings."""
        matched = {
            label
            for _, matchers in _METRIC.findall(self.expr)
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        }
        groups = re.findall(r"\b(?:by|on|without|group_left|ignoring) \(([^)]*)\)", self.expr)
        return matched | {
            label.strip() for group in groups for label in group.split(",") if label.strip()
        }

    def filled(self, deployment: str = "demo") -> str:
        """With Grafana's variables replaced."""
        text = self.expr.replace("$namespace", ".*").replace("$deployment", deployment)
        return text.replace("$__rate_interval", "15s")


def dashboards() -> dict[str, dict]:
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted((CHART / "dashboards").glob("*.json"))
    }


def panels(board: dict) -> Iterator[dict]:
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def alerts() -> dict[str, dict]:
    """The shipped rules by the name of their alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def at_once(alert: str) -> dict:
    """Return a file with the rule of one alert, which fires after a second instead of minutes."""
    return {"groups": [{"name": "balance", "rules": [{**alerts()[alert], "for": "1s"}]}]}


def rule_queries() -> list[Query]:
    return [Query(name, rule["expr"]) for name, rule in alerts().items()]


def panel_queries() -> list[Query]:
    return [
        Query(f"{name} / {panel['title']} / {target['refId']}", target["expr"])
        for name, board in dashboards().items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def annotation_queries() -> list[Query]:
    return [
        Query(f"{name} / {one['name']}", one["expr"])
        for name, board in dashboards().items()
        for one in board["annotations"]["list"]
    ]
