"""The Grafana dashboards as code; `python -m deploy.generate` writes their JSON.

Every query is restricted to `$namespace` and `$deployment`; a Prometheus without a namespace label matches as well. Only
the leader of a deployment exports its state, so queries take the maximum over replicas.
"""

from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = ["dashboards"]

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
ONE = 'namespace=~"$namespace",deployment=~"$deployment"'
BY = "namespace, deployment"
_GREEN, _YELLOW, _RED, _BLUE = "green", "yellow", "red", "blue"


def dashboards() -> dict[str, models.Dashboard]:
    """File name without suffix -> dashboard."""
    return {"evenkeel-fleet": _fleet().build(), "evenkeel-deployment": _deployment().build()}


# --- parts ------------------------------------------------------------------------------------------


def _query(expr: str, legend: str = "", *, instant: bool = False, letter: str = "A") -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expr).ref_id(letter).datasource(SOURCE)
    if legend:
        query = query.legend_format(legend)
    return query.instant() if instant else query.range()


def _queries(panel: Any, queries: list[tuple[str, str]]) -> Any:
    for letter, (expr, legend) in zip("ABCDEF", queries, strict=False):
        panel = panel.with_target(_query(expr, legend, letter=letter))
    return panel


def _lines(
    title: str,
    description: str,
    queries: list[tuple[str, str]],
    *,
    unit: str = "short",
    span: int = 12,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
) -> timeseries.Panel:
    panel = timeseries.Panel().title(title).description(description).datasource(SOURCE).unit(unit)
    panel = (
        panel.span(span).height(8).fill_opacity(30 if stacked else 5).show_points(kinds.VisibilityMode.NEVER)
    )
    if least is not None:
        panel = panel.min(least)
    if most is not None:
        panel = panel.max(most)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.TABLE)
    panel = panel.legend(
        legend.placement(kinds.LegendPlacement.BOTTOM).show_legend(True).calcs(["lastNotNull"])
    )
    panel = panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    return _queries(panel, queries)  # type: ignore[no-any-return]


def _steps(*pairs: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=value, color=color) for value, color in pairs]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _number(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "short",
    colors: dashboard.ThresholdsConfig | None = None,
    legend: str = "",
    names: bool = False,
) -> stat.Panel:
    panel = stat.Panel().title(title).description(description).datasource(SOURCE).unit(unit)
    panel = panel.span(4).height(4).graph_mode(kinds.BigValueGraphMode.NONE)
    panel = panel.thresholds(colors if colors is not None else _steps((None, _BLUE)))
    if names:
        panel = panel.text_mode(kinds.BigValueTextMode.NAME)
    return panel.with_target(_query(expr, legend, instant=True))


def _variables(board: dashboard.Dashboard, *, many: bool) -> dashboard.Dashboard:
    board = board.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    namespace = dashboard.QueryVariable("namespace").label("Namespace").datasource(SOURCE)
    namespace = namespace.query("label_values(evenkeel_leading, namespace)").multi(True)
    namespace = (
        namespace.include_all(True).all_value(".*").refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    board = board.with_variable(namespace.current(everything))
    name = dashboard.QueryVariable("deployment").label("Deployment").datasource(SOURCE)
    name = name.query('label_values(evenkeel_leading{namespace=~"$namespace"}, deployment)')
    name = name.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        models.VariableSort.ALPHABETICAL_ASC
    )
    if many:
        name = name.multi(True).include_all(True).all_value(".*").current(everything)
    return board.with_variable(name)


def _annotation(name: str, metric: str, color: str) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(color)
        .expr(f"time() - max by ({BY}) ({metric}{{{ONE}}}) < 30")
    )


def _board(uid: str, title: str, description: str, *, many: bool) -> dashboard.Dashboard:
    board = dashboard.Dashboard(title).uid(uid).description(description).tags(["evenkeel"])
    board = board.time("now-3h", "now").refresh("30s").timezone("browser").editable()
    board = board.tooltip(models.DashboardCursorSync.CROSSHAIR)
    others = dashboard.DashboardLink("Evenkeel").type(models.DashboardLinkType.DASHBOARDS)
    board = board.link(others.tags(["evenkeel"]).keep_time(True).include_vars(True).as_dropdown(True))
    board = _variables(board, many=many)
    board = board.annotation(
        _annotation("Plans committed", "evenkeel_last_plan_committed_timestamp_seconds", _GREEN)
    )
    return board.annotation(_annotation("Plans aborted", "evenkeel_last_plan_failed_timestamp_seconds", _RED))


# --- all deployments --------------------------------------------------------------------------------


def _fleet() -> dashboard.Dashboard:
    board = _board(
        "evenkeel-fleet",
        "Evenkeel / Fleet",
        "Every deployment at a glance: balance, ranks, decisions, ingest, controllers.",
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
            _lines(
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
        _lines(
            "Decisions by reason",
            "Every cycle of the control loop ends in one of these.",
            [(f"sum by (reason) (rate(evenkeel_decisions_total{{{ONE}}}[$__rate_interval]))", "{{reason}}")],
            unit="ops",
            stacked=True,
        )
    )
    board = board.with_panel(
        _lines(
            "Plans ended in the last hour",
            "By how they ended. A counter that was just made shows from its second change on.",
            [
                (
                    f"sum by ({BY}, phase) (increase(evenkeel_plans_ended_total{{{ONE}}}[1h]))",
                    "{{deployment}} {{phase}}",
                )
            ],
        )
    )
    board = board.with_panel(
        _lines(
            "Expert weights moved",
            "Bytes between ranks in committed waves.",
            [
                (
                    f"sum by ({BY}) (rate(evenkeel_migrated_bytes_total{{{ONE}}}[$__rate_interval]))",
                    "{{deployment}}",
                )
            ],
            unit="Bps",
        )
    )
    board = board.with_panel(
        _lines(
            "Predicted against realised gain",
            "Saving of modelled MoE time of the newest committed plan: on held-out steps, and on the steps since.",
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
    bad_above_zero = _steps((None, _GREEN), (1, _RED))
    return [
        _number(
            "Deployments led",
            "Deployments some replica leads.",
            f"sum(max by ({BY}) (evenkeel_leading{{{ONE}}}))",
        ),
        _number(
            "Without a leader",
            "Deployments replicas know and none leads.",
            f"count(max by ({BY}) (evenkeel_leading{{{ONE}}})) - sum(max by ({BY}) (evenkeel_leading{{{ONE}}}))",
            colors=bad_above_zero,
        ),
        _number(
            "Ranks missing",
            "Ranks declared and not heard.",
            f"sum(max by ({BY}) (evenkeel_ranks_expected{{{ONE}}})) - sum(max by ({BY}) "
            f"(sum without (rank) (evenkeel_rank_fresh{{{ONE}}})))",
            colors=bad_above_zero,
        ),
        _number(
            "Lowest balancedness",
            "Least mean balancedness of a deployment and phase.",
            f"min(max by ({BY}, phase) (evenkeel_balancedness_mean_ratio{{{ONE}}}))",
            unit="percentunit",
            colors=_steps((None, _RED), (0.75, _YELLOW), (0.9, _GREEN)),
        ),
        _number(
            "Stores out of reach",
            "Controllers that cannot reach Redis.",
            'sum(evenkeel_store_degraded{namespace=~"$namespace"})',
            colors=bad_above_zero,
        ),
        _number(
            "Version",
            "Versions that run.",
            'count by (version) (evenkeel_build_info{namespace=~"$namespace"})',
            legend="{{version}}",
            names=True,
        ),
    ]


def _fleet_ingest() -> list[timeseries.Panel]:
    return [
        _lines(
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
        _lines(
            "Rank steps rejected",
            "Steps put in quarantine, by reason; they are not used.",
            [
                (
                    f"sum by (reason) (rate(evenkeel_report_steps_rejected_total{{{ONE}}}[$__rate_interval]))",
                    "{{reason}}",
                )
            ],
            unit="ops",
        ),
        _lines(
            "Age of the newest complete step",
            "Nothing is planned on old loads.",
            [
                (
                    f"time() - max by ({BY}) (evenkeel_newest_step_timestamp_seconds{{{ONE}}})",
                    "{{deployment}}",
                )
            ],
            unit="s",
        ),
        _lines(
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
    panel = table.Panel().title("Deployments").description("Mode, policy and leader.").datasource(SOURCE)
    panel = panel.span(24).height(8).with_target(_query(info, instant=True).format(PromQueryFormat.TABLE))
    return panel.with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    )


# --- one deployment ---------------------------------------------------------------------------------


def _deployment() -> dashboard.Dashboard:
    board = _board(
        "evenkeel-deployment",
        "Evenkeel / Deployment",
        "One deployment: balance, load per rank and layer, plans, migrations, slow ranks, decisions, ingest.",
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
        _lines(
            "Balancedness",
            "Mean over max of rank load per step and layer, averaged over the window; 1 is perfect.",
            [
                (f"max by (phase) (evenkeel_balancedness_mean_ratio{{{ONE}}})", "{{phase}} mean"),
                (f"max by (phase) (evenkeel_balancedness_worst_ratio{{{ONE}}})", "{{phase}} worst layer"),
            ],
            unit="percentunit",
            most=1,
        ),
        _lines(
            "Balancedness of the worst layers",
            "Only the worst layers have a series (metrics.worst_layers).",
            [(f"max by (layer) (evenkeel_layer_balancedness_ratio{{{ONE}}})", "layer {{layer}}")],
            unit="percentunit",
            most=1,
        ),
    ]


def _load_panels() -> list[Any]:
    over_mean = f"max by (rank) (evenkeel_rank_load_share_ratio{{{ONE}}}) * scalar(max(evenkeel_ranks_expected{{{ONE}}}))"
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
    heat = heat.with_target(_query(over_mean, "{{rank}}").format(PromQueryFormat.TIME_SERIES))
    return [
        _lines(
            "Load per rank",
            "Load over the mean of the ranks, summed over layers; 1 is balanced.",
            [(over_mean, "rank {{rank}}")],
        ),
        heat,
        _layer_matrix(),
        _lines(
            "Redundant replicas per layer",
            "Filled slots of a layer beyond one for each expert.",
            [
                (f"max by (statistic) (evenkeel_redundant_replicas_per_layer{{{ONE}}})", "{{statistic}}"),
                (f"max by (layer) (evenkeel_layer_redundant_replicas{{{ONE}}})", "layer {{layer}}"),
            ],
        ),
    ]


def _layer_matrix() -> table.Panel:
    expr = f"max by (layer, rank) (evenkeel_layer_rank_load_ratio{{{ONE}}})"
    panel = table.Panel().title("Heat map of layers and ranks").datasource(SOURCE).span(12).height(9)
    panel = panel.description(
        "Load of a rank in a layer over the layer's mean, now. Needs metrics.layer_rank_series; the worst layers first."
    )
    panel = panel.with_target(_query(expr, instant=True).format(PromQueryFormat.TABLE)).decimals(2)
    panel = panel.thresholds(_steps((None, _BLUE), (0.8, _GREEN), (1.2, _YELLOW), (1.5, _RED)))
    panel = panel.cell_options(
        kinds.TableColoredBackgroundCellOptions(mode=kinds.TableCellBackgroundDisplayMode.BASIC)
    )
    matrix = {"columnField": "rank", "rowField": "layer", "valueField": "Value"}
    return panel.with_transformation(models.DataTransformerConfig(id_val="groupingToMatrix", options=matrix))


def _plan_panels() -> list[Any]:
    phases = statetimeline.Panel().title("State and phase of the plan").datasource(SOURCE).span(12).height(8)
    phases = phases.description("What the controller does for the deployment, and where its plan is.")
    phases = _queries(
        phases,
        [
            (f"max by (state) (evenkeel_deployment_state{{{ONE}}})", "{{state}}"),
            (f"max by (phase) (evenkeel_plan_phase{{{ONE}}})", "plan {{phase}}"),
        ],
    )
    return [
        _lines(
            "Predicted against realised gain",
            "Saving of modelled MoE time of the newest committed plan: on held-out steps, and on the steps since. Not latency.",
            [(f"max by (basis) (evenkeel_last_plan_gain_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            least=None,
        ),
        _lines(
            "Predicted against realised balancedness",
            "Under the newest committed plan: on held-out steps, and on the steps since.",
            [(f"max by (basis) (evenkeel_last_plan_balancedness_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            most=1,
        ),
        phases,
        _lines(
            "Epoch and waves",
            "The epoch rises by one with each committed wave.",
            [
                (f"max(evenkeel_epoch{{{ONE}}})", "epoch"),
                (f"max(evenkeel_plan_waves_committed{{{ONE}}})", "waves committed of the active plan"),
                (f"max(evenkeel_plan_waves{{{ONE}}})", "waves of the active plan"),
            ],
        ),
    ]


def _migration_panels() -> list[Any]:
    def quantile(q: float, metric: str) -> str:
        rate = f"rate({metric}_bucket{{{ONE}}}[$__rate_interval])"
        return f"histogram_quantile({q}, sum by (le) ({rate}))"

    return [
        _lines(
            "Bytes moved",
            "Expert weights between ranks in committed waves.",
            [(f"sum(rate(evenkeel_migrated_bytes_total{{{ONE}}}[$__rate_interval]))", "bytes")],
            unit="Bps",
        ),
        _lines(
            "Staging of the current wave",
            "Bytes staged, and to be staged, while a plan is active.",
            [
                (f"max(evenkeel_staging_done_bytes{{{ONE}}})", "done"),
                (f"max(evenkeel_staging_planned_bytes{{{ONE}}})", "planned"),
            ],
            unit="bytes",
        ),
        _lines(
            "Duration of waves",
            "From the first Prepare to the commit.",
            [
                (quantile(0.5, "evenkeel_wave_duration_seconds"), "median"),
                (quantile(0.95, "evenkeel_wave_duration_seconds"), "95 %"),
            ],
            unit="s",
        ),
        _lines(
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
        _lines(
            "Slow ranks",
            "Seconds of a rank over those of the median rank at the same tokens, before the collective; 1 is usual.",
            [(f"max by (rank) (evenkeel_rank_slowness_ratio{{{ONE}}})", "rank {{rank}}")],
        ),
        _lines(
            "Ranks in trouble",
            "Ranks whose agent refuses every wave until the engine is started again; empty while all is well.",
            [(f"max by (rank) (evenkeel_rank_trouble{{{ONE}}})", "rank {{rank}}")],
        ),
        _lines("Compute time per token", "Median over the window.", [(pace, "rank {{rank}}")], unit="s"),
        _lines(
            "Epoch of each rank",
            "All the same but for a step.",
            [(f"max by (rank) (evenkeel_rank_epoch{{{ONE}}})", "rank {{rank}}")],
        ),
        _lines(
            "Live ranks and replicas",
            "Ranks heard and declared; experts of all layers that are down to one live replica, or have none.",
            [
                (f"max(sum without (rank) (evenkeel_rank_fresh{{{ONE}}}))", "ranks heard"),
                (f"max(evenkeel_ranks_expected{{{ONE}}})", "ranks declared"),
                (f"max(evenkeel_experts_down_to_one_replica{{{ONE}}})", "experts down to one replica"),
                (f'max(evenkeel_experts{{{ONE},live_replicas="none"}})', "experts without a replica"),
            ],
        ),
    ]


def _ingest_panels() -> list[Any]:
    rate = "[$__rate_interval]"
    return [
        _lines(
            "Decisions by reason",
            "Every cycle of the control loop ends in one of these.",
            [(f"sum by (reason) (rate(evenkeel_decisions_total{{{ONE}}}{rate}))", "{{reason}}")],
            unit="ops",
            stacked=True,
        ),
        _lines(
            "Steps in the window",
            "Complete steps in the fullest window.",
            [(f"max(evenkeel_window_steps{{{ONE}}})", "steps")],
        ),
        _lines(
            "Rank steps accepted and rejected",
            "Summed over ranks; rejected ones are not used.",
            [
                (f"sum(rate(evenkeel_report_steps_total{{{ONE}}}{rate}))", "accepted"),
                (
                    f"sum by (reason) (rate(evenkeel_report_steps_rejected_total{{{ONE}}}{rate}))",
                    "{{reason}}",
                ),
            ],
            unit="ops",
        ),
        _lines(
            "Steps dropped by recorders, and age of the newest step",
            "A recorder drops its oldest steps when the controller does not take them.",
            [
                (
                    f"sum by (rank) (rate(evenkeel_report_steps_dropped_total{{{ONE}}}{rate}))",
                    "dropped by rank {{rank}} [1/s]",
                ),
                (f"time() - max(evenkeel_newest_step_timestamp_seconds{{{ONE}}})", "age [s]"),
            ],
        ),
    ]
