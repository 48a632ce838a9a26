"""The dashboard Evenkeel / Deployment: one deployment, from balance to ingest."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard, heatmap, table
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.chart_values import bound
from deploy.dashboards.alerts import firing_alerts
from deploy.dashboards.parts import (
    BLUE,
    GREEN,
    ONE,
    RED,
    SOURCE,
    YELLOW,
    age_of_steps,
    better_above,
    decisions_by_reason,
    gain_of_plans,
    line_panel,
    new_board,
    number_panel,
    query_of,
    ranks_missing,
    state_panel,
    thresholds,
    with_section,
    words,
)

__all__ = ["deployment", "now_panels", "plan_panels"]

_HELD = (
    f"max(evenkeel_held{{{ONE}}})"
    f" + 2 * (max(evenkeel_frozen_until_timestamp_seconds{{{ONE}}} > bool time()) or vector(0))"
)
_BALANCE = f"min(max by (phase) (evenkeel_balancedness_mean_ratio{{{ONE}}}))"


def now_panels() -> list[Any]:
    """Return the panels."""
    return [
        *_state(),
        *_figures(),
        firing_alerts(span=12),
        state_panel(
            "Decisions",
            "The reason with which the newest cycle of the control loop ended, over time.",
            [(f"max by (reason) (evenkeel_last_decision_reason{{{ONE}}})", "{{reason}}")],
        ),
    ]


def _state() -> list[Any]:
    held = number_panel(
        "Automatic plans",
        "Held: after a rollback, or after plans that did not deliver, automatic plans wait for"
        " `evenkeel resume`. Paused: an operator paused the deployment, until the pause ends or"
        " `evenkeel resume`."
        " In the modes observe and propose no plan starts by itself anyway.",
        _HELD,
        nothing="unknown",
    )
    held = held.mappings(
        words(
            {
                0: ("not held", GREEN),
                1: ("held", YELLOW),
                2: ("paused", YELLOW),
                3: ("held and paused", YELLOW),
            }
        )
    )
    return [
        number_panel(
            "Mode",
            "observe: no plan starts by itself. propose: plans wait for approval. auto: plans start"
            " by themselves.",
            f"max by (mode) (evenkeel_deployment_info{{{ONE}}})",
            legend="{{mode}}",
            names=True,
            nothing="no leader",
        ),
        number_panel(
            "State",
            "The state of the controller for this deployment, and why.",
            f"max by (state, reason) (evenkeel_deployment_state{{{ONE}}})",
            legend="{{state}} {{reason}}",
            names=True,
            nothing="no leader",
        ),
        number_panel(
            "Newest reason",
            "The reason with which the newest cycle ended; docs/api.md says where they are listed.",
            f"max by (reason) (evenkeel_last_decision_reason{{{ONE}}})",
            legend="{{reason}}",
            names=True,
            nothing="no decision yet",
        ),
        held,
        number_panel(
            "Age of the last plan",
            "Since the newest plan was committed.",
            f"time() - max(evenkeel_last_plan_committed_timestamp_seconds{{{ONE}}})",
            unit="s",
            nothing="no plan yet",
        ),
        number_panel(
            "Age of the last decision",
            "Since the newest cycle ended; red above the threshold of EvenkeelNoDecisions.",
            f"time() - max(evenkeel_last_decision_timestamp_seconds{{{ONE}}})",
            unit="s",
            colors=thresholds((None, GREEN), (bound("noDecisionsSeconds"), RED)),
            nothing="no decision yet",
        ),
    ]


def _figures() -> list[Any]:
    return [
        number_panel(
            "Lowest balancedness",
            "Mean balancedness of the worst phase; red below the threshold of"
            " EvenkeelBalancednessLow.",
            _BALANCE,
            unit="percentunit",
            colors=better_above(bound("balancednessMin")),
            nothing="unknown",
        ),
        number_panel(
            "Time balance",
            "Red below the threshold of EvenkeelTimeBalanceLow; unknown while only tokens are"
            " known.",
            f"max(evenkeel_time_balance_ratio{{{ONE}}})",
            unit="percentunit",
            colors=better_above(bound("timeBalanceMin")),
            nothing="unknown",
        ),
        number_panel(
            "Ranks missing",
            "Ranks that are declared but not heard, without those that stopped as planned.",
            f"max({ranks_missing()})",
            colors=thresholds((None, GREEN), (1, RED)),
            nothing="unknown",
        ),
        number_panel(
            "Phase of the active plan",
            "Empty while no plan is active.",
            f"max by (phase) (evenkeel_plan_phase{{{ONE}}})",
            legend="{{phase}}",
            names=True,
            nothing="no active plan",
        ),
        number_panel(
            "Gain of the last plan",
            "Saving of modelled MoE time on the steps since the newest committed plan. If it stays"
            " below zero, `evenkeel plan rollback` goes back to the placement before it; automatic"
            " plans then wait for `evenkeel resume`.",
            f'max(evenkeel_last_plan_gain_ratio{{{ONE},basis="realised"}})',
            unit="percentunit",
            colors=thresholds((None, RED), (0, GREEN)),
            nothing="not measured",
        ),
        number_panel(
            "Proposal waits for",
            "Since the oldest plan that waits for approval was made; yellow above the threshold"
            " of EvenkeelProposalWaiting.",
            f"time() - max(evenkeel_proposal_created_timestamp_seconds{{{ONE}}})",
            unit="s",
            colors=thresholds((None, BLUE), (bound("proposalWaitingSeconds"), YELLOW)),
            nothing="none waits",
        ),
    ]


_ROLLBACK = (
    " If the result stays below zero, `evenkeel plan rollback` goes back to the placement before"
    " the newest plan. A rollback is a plan of its own: it copies the weights back wave by wave,"
    " raises the epoch, and automatic plans wait for `evenkeel resume` after it."
)


def plan_panels() -> list[Any]:
    """Return the panels."""
    return [*_gains(), *_progress()]


def _gains() -> list[Any]:
    return [
        gain_of_plans("basis", "{{basis}}", f" Not latency.{_ROLLBACK}"),
        line_panel(
            "Promised against delivered gain",
            "Saving of MoE time of the newest measured plan: promised by its verdict, and delivered"
            f" by the seconds that ranks reported before and after it, with its 95 %"
            f" interval.{_ROLLBACK}",
            [
                (f"max(evenkeel_plan_promised_gain_ratio{{{ONE}}})", "promised"),
                (
                    f"max by (bound) (evenkeel_plan_delivered_gain_ratio{{{ONE}}})",
                    "delivered, {{bound}}",
                ),
            ],
            unit="percentunit",
            least=None,
        ),
        line_panel(
            "Calibration of gains",
            "The factor by which the next promise is multiplied, by what earlier plans delivered;"
            " 1 without measured plans.",
            [(f"max(evenkeel_gain_calibration_ratio{{{ONE}}})", "calibration")],
        ),
        line_panel(
            "Predicted against realised balancedness",
            "Under the newest committed plan: predicted on held-out steps, and realised on the"
            " steps since.",
            [(f"max by (basis) (evenkeel_last_plan_balancedness_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            most=1,
        ),
    ]


def _progress() -> list[Any]:
    return [
        state_panel(
            "State and phase of the plan",
            "The state of the controller for this deployment, and the phase of its plan.",
            [
                (f"max by (state) (evenkeel_deployment_state{{{ONE}}})", "{{state}}"),
                (f"max by (phase) (evenkeel_plan_phase{{{ONE}}})", "plan {{phase}}"),
            ],
        ),
        line_panel(
            "Waves of the active plan",
            "The ranks switch to a new placement at the end of each wave.",
            [
                (f"max(evenkeel_plan_waves_committed{{{ONE}}})", "committed"),
                (f"max(evenkeel_plan_waves{{{ONE}}})", "all"),
            ],
            span=6,
        ),
        line_panel(
            "Epoch",
            "It rises by one with each committed wave, also with those of a rollback.",
            [(f"max(evenkeel_epoch{{{ONE}}})", "epoch")],
            span=6,
        ),
    ]


def deployment() -> dashboard.Dashboard:
    """The dashboard."""
    board = new_board(
        "evenkeel-deployment",
        "Evenkeel / Deployment",
        "One deployment: what it does now and why, balance, load, plans, migrations, ranks,"
        " decisions, ingest.",
        many=False,
    )
    for title, panels, closed in (
        ("Now", now_panels(), False),
        ("Balance", _balance_panels(), False),
        ("Plans", plan_panels(), True),
        ("Load", _load_panels(), True),
        ("Migration", _migration_panels(), True),
        ("Ranks", _rank_panels(), True),
        ("Decisions and ingest", _ingest_panels(), True),
    ):
        board = with_section(board, title, panels, closed=closed)
    return board


def _balance_panels() -> list[Any]:
    return [
        line_panel(
            "Balancedness",
            "Mean over max of rank load per step and layer, averaged over the window; 1 is perfect."
            " The lower line is the threshold of EvenkeelBalancednessLow.",
            [
                (f"max by (phase) (evenkeel_balancedness_mean_ratio{{{ONE}}})", "{{phase}} mean"),
                (
                    f"max by (phase) (evenkeel_balancedness_worst_ratio{{{ONE}}})",
                    "{{phase}} worst layer",
                ),
            ],
            unit="percentunit",
            most=1,
            colors=better_above(bound("balancednessMin")),
        ),
        line_panel(
            "Time balance and balancedness",
            "Time balance: MoE time if work could be split freely, over predicted MoE time; absent"
            " while nothing is known of time. Balancedness: mean over the window."
            " The lower line is the threshold of EvenkeelTimeBalanceLow.",
            [
                (f"max(evenkeel_time_balance_ratio{{{ONE}}})", "time balance"),
                (f"max(evenkeel_time_balance_worst_ratio{{{ONE}}})", "time, worst layer"),
                (f"avg(evenkeel_balancedness_mean_ratio{{{ONE}}})", "balancedness"),
            ],
            unit="percentunit",
            most=1,
            colors=better_above(bound("timeBalanceMin")),
        ),
        state_panel(
            "Cost model",
            "The source of the cost model that plans are scored by: tokens, derived, profiled or"
            " measured.",
            [(f"max by (source) (evenkeel_cost_model_info{{{ONE}}})", "{{source}}")],
        ),
        line_panel(
            "Balancedness of the worst layers",
            "Only the worst layers have a series (metrics.worst_layers).",
            [(f"max by (layer) (evenkeel_layer_balancedness_ratio{{{ONE}}})", "layer {{layer}}")],
            unit="percentunit",
            most=1,
        ),
    ]


def _spread(by_rank: str) -> list[tuple[str, str]]:
    """Return the queries of a value of all ranks: as many curves at 8 ranks as at 320."""
    return [
        (f"max({by_rank})", "highest"),
        (f"quantile(0.9, {by_rank})", "90 % of the ranks are below"),
        (f"quantile(0.5, {by_rank})", "median"),
        (f"min({by_rank})", "lowest"),
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
            "Load over the mean of the ranks, summed over layers; 1 is balanced. The fullest,"
            " median and emptiest rank.",
            _spread(over_mean),
        ),
        line_panel(
            "Fullest ranks",
            "The five ranks with the highest load over the mean of the ranks.",
            [(f"topk(5, {over_mean})", "rank {{rank}}")],
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
        " metrics.layer_rank_series sets how many."
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
            "Per rank and wave. The line is the threshold of EvenkeelSwapStallHigh.",
            [
                (quantile(0.5, "evenkeel_swap_stall_seconds"), "median"),
                (quantile(0.99, "evenkeel_swap_stall_seconds"), "99 %"),
            ],
            unit="s",
            colors=thresholds((None, GREEN), (bound("swapStallSeconds"), RED)),
        ),
    ]


def _rank_panels() -> list[Any]:
    pace = f"max by (rank) (evenkeel_rank_compute_seconds_per_token{{{ONE}}})"
    slow = bound("slowRankRatio")
    return [
        line_panel(
            "Slow ranks",
            "Compute time of a rank over the median rank's time for the same tokens, measured"
            " before the collective; 1 is normal. The five slowest; the line is the threshold of"
            " EvenkeelSlowRank.",
            [
                (
                    f"topk(5, max by (rank) (evenkeel_rank_slowness_ratio{{{ONE}}}))",
                    "rank {{rank}}",
                )
            ],
            colors=thresholds((None, GREEN), (slow, RED)),
        ),
        line_panel(
            "Compute time per token",
            "Median over the window, of the slowest, median and fastest rank.",
            _spread(pace),
            unit="s",
        ),
        line_panel(
            "Ranks heard",
            "Ranks heard, declared, and stopped as planned.",
            [
                (f"max(sum without (rank) (evenkeel_rank_fresh{{{ONE}}}))", "heard"),
                (f"max(evenkeel_ranks_expected{{{ONE}}})", "declared"),
                (f"max(evenkeel_ranks_stopped{{{ONE}}})", "stopped as planned"),
            ],
        ),
        line_panel(
            "Live replicas of experts",
            "Experts of all layers with one live replica left, or none.",
            [
                (f"max(evenkeel_experts_down_to_one_replica{{{ONE}}})", "down to one replica"),
                (f'max(evenkeel_experts{{{ONE},live_replicas="none"}})', "without a replica"),
            ],
        ),
        line_panel(
            "Epochs of the ranks",
            "Highest and lowest epoch. They are equal, except during the step of a swap.",
            [
                (f"max(evenkeel_rank_epoch{{{ONE}}})", "highest"),
                (f"min(evenkeel_rank_epoch{{{ONE}}})", "lowest"),
            ],
        ),
        state_panel(
            "Ranks in trouble",
            "Ranks whose agent refuses every wave until the engine is restarted, ten at most;"
            " empty in normal operation.",
            [(f"topk(10, max by (rank) (evenkeel_rank_trouble{{{ONE}}}))", "rank {{rank}}")],
        ),
    ]


def _ingest_panels() -> list[Any]:
    rate = "[$__rate_interval]"
    return [
        decisions_by_reason(),
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
            "Steps dropped by recorders",
            "A recorder drops its oldest steps if the controller does not accept its reports. The"
            " five ranks that drop most.",
            [
                (
                    (
                        "topk(5, sum by (rank)"
                        f" (rate(evenkeel_report_steps_dropped_total{{{ONE}}}{rate})))"
                    ),
                    "rank {{rank}}",
                )
            ],
            unit="ops",
        ),
        age_of_steps("max", "age"),
    ]
