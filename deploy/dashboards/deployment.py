"""The dashboard Evenkeel / Deployment: one deployment, from balance to ingest."""

from typing import Any

from grafana_foundation_sdk.builders import (
    dashboard,
    heatmap,
    statetimeline,
    table,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.dashboards.parts import (
    BLUE,
    GREEN,
    ONE,
    RED,
    SOURCE,
    YELLOW,
    line_panel,
    new_board,
    query_of,
    thresholds,
    with_queries,
)

__all__ = ["deployment"]


def deployment() -> dashboard.Dashboard:
    """The dashboard."""
    board = new_board(
        "evenkeel-deployment",
        "Evenkeel / Deployment",
        "One deployment: balance, load per rank and layer, plans, migrations, slow ranks,"
        " decisions, ingest.",
        many=False,
    )
    for title, panels in (
        ("Balance", _balance_panels()),
        ("Load", _load_panels()),
        ("Plans", _plan_panels()),
        ("Migration", _migration_panels()),
        ("Ranks", _rank_panels()),
        ("Decisions and ingest", _ingest_panels()),
    ):
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return board


def _balance_panels() -> list[Any]:
    return [
        line_panel(
            "Balancedness",
            "Mean over max of rank load per step and layer, averaged over the window;"
            " 1 is perfect.",
            [
                (f"max by (phase) (evenkeel_balancedness_mean_ratio{{{ONE}}})", "{{phase}} mean"),
                (
                    f"max by (phase) (evenkeel_balancedness_worst_ratio{{{ONE}}})",
                    "{{phase}} worst layer",
                ),
            ],
            unit="percentunit",
            most=1,
        ),
        line_panel(
            "Time balance and token balance",
            "Time balance: MoE time if work could be split freely, over predicted MoE time; absent"
            " while nothing is known of time. Token balance: balancedness, averaged over the"
            " window.",
            [
                (f"max(evenkeel_time_balance_ratio{{{ONE}}})", "time balance"),
                (f"max(evenkeel_time_balance_worst_ratio{{{ONE}}})", "time, worst layer"),
                (f"avg(evenkeel_balancedness_mean_ratio{{{ONE}}})", "token balance"),
            ],
            unit="percentunit",
            most=1,
        ),
        line_panel(
            "Cost model",
            "The source of the cost model that plans are scored by: tokens, derived, profiled or"
            " measured. 1 while it is in use.",
            [(f"max by (source) (evenkeel_cost_model_info{{{ONE}}})", "{{source}}")],
            most=1,
        ),
        line_panel(
            "Balancedness of the worst layers",
            "Only the worst layers have a series (metrics.worst_layers).",
            [(f"max by (layer) (evenkeel_layer_balancedness_ratio{{{ONE}}})", "layer {{layer}}")],
            unit="percentunit",
            most=1,
        ),
    ]


def _load_panels() -> list[Any]:
    over_mean = (
        f"max by (rank) (evenkeel_rank_load_share_ratio{{{ONE}}})"
        f" * scalar(max(evenkeel_ranks_expected{{{ONE}}}))"
    )
    heat = heatmap.Panel().title("Load per rank over time").datasource(SOURCE).span(12).height(9)
    heat = heat.description("Load over the mean of the ranks, summed over layers; 1 is balanced.")
    heat = heat.calculate(False).color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("RdYlGn")
        .reverse(True)
        .steps(64)
        .min(0.5)
        .max(1.5)
    )
    heat = heat.with_target(query_of(over_mean, "{{rank}}").format(PromQueryFormat.TIME_SERIES))
    return [
        line_panel(
            "Load per rank",
            "Load over the mean of the ranks, summed over layers; 1 is balanced.",
            [(over_mean, "rank {{rank}}")],
        ),
        heat,
        _layer_matrix(),
        line_panel(
            "Redundant replicas per layer",
            "Filled slots of a layer in addition to one for each expert.",
            [
                (
                    f"max by (statistic) (evenkeel_redundant_replicas_per_layer{{{ONE}}})",
                    "{{statistic}}",
                ),
                (f"max by (layer) (evenkeel_layer_redundant_replicas{{{ONE}}})", "layer {{layer}}"),
            ],
        ),
    ]


def _layer_matrix() -> table.Panel:
    expr = f"max by (layer, rank) (evenkeel_layer_rank_load_ratio{{{ONE}}})"
    panel = (
        table.Panel().title("Heat map of layers and ranks").datasource(SOURCE).span(12).height(9)
    )
    panel = panel.description(
        "Current load of a rank in a layer over the layer's mean, worst layers first."
        " Needs metrics.layer_rank_series."
    )
    panel = panel.with_target(query_of(expr, instant=True).format(PromQueryFormat.TABLE)).decimals(
        2
    )
    panel = panel.thresholds(thresholds((None, BLUE), (0.8, GREEN), (1.2, YELLOW), (1.5, RED)))
    panel = panel.cell_options(
        kinds.TableColoredBackgroundCellOptions(mode=kinds.TableCellBackgroundDisplayMode.BASIC)
    )
    matrix = {"columnField": "rank", "rowField": "layer", "valueField": "Value"}
    return panel.with_transformation(
        models.DataTransformerConfig(id_val="groupingToMatrix", options=matrix)
    )


def _plan_panels() -> list[Any]:
    phases = (
        statetimeline.Panel()
        .title("State and phase of the plan")
        .datasource(SOURCE)
        .span(12)
        .height(8)
    )
    phases = phases.description(
        "The state of the controller for this deployment, and the phase of its plan."
    )
    phases = with_queries(
        phases,
        [
            (f"max by (state) (evenkeel_deployment_state{{{ONE}}})", "{{state}}"),
            (f"max by (phase) (evenkeel_plan_phase{{{ONE}}})", "plan {{phase}}"),
        ],
    )
    return [
        line_panel(
            "Predicted against realised gain",
            "Saving of modelled MoE time by the newest committed plan: predicted on held-out steps,"
            " and realised on the steps since. Not latency.",
            [(f"max by (basis) (evenkeel_last_plan_gain_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            least=None,
        ),
        line_panel(
            "Promised against delivered gain",
            "Saving of MoE time of the newest measured plan: promised by its verdict, and delivered"
            " by the seconds that ranks reported before and after it, with its 95 % interval. The"
            " calibration is the factor by which the next promise is multiplied.",
            [
                (f"max(evenkeel_plan_promised_gain_ratio{{{ONE}}})", "promised"),
                (
                    f"max by (bound) (evenkeel_plan_delivered_gain_ratio{{{ONE}}})",
                    "delivered, {{bound}}",
                ),
                (f"max(evenkeel_gain_calibration_ratio{{{ONE}}})", "calibration"),
            ],
            unit="percentunit",
            least=None,
        ),
        line_panel(
            "Predicted against realised balancedness",
            "Under the newest committed plan: predicted on held-out steps, and realised on the"
            " steps since.",
            [(f"max by (basis) (evenkeel_last_plan_balancedness_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            most=1,
        ),
        phases,
        line_panel(
            "Epoch and waves",
            "The epoch rises by one with each committed wave.",
            [
                (f"max(evenkeel_epoch{{{ONE}}})", "epoch"),
                (
                    f"max(evenkeel_plan_waves_committed{{{ONE}}})",
                    "waves committed of the active plan",
                ),
                (f"max(evenkeel_plan_waves{{{ONE}}})", "waves of the active plan"),
            ],
        ),
    ]


def _migration_panels() -> list[Any]:
    def quantile(q: float, metric: str) -> str:
        rate = f"rate({metric}_bucket{{{ONE}}}[$__rate_interval])"
        return f"histogram_quantile({q}, sum by (le) ({rate}))"

    return [
        line_panel(
            "Bytes moved",
            "Bytes of expert weights copied between ranks in committed waves.",
            [(f"sum(rate(evenkeel_migrated_bytes_total{{{ONE}}}[$__rate_interval]))", "bytes")],
            unit="Bps",
        ),
        line_panel(
            "Staging of the current wave",
            "Bytes staged and total bytes to stage while a plan is active.",
            [
                (f"max(evenkeel_staging_done_bytes{{{ONE}}})", "done"),
                (f"max(evenkeel_staging_planned_bytes{{{ONE}}})", "planned"),
            ],
            unit="bytes",
        ),
        line_panel(
            "Duration of waves",
            "From the first Prepare to the commit.",
            [
                (quantile(0.5, "evenkeel_wave_duration_seconds"), "median"),
                (quantile(0.95, "evenkeel_wave_duration_seconds"), "95 %"),
            ],
            unit="s",
        ),
        line_panel(
            "Stall of the step by swaps",
            "Per rank and wave.",
            [
                (quantile(0.5, "evenkeel_swap_stall_seconds"), "median"),
                (quantile(0.99, "evenkeel_swap_stall_seconds"), "99 %"),
            ],
            unit="s",
        ),
    ]


def _rank_panels() -> list[Any]:
    pace = f"max by (rank) (evenkeel_rank_compute_seconds_per_token{{{ONE}}})"
    return [
        line_panel(
            "Slow ranks",
            "Compute time of a rank over the median rank's time for the same tokens, measured"
            " before the collective; 1 is normal.",
            [(f"max by (rank) (evenkeel_rank_slowness_ratio{{{ONE}}})", "rank {{rank}}")],
        ),
        line_panel(
            "Ranks in trouble",
            "Ranks whose agent refuses every wave until the engine is restarted;"
            " empty in normal operation.",
            [(f"max by (rank) (evenkeel_rank_trouble{{{ONE}}})", "rank {{rank}}")],
        ),
        line_panel(
            "Compute time per token", "Median over the window.", [(pace, "rank {{rank}}")], unit="s"
        ),
        line_panel(
            "Epoch of each rank",
            "All ranks have the same epoch, except during the step of a swap.",
            [(f"max by (rank) (evenkeel_rank_epoch{{{ONE}}})", "rank {{rank}}")],
        ),
        line_panel(
            "Live ranks and replicas",
            "Ranks heard and ranks declared; experts of all layers with one live replica left,"
            " or none.",
            [
                (f"max(sum without (rank) (evenkeel_rank_fresh{{{ONE}}}))", "ranks heard"),
                (f"max(evenkeel_ranks_expected{{{ONE}}})", "ranks declared"),
                (
                    f"max(evenkeel_experts_down_to_one_replica{{{ONE}}})",
                    "experts down to one replica",
                ),
                (
                    f'max(evenkeel_experts{{{ONE},live_replicas="none"}})',
                    "experts without a replica",
                ),
            ],
        ),
    ]


def _ingest_panels() -> list[Any]:
    rate = "[$__rate_interval]"
    return [
        line_panel(
            "Decisions by reason",
            "Every cycle of the control loop ends with one of these reasons.",
            [(f"sum by (reason) (rate(evenkeel_decisions_total{{{ONE}}}{rate}))", "{{reason}}")],
            unit="ops",
            stacked=True,
        ),
        line_panel(
            "Steps in the window",
            "Complete steps in the fullest window.",
            [(f"max(evenkeel_window_steps{{{ONE}}})", "steps")],
        ),
        line_panel(
            "Rank steps accepted and rejected",
            "Steps summed over ranks; rejected steps are not used.",
            [
                (f"sum(rate(evenkeel_report_steps_total{{{ONE}}}{rate}))", "accepted"),
                (
                    f"sum by (reason) (rate(evenkeel_report_steps_rejected_total{{{ONE}}}{rate}))",
                    "{{reason}}",
                ),
            ],
            unit="ops",
        ),
        line_panel(
            "Steps dropped by recorders, and age of the newest step",
            "A recorder drops its oldest steps if the controller does not accept its reports.",
            [
                (
                    f"sum by (rank) (rate(evenkeel_report_steps_dropped_total{{{ONE}}}{rate}))",
                    "dropped by rank {{rank}} [1/s]",
                ),
                (f"time() - max(evenkeel_newest_step_timestamp_seconds{{{ONE}}})", "age [s]"),
            ],
        ),
    ]
