"""The alerts: their required fields, and promtool's checks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.generate import generated, inhibitions, rules
from evenkeel_moe.api.console import console_files
from tests.deploy.chart import ROOT, kind, only
from tests.deploy.queries import RULES, alerts
from tests.waiting import deadline

pytestmark = pytest.mark.deploy

CASES = RULES.with_name("evenkeel.test.yaml")
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERTS = alerts()
PAIRS = [(one["source"], target) for one in inhibitions() for target in one["targets"]]


def promtool(*words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Require promtool; these tests run only on request and are never skipped."""
    tool = shutil.which("promtool")
    assert tool is not None, "promtool is not on the path; on Debian: apt-get install prometheus"
    return subprocess.run(
        [tool, *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=False,
    )


def test_generated_files_are_up_to_date():
    # Not made while tests are collected, which every worker does: it takes seconds.
    old = [p.name for p, text in generated().items() if p.read_text(encoding="utf-8") != text]
    assert old == [], "run `make deploy-files`"


def test_the_charts_rules_are_the_same_as_the_plain_ones():
    sets = ("prometheusRule.enabled=true", 'prometheusRule.selector=job="evenkeel"')
    rule = only("default", "PrometheusRule", *sets)
    plain = RULES.read_text().replace(
        "http://localhost:8080/runbooks/", "http://r-evenkeel.ek.svc:8080/runbooks/"
    )
    assert rule["spec"]["groups"] == yaml.safe_load(plain)["groups"]


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_has_all_that_who_is_woken_needs(name):
    rule = ALERTS[name]
    severities = {"info", "warning", "critical"}
    named = re.findall(r"(?:}}|^)(\w+)(?:{{|$)", rule["labels"]["severity"])
    assert named and set(named) <= severities
    notes = rule["annotations"]
    assert notes["runbook_url"] == f"http://localhost:8080/runbooks/{name}.md"
    assert f"/runbooks/{name}.md" in console_files()
    assert (RUNBOOKS / f"{name}.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_a_shell_can_read_the_commands(page):
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
        done = subprocess.run(
            ["bash", "-n"], input=block, capture_output=True, text=True, timeout=deadline(20)
        )
        assert done.returncode == 0, (block, done.stderr)


def test_every_page_belongs_to_an_alert():
    assert {page.stem for page in RUNBOOKS.glob("Evenkeel*.md")} == set(ALERTS)
    index = (RUNBOOKS / "README.md").read_text()
    assert set(re.findall(r"\]\((Evenkeel\w+)\.md\)", index)) == set(ALERTS)


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_has_a_firing_and_a_quiet_case(name):
    cases = [
        bool(case["exp_alerts"])
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert set(cases) == {True, False}


def test_state_is_taken_over_replicas():
    """Two replicas of one deployment must not make two alerts."""
    for name, rule in ALERTS.items():
        if name not in (
            "EvenkeelTargetDown",
            "EvenkeelTargetAbsent",
            "EvenkeelRedisDown",
            "EvenkeelStoreMayEvict",
            "EvenkeelCertificateExpiring",
        ):
            assert re.search(r"(max|sum) by \(namespace, deployment", rule["expr"]), name


def test_another_selector_reaches_every_series():
    text = rules('job="x"')
    for metric, rest in re.findall(r"\b(evenkeel_\w+|up)\{([^}]*)\}", text):
        assert rest.startswith('job="x"'), metric
    bare = re.findall(r"\bevenkeel_\w+(?![\w{.])", re.sub(r"- name: .*", "", text))
    assert bare == []


# --- with the real promtool ---


@pytest.mark.promtool
def test_promtool_takes_the_rules():
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.promtool
def test_promtool_cases_fire_and_stay_quiet():
    done = promtool("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promtool
@pytest.mark.parametrize("name", ["all-on", "default"])
def test_promtool_takes_the_rules_as_the_chart_renders_them(tmp_path: Path, name):
    sets = () if name == "all-on" else ("prometheusRule.enabled=true",)
    rule = only(name, "PrometheusRule", *sets)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    done = promtool("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stderr


# --- which alerts keep others quiet: the rules, and their two forms -------------------------------


def test_they_name_alerts_that_exist():
    assert len(PAIRS) > 15
    assert {name for pair in PAIRS for name in pair} <= ALERTS.keys()


def test_no_alert_keeps_its_own_cause_quiet():
    """Alertmanager lets an inhibited alert inhibit others, so alerts on a circle are never sent."""

    def causes(name, seen=frozenset()):
        assert name not in seen, f"{name} follows from itself"
        for source, target in PAIRS:
            if target == name:
                causes(source, seen | {name})

    for name in ALERTS:
        causes(name)


def test_only_a_critical_alert_keeps_a_critical_one_quiet():
    severity = {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}
    critical = [(source, target) for source, target in PAIRS if severity[target] == "critical"]
    assert critical
    assert all(severity[source] == "critical" for source, _ in critical)


def test_of_a_lost_rank_two_alerts_are_sent():
    (case,) = (
        test
        for test in yaml.safe_load(CASES.read_text())["tests"]
        if test["name"] == "a rank is lost during a plan"
    )
    sent = []
    for asked in case["promql_expr_test"]:
        firing = set(re.findall(r'"(\w+)"', str([one["labels"] for one in asked["exp_samples"]])))
        sent.append(firing - {target for source, target in PAIRS if source in firing})
    lost = {"EvenkeelRankLost", "EvenkeelExpertWithoutReplica"}
    assert sent == [set(), lost, lost]


@pytest.mark.parametrize("one", inhibitions(), ids=lambda one: one["source"])
def test_the_labels_that_must_be_equal_are_on_both_alerts(one):
    """A label that both alerts lack counts as equal: one deployment would quieten another."""
    for name in (one["source"], *one["targets"]):
        expression = ALERTS[name]["expr"]
        kept = [set(found.split(", ")) for found in re.findall(r" by \(([\w, ]+)\)", expression)]
        if not kept:
            assert re.fullmatch(r"up\{[^}]*} == 0\n", expression), name
            assert one["equal"] == ["namespace"], name
        assert all(set(one["equal"]) - {"phase"} <= labels for labels in kept), name
        if "phase" in one["equal"]:
            assert "phase" in kept[0]


def test_the_operators_form_has_its_fields_and_the_same_rules():
    """Fields of AlertmanagerConfig v1alpha1; its `route` and `receivers` are optional."""
    whole = only("all-on", "AlertmanagerConfig")
    assert whole["apiVersion"] == "monitoring.coreos.com/v1alpha1"
    assert whole["metadata"]["namespace"] == "ek", "the operator matches alerts by its namespace"
    assert whole["metadata"]["labels"]["alertmanager"] == "main"
    assert set(whole["spec"]) == {"inhibitRules"}
    form = []
    for rule in whole["spec"]["inhibitRules"]:
        assert set(rule) == {"sourceMatch", "targetMatch", "equal"}
        (source,), (target,) = rule["sourceMatch"], rule["targetMatch"]
        for matcher in (source, target):
            assert set(matcher) == {"name", "matchType", "value"}
            assert matcher["matchType"] in ("=", "=~", "!=", "!~")
        words = [f'{one["name"]}{one["matchType"]}"{one["value"]}"' for one in (source, target)]
        matchers = {"source_matchers": words[:1], "target_matchers": words[1:]}
        form.append(matchers | {"equal": rule["equal"]})
    plain = yaml.safe_load(RULES.with_name("alertmanager.yaml").read_text())
    assert form == plain["inhibit_rules"]
    assert len(form) == len(inhibitions())
    assert not kind("default", "AlertmanagerConfig")
