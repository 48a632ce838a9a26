"""Building blocks of both dashboards: queries, panels, variables, annotations."""

from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models

from deploy.chart_values import Bound, bound

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
ONE = 'namespace=~"$namespace",deployment=~"$deployment"'
BY = "namespace, deployment"
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"


def query_of(
    expr: str, legend: str = "", *, instant: bool = False, letter: str = "A"
) -> prometheus.Dataquery:
    """Return a query to the chosen Prometheus."""
    query = prometheus.Dataquery().expr(expr).ref_id(letter).datasource(SOURCE)
    if legend:
        query = query.legend_format(legend)
    return query.instant() if instant else query.range()


def newest(metric: str, by: str = "") -> str:
    """Return the query of a gauge: the maximum over replicas, by these labels."""
    return f"max{_labels(by)}({metric}{{{ONE}}})"


def rate_of(metric: str, by: str = "") -> str:
    """Return the query of a counter's rate: the sum over replicas, by these labels."""
    return f"sum{_labels(by)}(rate({metric}{{{ONE}}}[$__rate_interval]))"


def _labels(by: str) -> str:
    return f" by ({by}) " if by else ""


def with_queries(panel: Any, queries: Mapping[str, str]) -> Any:
    """Return the panel with a target for each expression, by legend."""
    for letter, (legend, expr) in zip("ABCDEF", queries.items(), strict=False):
        panel = panel.with_target(query_of(expr, legend, letter=letter))
    return panel


def line_panel(
    title: str,
    description: str,
    queries: Mapping[str, str],
    *,
    unit: str = "short",
    span: int = 12,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
    colors: dashboard.ThresholdsConfig | None = None,
) -> timeseries.Panel:
    """Return a panel of curves over time; `colors` draws its bounds as lines."""
    panel = timeseries.Panel().title(title).description(description).datasource(SOURCE).unit(unit)
    panel = (
        panel.span(span)
        .height(8)
        .fill_opacity(30 if stacked else 5)
        .show_points(kinds.VisibilityMode.NEVER)
    )
    if least is not None:
        panel = panel.min(least)
    if most is not None:
        panel = panel.max(most)
    if colors is not None:
        lines = common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(colors).thresholds_style(lines)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.TABLE)
    panel = panel.legend(
        legend.placement(kinds.LegendPlacement.BOTTOM).show_legend(True).calcs(["lastNotNull"])
    )
    panel = panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    return with_queries(panel, queries)  # type: ignore[no-any-return]


def thresholds(*pairs: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Return colours by value from (lower bound, colour) pairs; the first has no bound."""
    steps = [models.Threshold(value=value, color=color) for value, color in pairs]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def better_above(least: Bound) -> dashboard.ThresholdsConfig:
    """Return red below the bound of an alert, green from halfway between it and 1."""
    return thresholds((None, RED), (least, YELLOW), (least.halfway_to_one(), GREEN))


def ranks_missing() -> str:
    """Return the query of the ranks that each deployment declares but the leader does not hear.

    Ranks that stopped as planned do not count. Ranks that never connected have no series, so a
    deployment without any counts as one where none is heard.
    """
    expected = f"max by ({BY}) (evenkeel_ranks_expected{{{ONE}}})"
    return (
        f"{expected}"
        f" - (max by ({BY}) (sum without (rank) (evenkeel_rank_fresh{{{ONE}}})) or 0 * {expected})"
        f" - max by ({BY}) (evenkeel_ranks_stopped{{{ONE}}})"
    )


def words(meaning: Mapping[int, tuple[str, str]]) -> list[models.ValueMapping]:
    """Return the mapping that shows numbers as (text, colour)."""
    options = {
        str(number): models.ValueMappingResult(text=text, color=color)
        for number, (text, color) in meaning.items()
    }
    return [models.ValueMap(options=options)]


def decisions_by_reason() -> timeseries.Panel:
    """Return the panel of how often cycles end with each reason."""
    return line_panel(
        "Decisions by reason",
        "Every cycle of the control loop ends with one of these reasons.",
        {"{{reason}}": rate_of("evenkeel_decisions_total", "reason")},
        unit="ops",
        stacked=True,
    )


def gain_of_plans(by: str, legend: str, more: str) -> timeseries.Panel:
    """Return the panel of the newest plan's gain, by labels; `more` ends its description."""
    return line_panel(
        "Predicted against realised gain",
        "Saving of modelled MoE time by the newest committed plan: predicted on held-out steps,"
        f" and realised on the steps since.{more}",
        {legend: f"max by ({by}) (evenkeel_last_plan_gain_ratio{{{ONE}}})"},
        unit="percentunit",
        least=None,
    )


def age_of_steps(most: str, legend: str) -> timeseries.Panel:
    """Return the panel of the age of loads; `most` is the maximum over replicas."""
    return line_panel(
        "Age of the newest complete step",
        "The controller does not plan on old loads. The line is the threshold of"
        " EvenkeelDataStale.",
        {legend: f"time() - {most}(evenkeel_newest_step_timestamp_seconds{{{ONE}}})"},
        unit="s",
        colors=thresholds((None, GREEN), (bound("dataStaleSeconds"), RED)),
    )


def state_panel(
    title: str, description: str, queries: Mapping[str, str], *, span: int = 12
) -> statetimeline.Panel:
    """Return a panel with a row for each state, filled while it holds."""
    panel = statetimeline.Panel().title(title).description(description).datasource(SOURCE)
    panel = panel.span(span).height(8).show_value(kinds.VisibilityMode.NEVER)
    panel = panel.legend(common.VizLegendOptions().show_legend(False))
    return with_queries(panel, queries)  # type: ignore[no-any-return]


def number_panel(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "short",
    colors: dashboard.ThresholdsConfig | None = None,
    legend: str = "",
    names: bool = False,
    nothing: str = "",
) -> stat.Panel:
    """Return a panel with one number, or with the legend if `names`.

    `nothing` is shown where the query has no result.
    """
    panel = stat.Panel().title(title).description(description).datasource(SOURCE).unit(unit)
    panel = panel.span(4).height(4).graph_mode(kinds.BigValueGraphMode.NONE)
    panel = panel.thresholds(colors if colors is not None else thresholds((None, BLUE)))
    if names:
        panel = panel.text_mode(kinds.BigValueTextMode.NAME)
    if nothing:
        panel = panel.no_value(nothing)
    return panel.with_target(query_of(expr, legend, instant=True))


def with_section(
    board: dashboard.Dashboard, title: str, panels: list[Any], *, closed: bool
) -> dashboard.Dashboard:
    """Return the board with a row of panels, which a reader opens if it is closed."""
    row = dashboard.Row(title)
    if closed:
        for panel in panels:
            row = row.with_panel(panel)
        return board.with_row(row)
    board = board.with_row(row)
    for panel in panels:
        board = board.with_panel(panel)
    return board


def with_variables(board: dashboard.Dashboard, *, many: bool) -> dashboard.Dashboard:
    """Return the board with choosers for the data source, namespace and deployment."""
    board = board.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    namespace = dashboard.QueryVariable("namespace").label("Namespace").datasource(SOURCE)
    namespace = namespace.query("label_values(evenkeel_leading, namespace)").multi(True)
    namespace = (
        namespace.include_all(True)
        .all_value(".*")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
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


def annotation_of(name: str, metric: str, color: str) -> dashboard.AnnotationQuery:
    """Return an annotation that marks each change of a timestamp metric."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(color)
        .expr(f"time() - max by ({BY}) ({metric}{{{ONE}}}) < 30")
    )


def new_board(uid: str, title: str, description: str, *, many: bool) -> dashboard.Dashboard:
    """Return an empty board with identity, variables and annotations."""
    board = dashboard.Dashboard(title).uid(uid).description(description).tags(["evenkeel"])
    board = board.time("now-3h", "now").refresh("30s").timezone("browser").editable()
    board = board.tooltip(models.DashboardCursorSync.CROSSHAIR)
    others = dashboard.DashboardLink("Evenkeel").type(models.DashboardLinkType.DASHBOARDS)
    board = board.link(
        others.tags(["evenkeel"]).keep_time(True).include_vars(True).as_dropdown(True)
    )
    board = with_variables(board, many=many)
    board = board.annotation(
        annotation_of("Plans committed", "evenkeel_last_plan_committed_timestamp_seconds", GREEN)
    )
    return board.annotation(
        annotation_of("Plans aborted", "evenkeel_last_plan_failed_timestamp_seconds", RED)
    )
