"""The table of deployments: one row each, the worst first, with a link to its dashboard."""

from typing import Any

from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.chart_values import bound
from deploy.dashboards.alerts import firing
from deploy.dashboards.parts import (
    BY,
    GREEN,
    ONE,
    RED,
    SOURCE,
    YELLOW,
    better_above,
    newest,
    query_of,
    ranks_missing,
    thresholds,
    words,
)

_PAGE = (
    "/d/evenkeel-deployment?var-datasource=${datasource}&var-namespace=${__data.fields.namespace}"
    "&var-deployment=${__data.fields.deployment}&${__url_time_range}"
)
_NONE = f"0 * max by ({BY}) (evenkeel_leading{{{ONE}}})"
_BALANCE = f"min by ({BY}) (evenkeel_balancedness_mean_ratio{{{ONE}}})"


def _count(severity: str) -> str:
    """Return the query of the firing alerts of each deployment that is known."""
    return f"(count by ({BY}) ({firing(severity)}) or {_NONE})"


_COLUMNS = {
    "C": ("critical alerts", f"{_count('critical')} + {_NONE}"),
    "D": ("warnings", f"{_count('warning')} + {_NONE}"),
    "E": ("lowest balancedness", _BALANCE),
    "F": ("ranks missing", ranks_missing()),
    "G": ("held", newest("evenkeel_held", BY)),
    "H": (
        "age of the last plan",
        f"time() - max by ({BY}) (evenkeel_last_plan_committed_timestamp_seconds{{{ONE}}})",
    ),
    "I": (
        "order",
        (
            f"1000 * ({_count('critical')} + {_NONE}) + 10 * ({_count('warning')} + {_NONE})"
            f" + 1 - ({_BALANCE} or 1 + {_NONE})"
        ),
    ),
}
"""Letter of the query -> name of the column, expression."""


def deployments_table() -> table.Panel:
    """Return the table."""
    panel = table.Panel().title("Deployments").datasource(SOURCE).span(24).height(9)
    panel = panel.description(
        "One row for each deployment, the worst first: by critical alerts, then warnings, then"
        " balance. A click on the name opens its dashboard."
    )
    names = {
        "A": newest("evenkeel_deployment_info", f"{BY}, mode, policy, leader"),
        "B": newest("evenkeel_deployment_state", f"{BY}, state, reason"),
        **{letter: expr for letter, (_, expr) in _COLUMNS.items()},
    }
    for letter, expr in names.items():
        query = query_of(expr, instant=True, letter=letter).format(PromQueryFormat.TABLE)
        panel = panel.with_target(query)
    order = ["deployment", "state", "reason", "mode"]
    shown = [*order, *(f"Value #{letter}" for letter in _COLUMNS), "policy", "leader", "namespace"]
    hidden = ("Time", "Value #A", "Value #B", "Value #I")
    for name, options in (
        ("merge", {}),
        ("sortBy", {"sort": [{"field": "Value #I", "desc": True}]}),
        (
            "organize",
            {
                "excludeByName": dict.fromkeys(hidden, True),
                "indexByName": {name: place for place, name in enumerate(shown)},
                "renameByName": {
                    f"Value #{letter}": title for letter, (title, _) in _COLUMNS.items()
                },
            },
        ),
    ):
        panel = panel.with_transformation(
            models.DataTransformerConfig(id_val=name, options=options)
        )
    for column, properties in _looks().items():
        panel = panel.override_by_name(column, properties)
    return panel


def _looks() -> dict[str, list[models.DynamicConfigValue]]:
    bad_above_zero = thresholds((None, GREEN), (1, RED)).build()
    balance = better_above(bound("balancednessMin")).build()
    warnings = thresholds((None, GREEN), (1, YELLOW)).build()
    return {
        "deployment": [_set("links", [{"title": "Open its dashboard", "url": _PAGE}])],
        "critical alerts": _colored(bad_above_zero),
        "warnings": _colored(warnings),
        "lowest balancedness": [*_colored(balance), _set("unit", "percentunit")],
        "ranks missing": _colored(bad_above_zero),
        "held": [
            *_colored(warnings),
            _set("mappings", words({0: ("no", GREEN), 1: ("held", YELLOW)})),
        ],
        "age of the last plan": [_set("unit", "s")],
    }


def _set(name: str, value: Any) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=name, value=value)


def _colored(colors: Any) -> list[models.DynamicConfigValue]:
    return [_set("thresholds", colors), _set("custom.cellOptions", {"type": "color-text"})]
