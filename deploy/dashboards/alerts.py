"""The alerts that fire, from the series that Prometheus itself writes."""

from grafana_foundation_sdk.builders import dashboard, table
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.dashboards.parts import BLUE, BY, ONE, RED, SOURCE, YELLOW, query_of, thresholds, words

_SEVERITIES = {1: ("info", BLUE), 2: ("warning", YELLOW), 3: ("critical", RED)}
_AND_CONTROLLERS = 'namespace=~"$namespace",deployment=~"$deployment|"'
"""Alerts about controllers name no deployment and concern all of them."""


def firing(severity: str, which: str = ONE) -> str:
    """Return the selector of the firing alerts of a severity."""
    return f'ALERTS{{alertname=~"Evenkeel.+",alertstate="firing",severity="{severity}",{which}}}'


def firing_alerts(span: int) -> table.Panel:
    """Return the table of firing alerts, the most severe first."""
    query = "\nor\n".join(
        f"{number} * max by ({BY}, alertname, severity) ({firing(name, _AND_CONTROLLERS)})"
        for number, (name, _) in reversed(_SEVERITIES.items())
    )
    panel = table.Panel().title("Firing alerts").datasource(SOURCE).span(span).height(8)
    panel = panel.description(
        "Alerts of Evenkeel that fire now, the most severe first; empty is good. Needs the alerts"
        " of the chart in this Prometheus (prometheusRule.enabled). Each has a page of the same"
        " name in docs/runbooks."
    )
    panel = panel.with_target(query_of(query, instant=True).format(PromQueryFormat.TABLE))
    panel = panel.no_value("No alert fires.")
    for options in (
        models.DataTransformerConfig(
            id_val="sortBy", options={"sort": [{"field": "Value", "desc": True}]}
        ),
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, "severity": True},
                "indexByName": {"Value": 0, "alertname": 1, "deployment": 2, "namespace": 3},
                "renameByName": {"Value": "severity", "alertname": "alert"},
            },
        ),
    ):
        panel = panel.with_transformation(options)
    panel = panel.thresholds(_colors()).mappings(words(_SEVERITIES))
    panel = panel.override_by_name(
        "severity",
        [
            models.DynamicConfigValue(
                id_val="custom.cellOptions",
                value={"type": kinds.TableCellDisplayMode.COLOR_TEXT.value},
            )
        ],
    )
    return panel


def _colors() -> dashboard.ThresholdsConfig:
    return thresholds((None, BLUE), (2, YELLOW), (3, RED))
