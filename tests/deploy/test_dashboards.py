"""The dashboards against our conventions for dashboards."""

import json
import re
from collections.abc import Mapping

import pytest
import yaml

from tests.deploy.queries import dashboards, panel_queries, panels
from tests.deploy.test_rules import promtool

pytestmark = pytest.mark.deploy
BOARDS = dashboards()
every_board = pytest.mark.parametrize("name", sorted(BOARDS))


@every_board
def test_identity_and_variables(name):
    board = BOARDS[name]
    assert board["uid"] == name
    assert board.get("id") is None
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "deployment"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"


@every_board
def test_every_source_is_the_variable(name):
    text = json.dumps(BOARDS[name])
    assert set(re.findall(r'"datasource": \{"type": "(\w+)", "uid": "([^"]*)"\}', text)) == {
        ("prometheus", "${datasource}")
    }
    for panel in panels(BOARDS[name]):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_rates_follow_the_scrape_interval():
    for query in panel_queries():
        for span in re.findall(r"\brate\([^\[]*\[([^\]]+)\]", query.expr):
            assert span == "$__rate_interval", query.where


def test_queries_follow_the_variables():
    for query in panel_queries():
        for matchers in re.findall(r"(?:evenkeel|process)_\w+\{([^}]*)\}", query.expr):
            assert 'namespace=~"$namespace"' in matchers, query.where
        if not re.search(
            r"evenkeel_(store|build)_|evenkeel_(grpc_streams|certificate)|process_", query.expr
        ):
            assert query.expr.count("$deployment") == query.expr.count("$namespace"), query.where


def test_the_table_of_deployments_is_first_sorted_and_leads_to_each_of_them():
    table = next(panels(BOARDS["evenkeel-fleet"]))
    assert (table["title"], table["type"]) == ("Deployments", "table")
    steps = {one["id"]: one["options"] for one in table["transformations"]}
    assert list(steps) == ["merge", "sortBy", "organize"]
    names = steps["organize"]["renameByName"]
    (order,) = steps["sortBy"]["sort"]
    assert names[order["field"]] == "order" and order["desc"]
    links = [
        link["url"]
        for override in table["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "links"
        for link in one["value"]
    ]
    assert [url.split("?")[0] for url in links] == ["/d/evenkeel-deployment"]


def evaluate(tmp_path, series: Mapping[str, float], expected: Mapping[str, Mapping]) -> None:
    """Let promtool compare the result of each query, as labels and value, at one moment."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": str(value)} for name, value in series.items()],
        "promql_expr_test": [
            {
                "expr": expr.replace("$namespace", ".*").replace("$deployment", ".*"),
                "eval_time": "0m",
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in samples.items()
                ],
            }
            for expr, samples in expected.items()
        ],
    }
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    done = promtool("test", "rules", tmp_path / "cases.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promtool
def test_ranks_that_never_connected_are_missing(tmp_path):
    series = {
        **{f'evenkeel_ranks_expected{{deployment="{one}"}}': 8 for one in ("gone", "part")},
        'evenkeel_ranks_stopped{deployment="gone"}': 0,
        'evenkeel_ranks_stopped{deployment="part"}': 1,
        **{f'evenkeel_rank_fresh{{deployment="part",rank="{rank}"}}': 1 for rank in range(5)},
        'evenkeel_rank_fresh{deployment="part",rank="5"}': 0,
    }
    by_deployment = {'{deployment="gone"}': 8, '{deployment="part"}': 2}
    (column,) = [one.expr for one in panel_queries() if one.where.endswith("Deployments / F")]
    one, fleet = (query.expr for query in panel_queries() if "Ranks missing" in query.where)
    evaluate(tmp_path, series, {column: by_deployment, fleet: {"{}": 10}, one: {"{}": 8}})


@pytest.mark.promtool
def test_deployments_are_in_order_of_critical_alerts_warnings_and_balance(tmp_path):
    table = next(panels(BOARDS["evenkeel-fleet"]))
    order = {target["refId"]: target["expr"] for target in table["targets"]}["I"]
    firing = 'ALERTS{alertname="EvenkeelX",alertstate="firing"'
    series = {
        **{f'evenkeel_leading{{deployment="{one}"}}': 1 for one in ("a", "b", "c", "d", "e")},
        **{f'evenkeel_leading{{instance="2",deployment="{one}"}}': 0 for one in ("a", "b")},
        f'{firing},severity="critical",deployment="a"}}': 1,
        f'{firing},severity="warning",deployment="b"}}': 1,
        f'{firing},severity="warning"}}': 1,
        'evenkeel_balancedness_mean_ratio{deployment="a",phase="decode"}': 0.9,
        'evenkeel_balancedness_mean_ratio{deployment="b",phase="decode"}': 0.5,
        'evenkeel_balancedness_mean_ratio{deployment="c",phase="decode"}': 0.25,
        'evenkeel_balancedness_mean_ratio{deployment="c",phase="prefill"}': 0.75,
        'evenkeel_balancedness_mean_ratio{deployment="d",phase="decode"}': 0.5,
    }
    worst = {"a": 1000.1, "b": 10.5, "c": 0.75, "d": 0.5, "e": 0.0}
    samples = {f'{{deployment="{name}"}}': value for name, value in worst.items()}
    evaluate(tmp_path, series, {f"round({order}, 0.01)": samples})
