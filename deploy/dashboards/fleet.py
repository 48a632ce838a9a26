"""The dashboard Evenkeel / Fleet: all deployments on one page."""

from grafana_foundation_sdk.builders import (
    dashboard,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.dashboards.parts import (
    BY,
    GREEN,
    ONE,
    RED,
    SOURCE,
    YELLOW,
    line_panel,
    new_board,
    number_panel,
    query_of,
    thresholds,
)

__all__ = ["fleet"]


def fleet() -> dashboard.Dashboard:
    """The dashboard."""
    board = new_board(
        "evenkeel-fleet",
        "Evenkeel / Fleet",
        "All deployments: balance, ranks, decisions, ingest, controllers.",
        many=True,
    )
    board = board.with_row(dashboard.Row("Now"))
    for number in _fleet_numbers():
        board = board.with_panel(number)
    board = board.with_row(dashboard.Row("Balance"))
    for metric, title, what in (
        ("mean", "Balancedness, mean", "averaged over layers"),
        ("worst", "Balancedness, worst layer", "of the worst layer"),
    ):
        board = board.with_panel(
            line_panel(
                title,
                f"Mean over max of rank load, {what}; 1 is perfect.",
                [
                    (
                        f"max by ({BY}, phase) (evenkeel_balancedness_{metric}_ratio{{{ONE}}})",
                        "{{deployment}} {{phase}}",
                    )
                ],
                unit="percentunit",
                most=1,
            )
        )
    board = board.with_row(dashboard.Row("Plans and decisions"))
    board = board.with_panel(
        line_panel(
            "Decisions by reason",
            "Every cycle of the control loop ends with one of these reasons.",
            [
                (
                    f"sum by (reason) (rate(evenkeel_decisions_total{{{ONE}}}[$__rate_interval]))",
                    "{{reason}}",
                )
            ],
            unit="ops",
            stacked=True,
        )
    )
    board = board.with_panel(
        line_panel(
            "Plans ended in the last hour",
            "Plans by result. The first change of a new counter is not visible.",
            [
                (
                    f"sum by ({BY}, phase) (increase(evenkeel_plans_ended_total{{{ONE}}}[1h]))",
                    "{{deployment}} {{phase}}",
                )
            ],
        )
    )
    board = board.with_panel(
        line_panel(
            "Expert weights moved",
            "Bytes copied between ranks in committed waves.",
            [
                (
                    (
                        f"sum by ({BY})"
                        f" (rate(evenkeel_migrated_bytes_total{{{ONE}}}[$__rate_interval]))"
                    ),
                    "{{deployment}}",
                )
            ],
            unit="Bps",
        )
    )
    board = board.with_panel(
        line_panel(
            "Predicted against realised gain",
            "Saving of modelled MoE time by the newest committed plan: predicted on held-out steps,"
            " and realised on the steps since.",
            [
                (
                    f"max by ({BY}, basis) (evenkeel_last_plan_gain_ratio{{{ONE}}})",
                    "{{deployment}} {{basis}}",
                )
            ],
            unit="percentunit",
            least=None,
        )
    )
    board = board.with_row(dashboard.Row("Ingest and controllers"))
    for panel in _fleet_ingest():
        board = board.with_panel(panel)
    return board.with_panel(_deployments_table())


def _fleet_numbers() -> list[stat.Panel]:
    bad_above_zero = thresholds((None, GREEN), (1, RED))
    return [
        number_panel(
            "Deployments led",
            "Deployments that a replica leads.",
            f"sum(max by ({BY}) (evenkeel_leading{{{ONE}}}))",
        ),
        number_panel(
            "Without a leader",
            "Deployments that replicas know but none leads.",
            f"count(max by ({BY}) (evenkeel_leading{{{ONE}}}))"
            f" - sum(max by ({BY}) (evenkeel_leading{{{ONE}}}))",
            colors=bad_above_zero,
        ),
        number_panel(
            "Ranks missing",
            "Ranks that are declared but not heard.",
            f"sum(max by ({BY}) (evenkeel_ranks_expected{{{ONE}}})) - sum(max by ({BY}) "
            f"(sum without (rank) (evenkeel_rank_fresh{{{ONE}}})))",
            colors=bad_above_zero,
        ),
        number_panel(
            "Lowest balancedness",
            "The lowest mean balancedness of any deployment and phase.",
            f"min(max by ({BY}, phase) (evenkeel_balancedness_mean_ratio{{{ONE}}}))",
            unit="percentunit",
            colors=thresholds((None, RED), (0.75, YELLOW), (0.9, GREEN)),
        ),
        number_panel(
            "Stores out of reach",
            "Controllers that cannot reach Redis.",
            'sum(evenkeel_store_degraded{namespace=~"$namespace"})',
            colors=bad_above_zero,
        ),
        number_panel(
            "Version",
            "Running versions.",
            'count by (version) (evenkeel_build_info{namespace=~"$namespace"})',
            legend="{{version}}",
            names=True,
        ),
    ]


def _fleet_ingest() -> list[timeseries.Panel]:
    return [
        line_panel(
            "Rank steps taken in",
            "Steps accepted from reports, summed over ranks.",
            [
                (
                    f"sum by ({BY}) (rate(evenkeel_report_steps_total{{{ONE}}}[$__rate_interval]))",
                    "{{deployment}}",
                )
            ],
            unit="ops",
        ),
        line_panel(
            "Rank steps rejected",
            "Quarantined steps by reason; they are not used.",
            [
                (
                    (
                        "sum by (reason)"
                        f" (rate(evenkeel_report_steps_rejected_total{{{ONE}}}[$__rate_interval]))"
                    ),
                    "{{reason}}",
                )
            ],
            unit="ops",
        ),
        line_panel(
            "Age of the newest complete step",
            "The controller does not plan on old loads.",
            [
                (
                    f"time() - max by ({BY}) (evenkeel_newest_step_timestamp_seconds{{{ONE}}})",
                    "{{deployment}}",
                )
            ],
            unit="s",
        ),
        line_panel(
            "Store: time since its last answer",
            "By controller.",
            [
                (
                    'time() - evenkeel_store_answered_timestamp_seconds{namespace=~"$namespace"}',
                    "{{instance}}",
                )
            ],
            unit="s",
        ),
    ]


def _deployments_table() -> table.Panel:
    info = f"max by ({BY}, mode, policy, leader) (evenkeel_deployment_info{{{ONE}}})"
    hidden = {"Time": True, "Value": True}
    panel = (
        table.Panel()
        .title("Deployments")
        .description("Mode, policy and leader.")
        .datasource(SOURCE)
    )
    panel = (
        panel.span(24)
        .height(8)
        .with_target(query_of(info, instant=True).format(PromQueryFormat.TABLE))
    )
    return panel.with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    )
