"""Which alerts keep others quiet: the rules, and their two forms."""

import re

import pytest
import yaml

from deploy.generate import inhibitions
from tests.deploy.chart import ROOT, kind, only

pytestmark = pytest.mark.deploy
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS / "evenkeel.rules.yaml").read_text())["groups"]
    for rule in group["rules"]
}
PAIRS = [(one["source"], target) for one in inhibitions() for target in one["targets"]]


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


@pytest.mark.parametrize("one", inhibitions(), ids=lambda one: one["source"])
def test_the_labels_that_must_be_equal_are_on_both_alerts(one):
    """A label that both alerts lack counts as equal: one deployment would quieten another."""
    for name in (one["source"], *one["targets"]):
        expression = ALERTS[name]["expr"]
        kept = [set(found.split(", ")) for found in re.findall(r" by \(([\w, ]+)\)", expression)]
        if not kept:
            assert "up{" in expression and one["equal"] == ["namespace"], name
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
        form.append(
            {
                "source_matchers": words[:1],
                "target_matchers": words[1:],
                "equal": rule["equal"],
            }
        )
    plain = yaml.safe_load((PROMETHEUS / "alertmanager.yaml").read_text())
    assert form == plain["inhibit_rules"]
    assert len(form) == len(inhibitions())
    assert not kind("default", "AlertmanagerConfig")
