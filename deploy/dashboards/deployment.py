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
    newest,
    number_panel,
    query_of,
    ranks_missing,
    rate_of,
    state_panel,
    thresholds,
    with_section,
    words,
)

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
            {"{{reason}}": newest("evenkeel_last_decision_reason", "reason")},
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
            newest("evenkeel_deployment_info", "mode"),
            legend="{{mode}}",
            names=True,
            nothing="no leader",
        ),
        number_panel(
            "State",
            "The state of the controller for this deployment, and why.",
            newest("evenkeel_deployment_state", "state, reason"),
            legend="{{state}} {{reason}}",
            names=True,
            nothing="no leader",
        ),
        number_panel(
            "Newest reason",
            "The reason with which the newest cycle ended; docs/api.md says where they are listed.",
            newest("evenkeel_last_decision_reason", "reason"),
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
            newest("evenkeel_time_balance_ratio"),
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
            newest("evenkeel_plan_phase", "phase"),
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
            {
                "promised": newest("evenkeel_plan_promised_gain_ratio"),
                "delivered, {{bound}}": newest("evenkeel_plan_delivered_gain_ratio", "bound"),
            },
            unit="percentunit",
            least=None,
        ),
        line_panel(
            "Calibration of gains",
            "The factor by which the next promise is multiplied, by what earlier plans delivered;"
            " 1 without measured plans.",
            {"calibration": newest("evenkeel_gain_calibration_ratio")},
        ),
        line_panel(
            "Predicted against realised balancedness",
            "Under the newest committed plan: predicted on held-out steps, and realised on the"
            " steps since.",
            {"{{basis}}": newest("evenkeel_last_plan_balancedness_ratio", "basis")},
            unit="percentunit",
            most=1,
        ),
    ]


def _progress() -> list[Any]:
    return [
        state_panel(
            "State and phase of the plan",
            "The state of the controller for this deployment, and the phase of its plan.",
            {
                "{{state}}": newest("evenkeel_deployment_state", "state"),
                "plan {{phase}}": newest("evenkeel_plan_phase", "phase"),
            },
        ),
        line_panel(
            "Waves of the active plan",
            "The ranks switch to a new placement at the end of each wave.",
            {
                "committed": newest("evenkeel_plan_waves_committed"),
                "all": newest("evenkeel_plan_waves"),
            },
            span=6,
        ),
        line_panel(
            "Epoch",
            "It rises by one with each committed wave, also with those of a rollback.",
            {"epoch": newest("evenkeel_epoch")},
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
            {
                "{{phase}} mean": newest("evenkeel_balancedness_mean_ratio", "phase"),
                "{{phase}} worst layer": newest("evenkeel_balancedness_worst_ratio", "phase"),
            },
            unit="percentunit",
            most=1,
            colors=better_above(bound("balancednessMin")),
        ),
        line_panel(
            "Time balance and balancedness",
            "Time balance: MoE time if work could be split freely, over predicted MoE time; absent"
            " while nothing is known of time. Balancedness: mean over the window."
            " The lower line is the threshold of EvenkeelTimeBalanceLow.",
            {
                "time balance": newest("evenkeel_time_balance_ratio"),
                "time, worst layer": newest("evenkeel_time_balance_worst_ratio"),
                "balancedness": f"avg(evenkeel_balancedness_mean_ratio{{{ONE}}})",
            },
            unit="percentunit",
            most=1,
            colors=better_above(bound("timeBalanceMin")),
        ),
        state_panel(
            "Cost model",
            "The source of the cost model that plans are scored by: tokens, derived, profiled or"
            " measured.",
            {"{{source}}": newest("evenkeel_cost_model_info", "source")},
        ),
        line_panel(
            "Balancedness of the worst layers",
            "Only the worst layers have a series (metrics.worst_layers).",
            {"layer {{layer}}": newest("evenkeel_layer_balancedness_ratio", "layer")},
            unit="percentunit",
            most=1,
        ),
    ]


def _spread(by_rank: str) -> dict[str, str]:
    """Return the queries of a value of all ranks: as many curves at 8 ranks as at 320."""
    return {
        "highest": f"max({by_rank})",
        "90 % of the ranks are below": f"quantile(0.9, {by_rank})",
        "median": f"quantile(0.5, {by_rank})",
        "lowest": f"min({by_rank})",
    }


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
            {"rank {{rank}}": f"topk(5, {over_mean})"},
        ),
        heat,
        _layer_matrix(),
        line_panel(
            "Redundant replicas per layer",
            "Filled slots of a layer in addition to one for each expert.",
            {
                "{{statistic}}": newest("evenkeel_redundant_replicas_per_layer", "statistic"),
                "layer {{layer}}": newest("evenkeel_layer_redundant_replicas", "layer"),
            },
        ),
    ]


def _layer_matrix() -> table.Panel:
    expr = newest("evenkeel_layer_rank_load_ratio", "layer, rank")
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
            {"bytes": rate_of("evenkeel_migrated_bytes_total")},
            unit="Bps",
        ),
        line_panel(
            "Staging of the current wave",
            "Bytes staged and total bytes to stage while a plan is active.",
            {
                "done": newest("evenkeel_staging_done_bytes"),
                "planned": newest("evenkeel_staging_planned_bytes"),
            },
            unit="bytes",
        ),
        line_panel(
            "Duration of waves",
            "From the first Prepare to the commit.",
            {
                "median": quantile(0.5, "evenkeel_wave_duration_seconds"),
                "95 %": quantile(0.95, "evenkeel_wave_duration_seconds"),
            },
            unit="s",
        ),
        line_panel(
            "Stall of the step by swaps",
            "Per rank and wave. The line is the threshold of EvenkeelSwapStallHigh.",
            {
                "median": quantile(0.5, "evenkeel_swap_stall_seconds"),
                "99 %": quantile(0.99, "evenkeel_swap_stall_seconds"),
            },
            unit="s",
            colors=thresholds((None, GREEN), (bound("swapStallSeconds"), RED)),
        ),
    ]


def _rank_panels() -> list[Any]:
    pace = newest("evenkeel_rank_compute_seconds_per_token", "rank")
    slow = bound("slowRankRatio")
    return [
        line_panel(
            "Slow ranks",
            "Compute time of a rank over the median rank's time for the same tokens, measured"
            " before the collective; 1 is normal. The five slowest; the line is the threshold of"
            " EvenkeelSlowRank.",
            {"rank {{rank}}": f"topk(5, max by (rank) (evenkeel_rank_slowness_ratio{{{ONE}}}))"},
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
            {
                "heard": f"max(sum without (rank) (evenkeel_rank_fresh{{{ONE}}}))",
                "declared": newest("evenkeel_ranks_expected"),
                "stopped as planned": newest("evenkeel_ranks_stopped"),
            },
        ),
        line_panel(
            "Live replicas of experts",
            "Experts of all layers with one live replica left, or none.",
            {
                "down to one replica": newest("evenkeel_experts_down_to_one_replica"),
                "without a replica": f'max(evenkeel_experts{{{ONE},live_replicas="none"}})',
            },
        ),
        line_panel(
            "Epochs of the ranks",
            "Highest and lowest epoch. They are equal, except during the step of a swap.",
            {
                "highest": newest("evenkeel_rank_epoch"),
                "lowest": f"min(evenkeel_rank_epoch{{{ONE}}})",
            },
        ),
        state_panel(
            "Ranks in trouble",
            "Ranks whose agent refuses every wave until the engine is restarted, ten at most;"
            " empty in normal operation.",
            {"rank {{rank}}": f"topk(10, max by (rank) (evenkeel_rank_trouble{{{ONE}}}))"},
        ),
    ]


def _ingest_panels() -> list[Any]:
    dropped = rate_of("evenkeel_report_steps_dropped_total", "rank")
    return [
        decisions_by_reason(),
        line_panel(
            "Steps in the window",
            "Complete steps in the fullest window.",
            {"steps": newest("evenkeel_window_steps")},
        ),
        line_panel(
            "Rank steps accepted and rejected",
            "Steps summed over ranks; rejected steps are not used.",
            {
                "accepted": rate_of("evenkeel_report_steps_total"),
                "{{reason}}": rate_of("evenkeel_report_steps_rejected_total", "reason"),
            },
            unit="ops",
        ),
        line_panel(
            "Steps dropped by recorders",
            "A recorder drops its oldest steps if the controller does not accept its reports. The"
            " five ranks that drop most.",
            {"rank {{rank}}": f"topk(5, {dropped})"},
            unit="ops",
        ),
        age_of_steps("max", "age"),
    ]
