"""The dashboard Evenkeel / Fleet: all deployments on one page, worst first."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard, stat
from grafana_foundation_sdk.models import common as kinds

from deploy.chart_values import bound
from deploy.dashboards.alerts import firing_alerts
from deploy.dashboards.controllers import controller_panels
from deploy.dashboards.deployments_table import deployments_table
from deploy.dashboards.parts import (
    BY,
    GREEN,
    ONE,
    RED,
    age_of_steps,
    better_above,
    decisions_by_reason,
    gain_of_plans,
    line_panel,
    new_board,
    newest,
    number_panel,
    ranks_missing,
    rate_of,
    thresholds,
    with_section,
)

_OF_CONTROLLERS = '{namespace=~"$namespace"}'


def fleet() -> dashboard.Dashboard:
    """The dashboard."""
    board = new_board(
        "evenkeel-fleet",
        "Evenkeel / Fleet",
        "All deployments, worst first: alerts, balance, plans, ingest, controllers.",
        many=True,
    )
    now = [deployments_table(), *_numbers(), firing_alerts(span=24)]
    board = with_section(board, "Now", now, closed=False)
    board = with_section(board, "Balance", _balance(), closed=False)
    board = with_section(board, "Plans and decisions", _plans(), closed=True)
    board = with_section(board, "Ingest", _ingest(), closed=True)
    return with_section(board, "Controllers", controller_panels(), closed=True)


def _numbers() -> list[stat.Panel]:
    bad_above_zero = thresholds((None, GREEN), (1, RED))
    led = newest("evenkeel_leading", BY)
    return [
        number_panel(
            "Deployments led",
            "Deployments that a controller replica leads.",
            f"sum({led})",
        ),
        number_panel(
            "Without a leader",
            "Deployments that controller replicas know but none leads.",
            f"count({led}) - sum({led})",
            colors=bad_above_zero,
        ),
        number_panel(
            "Ranks missing",
            "Ranks that are declared but not heard, without those that stopped as planned.",
            f"sum({ranks_missing()})",
            colors=bad_above_zero,
        ),
        number_panel(
            "Lowest balancedness",
            "The lowest mean balancedness of any deployment and phase; red below the threshold of"
            " EvenkeelBalancednessLow.",
            f"min(max by ({BY}, phase) (evenkeel_balancedness_mean_ratio{{{ONE}}}))",
            unit="percentunit",
            colors=better_above(bound("balancednessMin")),
        ),
        number_panel(
            "Stores out of reach",
            "Controllers that cannot reach Redis.",
            f"sum(evenkeel_store_degraded{_OF_CONTROLLERS})",
            colors=bad_above_zero,
        ),
        number_panel(
            "Version",
            "Running versions.",
            f"count by (version) (evenkeel_build_info{_OF_CONTROLLERS})",
            legend="{{version}}",
            names=True,
        ).orientation(kinds.VizOrientation.HORIZONTAL),
    ]


def _balance() -> list[Any]:
    least = bound("balancednessMin")
    return [
        line_panel(
            title,
            f"Mean over max of rank load, {what}; 1 is perfect. The ten lowest.{more}",
            {"{{deployment}} {{phase}}": f"bottomk(10, {newest(metric, f'{BY}, phase')})"},
            unit="percentunit",
            most=1,
            colors=colors,
        )
        for metric, title, what, more, colors in (
            (
                "evenkeel_balancedness_mean_ratio",
                "Balancedness, mean",
                "averaged over layers",
                " The lines are the colours of the table above.",
                better_above(least),
            ),
            (
                "evenkeel_balancedness_worst_ratio",
                "Balancedness, worst layer",
                "of the worst layer",
                "",
                None,
            ),
        )
    ]


def _plans() -> list[Any]:
    ended = f"increase(evenkeel_plans_ended_total{{{ONE}}}[1h])"
    return [
        decisions_by_reason(),
        line_panel(
            "Plans ended in the last hour",
            "Plans by result. The first change of a new counter is not visible.",
            {"{{deployment}} {{phase}}": f"sum by ({BY}, phase) ({ended})"},
        ),
        line_panel(
            "Expert weights moved",
            "Bytes copied between ranks in committed waves.",
            {"{{deployment}}": rate_of("evenkeel_migrated_bytes_total", BY)},
            unit="Bps",
        ),
        gain_of_plans(
            f"{BY}, basis",
            "{{deployment}} {{basis}}",
            " A deployment whose realised gain stays below zero may need a rollback: open it from"
            " the table on top.",
        ),
    ]


def _ingest() -> list[Any]:
    return [
        line_panel(
            "Rank steps taken in",
            "Steps accepted from reports, summed over ranks.",
            {"{{deployment}}": rate_of("evenkeel_report_steps_total", BY)},
            unit="ops",
        ),
        line_panel(
            "Rank steps rejected",
            "Quarantined steps by reason; they are not used.",
            {"{{reason}}": rate_of("evenkeel_report_steps_rejected_total", "reason")},
            unit="ops",
        ),
        age_of_steps(f"max by ({BY}) ", "{{deployment}}"),
    ]
