"""The alerts: their required fields, and promtool's checks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.generate import generated, rules
from evenkeel_moe.api.console import console_files
from tests.deploy.chart import ROOT, rendered
from tests.waiting import deadline

pytestmark = pytest.mark.deploy
RULES = ROOT / "deploy" / "prometheus" / "evenkeel.rules.yaml"
CASES = ROOT / "deploy" / "prometheus" / "evenkeel.test.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"


def alerts():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


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
    (rule,) = [one for one in rendered("default", *sets) if one["kind"] == "PrometheusRule"]
    plain = RULES.read_text().replace(
        "http://localhost:8080/runbooks/", "http://r-evenkeel.ek.svc:8080/runbooks/"
    )
    assert rule["spec"]["groups"] == yaml.safe_load(plain)["groups"]


@pytest.mark.parametrize("name", sorted(alerts()))
def test_an_alert_has_all_that_who_is_woken_needs(name):
    rule = alerts()[name]
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
    assert {page.stem for page in RUNBOOKS.glob("Evenkeel*.md")} == set(alerts())
    index = (RUNBOOKS / "README.md").read_text()
    assert set(re.findall(r"\]\((Evenkeel\w+)\.md\)", index)) == set(alerts())


@pytest.mark.parametrize("name", sorted(alerts()))
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
    for name, rule in alerts().items():
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
    (rule,) = [one for one in rendered(name, *sets) if one["kind"] == "PrometheusRule"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    done = promtool("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stderr
