"""The chart against conventions of Kubernetes; each violation would cause a fault in a cluster."""

import json
import re
from collections import Counter
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from deploy.chart_values import values
from evenkeel_moe.cli import app
from evenkeel_moe.settings import Settings
from tests.deploy.chart import (
    CHART,
    CUSTOM,
    check_object,
    container,
    every_values,
    given,
    helm,
    kind,
    notes,
    only,
    pod,
    refusal,
    rendered,
    rendered_by,
    settings_file,
)

pytestmark = pytest.mark.deploy
BOARDS = CHART / "dashboards"


# --- renders, and is what Kubernetes takes --------------------------------------------------------


@every_values
def test_helm_lint_is_strict_and_clean(name):
    answer = helm("lint", "--strict", CHART, *given(name))
    assert answer.code == 0, answer.out


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@every_values
def test_every_manifest_is_valid(name, version):
    objects = rendered(name)
    assert len(objects) >= 5
    for one in objects:
        if one["kind"] not in CUSTOM:
            check_object(one, version)


def test_the_validator_would_see_a_misspelt_field():
    broken = only("default", "StatefulSet")
    broken["spec"]["template"]["spec"]["automountServiceAccountTokens"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        check_object(broken)


@pytest.mark.parametrize(
    ("release", "name"),
    [("r", "r-evenkeel"), ("my-evenkeel", "my-evenkeel"), ("7b.prod", "ek-7b-prod-evenkeel")],
)
def test_services_may_have_the_names_that_releases_may(release, name):
    objects = rendered_by(release=release)
    services = [one["metadata"]["name"] for one in objects if one["kind"] == "Service"]
    assert name in services
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service) for service in services)


def test_the_defaults_need_no_custom_resources():
    assert not {one["kind"] for one in rendered("default")} & CUSTOM


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("replicaCuont=2", "replicaCuont"),
        ("prometheusRule.thresholds.balancednessMinimum=1", "thresholds"),
        ("config.planner.mde=auto", "config.planner"),
        ("config.planner.mode=auto", "config.planner: Additional property mode"),
        ("config.grpc.port=1", "grpc"),
        ("config.redis.prefix=another", "prefix"),
        ("extraEnv[0].nam=x", "extraEnv"),
        ("extraEnv[0].value=x", "extraEnv"),
        ("resources.request.cpu=1", "resources"),
        ("resources.limits.memory=2Gib", "resources"),
        ("emptyDir.tmpSizeLimit=1 GB", "tmpSizeLimit"),
    ],
)
def test_misspelt_values_are_refused(value, named):
    assert named in refusal(value)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["replicaCount=2"], "replicaCount above 1 needs an external store"),
        (
            ["extraEnv[0].name=EVENKEEL_PLANNER__MODE", "extraEnv[0].value=auto"],
            "extraEnv sets EVENKEEL_PLANNER__MODE, which would override the value profile observe",
        ),
        (
            ["grpc.tls.clientCaKey=ca.crt"],
            "grpc.tls.clientCaKey ca.crt names a key of grpc.tls.existingSecret, which is empty",
        ),
        (
            ["persistence.existingClaim=mine"],
            "persistence.existingClaim mine needs persistence.enabled",
        ),
        (
            ["redis.existingSecret=s", "redis.passwordKey=p"],
            "redis.existingSecret s has credentials of a store that neither redis.url nor",
        ),
        (
            ["redis.url=redis://r", "redis.existingSecret=s", "redis.usernameKey=u"],
            'need each other: the key is "u", the URL "redis://r"',
        ),
        (
            ["redis.url=redis://$(REDIS_USERNAME)@r"],
            'need each other: the key is "", the URL "redis://$(REDIS_USERNAME)@r"',
        ),
        (
            ["redis.existingSecret=s", "redis.urlKey=url", "redis.usernameKey=u"],
            'need each other: the key is "u", the URL ""',
        ),
        (
            ["redis.url=redis://r", "redis.tls.existingSecret=ca"],
            "redis.tls.existingSecret ca is mounted at /etc/evenkeel/redis-tls/, and redis.url",
        ),
        (
            ["redis.url=rediss+sentinel://s:1/m", "redis.sentinel.tls.existingSecret=ca"],
            "redis.sentinel.tls.existingSecret ca is mounted at /etc/evenkeel/sentinel-tls/, and",
        ),
        (["redis.tls.existingSecret=ca"], 'and redis.url "" names no file there'),
        (["replicaCount=2", "redis.url=redis://r:6379"], "needs api.tokens.existingSecret"),
        (["redis.url=redis://:hunter2@r:6379"], "redis.url holds a password"),
        (["redis.url=redis://u:p@ss@r:6379"], "redis.url holds a password"),
        (["redis.url=redis://r", "devValkey.enabled=true"], "two stores"),
        (["redis.passwordKey=p"], "existingSecret, which is empty"),
        (["redis.sentinel.passwordKey=p"], "existingSecret, which is empty"),
        (
            ["redis.url=redis://r", "redis.existingSecret=s", "redis.sentinel.passwordKey=p"],
            "redis.sentinel is for a redis.url that begins with",
        ),
        (["redis.url=redis+sentinel://s:1/m?sentinel_password=x"], "redis.url holds a password"),
        (["redis.existingSecret=s"], "names a key of it"),
        (
            ["redis.url=redis://r", "redis.existingSecret=s", "redis.urlKey=u"],
            "both name the store",
        ),
        (
            [
                "replicaCount=2",
                "redis.url=redis://r",
                "api.tokens.existingSecret=t",
                "persistence.enabled=true",
            ],
            "persistence is for the embedded store",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_reason(sets, words):
    assert words in refusal(*sets)


def test_a_parent_chart_may_pass_globals():
    assert rendered("default", "global.registry=x")


# --- monitoring objects ---


def test_the_service_monitor_renders_everything_that_can_be_set():
    monitor = only("all-on", "ServiceMonitor")
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert monitor["metadata"]["annotations"] == {"example.org/owner": "serving"}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ek"]}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["interval"] == "15s"
    assert endpoint["scrapeTimeout"] == "10s"
    assert endpoint["relabelings"][0]["targetLabel"] == "kubernetes_node"
    assert endpoint["metricRelabelings"][0]["action"] == "labeldrop"
    # Of the services it selects only one has this port, so a replica is scraped once.
    ports = [
        port["name"] for service in kind("all-on", "Service") for port in service["spec"]["ports"]
    ]
    assert ports.count(endpoint["port"]) == 1


def test_rules_carry_labels_thresholds_and_the_job_of_the_release():
    rule = only("all-on", "PrometheusRule")
    assert rule["metadata"]["namespace"] == "monitoring"
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    alerts = {one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]}
    assert "EvenkeelTargetDown" not in alerts
    assert "EvenkeelTargetAbsent" in alerts
    low = alerts["EvenkeelBalancednessLow"]
    assert "< 0.8\n" in low["expr"]
    assert 'job="r-evenkeel-metrics",namespace="ek"' in low["expr"]
    assert set(low["labels"]) == {"severity", "team"} and low["labels"]["team"] == "serving"
    assert (
        low["annotations"]["runbook_url"]
        == "https://wiki.example/evenkeel/EvenkeelBalancednessLow.md"
    )
    assert "{{ $labels.deployment }}" in low["annotations"]["summary"]
    services = {service["metadata"]["name"] for service in kind("all-on", "Service")}
    assert "r-evenkeel-metrics" in services
    assert not re.search(r"\$\{", yaml.safe_dump(rule))


@pytest.mark.parametrize(
    ("sets", "folder"),
    [
        ((), "http://r-evenkeel.ek.svc:8080/runbooks"),
        (("service.restPort=80",), "http://r-evenkeel.ek.svc:80/runbooks"),
        (("rest.tls.existingSecret=tls",), "https://r-evenkeel.ek.svc:8080/runbooks"),
        (
            ("ingress.enabled=true", "ingress.hosts={ek.example,other.example}"),
            "http://ek.example/runbooks",
        ),
        (
            (
                "ingress.enabled=true",
                "ingress.hosts={ek.example}",
                "ingress.tls[0].secretName=tls",
            ),
            "https://ek.example/runbooks",
        ),
        (
            (
                "httpRoute.enabled=true",
                "httpRoute.hostnames={ek.example}",
                "httpRoute.parentRefs[0].name=gateway",
            ),
            "https://ek.example/runbooks",
        ),
    ],
)
def test_a_runbook_url_is_absolute_and_leads_to_the_controllers(sets, folder):
    rule = only("default", "PrometheusRule", "prometheusRule.enabled=true", *sets)
    for one in (one for group in rule["spec"]["groups"] for one in group["rules"]):
        assert one["annotations"]["runbook_url"] == f"{folder}/{one['alert']}.md"


def test_every_threshold_is_used_by_a_rule():
    text = (CHART / "rules" / "evenkeel.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)\}", text.split("groups:", 1)[1])) - {"selector", "runbookUrl"}
    assert used == set(values()["prometheusRule"]["thresholds"])


def test_dashboards_are_config_maps_the_sidecar_finds():
    maps = [
        one
        for one in kind("all-on", "ConfigMap")
        if "grafana_dashboard" in one["metadata"]["labels"]
    ]
    assert len(maps) == len(list(BOARDS.glob("*.json"))) == 2
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Serving"}
        assert one["metadata"]["namespace"] == "monitoring"
        ((name, body),) = one["data"].items()
        assert json.loads(body)["uid"] == name.removesuffix(".json")
    renamed = rendered(
        "default", "dashboards.enabled=true", "dashboards.label=board", "dashboards.labelValue=yes"
    )
    assert [one for one in renamed if one["metadata"]["labels"].get("board") == "yes"]


def _boards(values_name: str, *sets: str) -> dict[str, dict]:
    """File name -> dashboard of a release."""
    return {
        name: json.loads(body)
        for one in rendered(values_name, "dashboards.enabled=true", *sets)
        if "grafana_dashboard" in one["metadata"].get("labels", {})
        for name, body in one["data"].items()
    }


def _bounds(board: object) -> Counter:
    """Return how often each number is a bound of colours in a dashboard."""
    if isinstance(board, dict) and set(board) == {"color", "value"}:
        return Counter([board["value"]])
    inner = board.values() if isinstance(board, dict) else board if isinstance(board, list) else ()
    return sum(map(_bounds, inner), Counter())


def test_a_releases_dashboards_show_its_own_thresholds():
    plain = {path.name: json.loads(path.read_text()) for path in BOARDS.glob("*.json")}
    assert _boards("default") == plain
    own = yaml.safe_load((CHART / "ci" / "all-on-values.yaml").read_text())
    assert own["prometheusRule"]["thresholds"]["balancednessMin"] == 0.8
    seconds = "prometheusRule.thresholds.certificateExpirySeconds=1209600"
    changed = _boards("all-on", seconds)
    for name, board in plain.items():
        before, after = _bounds(board), _bounds(changed[name])
        # timeBalanceMin has the same default and stays.
        moved = before[0.75] - after[0.75]
        more = after - before
        assert moved >= 1 and (more[0.8], more[0.9]) == (moved, moved), name
        assert (before[604800], after[604800]) == (after[1209600], 0)


# --- values ---


def test_values_reach_the_pod():
    one = container("default", "resources.limits.cpu=2", "image.tag=x")
    assert one["resources"]["limits"]["cpu"] and one["image"] == "evenkeel:x"


def test_everything_a_pod_may_want_is_there():
    spec, one = pod("all-on"), container("all-on")
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert spec["tolerations"][0]["key"] == "control"
    assert spec["affinity"]["podAntiAffinity"]
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["serviceAccountName"] == "keeper"
    spread = spec["topologySpreadConstraints"][0]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "r"
    assert {"name": "TZ", "value": "UTC"} in one["env"]
    assert {"name": "more", "mountPath": "/more"} in one["volumeMounts"]
    assert {"name": "more", "emptyDir": {}} in spec["volumes"]
    assert one["image"].startswith("registry.example/evenkeel@sha256:")
    template = only("all-on", "StatefulSet")["spec"]["template"]["metadata"]
    assert template["annotations"]["example.org/pod"] == "yes"
    assert template["labels"]["example.org/pod"] == "yes"


def test_a_volume_for_the_embedded_store_is_a_claim_that_survives_upgrades():
    claim = only("persistent", "PersistentVolumeClaim")
    data = next(one for one in pod("persistent")["volumes"] if one["name"] == "data")
    assert data["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert not kind("persistent", "PersistentVolumeClaim", "persistence.existingClaim=mine")


# --- notes and documents ---


@every_values
def test_the_helm_commands_of_the_notes_set_the_mode_that_they_name(name, tmp_path):
    text = notes(tmp_path, name)
    (change,) = re.findall(r"helm -n ek upgrade r CHART --reuse-values --set (\S+)$", text, re.M)
    planner = Settings.model_validate(
        yaml.safe_load(settings_file(tmp_path, rendered(name, change)).read_text())
    ).planner
    assert change == f"profile={planner.mode}"
    assert planner.observe_lock == (planner.mode == "observe")


@every_values
def test_the_command_line_takes_the_commands_of_the_notes(name, tmp_path):
    text = notes(tmp_path, name)
    commands = re.findall(r"\bevenkeel ((?:[a-z]+ ?)+(?:--?[a-z-]+ [\w:/.-]+ ?)*)", text)
    assert len(commands) == 2
    for command in commands:
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command


@every_values
def test_the_notes_name_objects_that_exist(name, tmp_path):
    text = notes(tmp_path, name)
    names = {one["metadata"]["name"] for one in rendered(name)}
    assert re.findall(r"statefulset/(\S+)", text) == ["r-evenkeel"]
    assert set(re.findall(r"svc/(\S+)", text)) <= names
    assert "helm -n ek test r" in text
    assert "{{" not in re.sub(r"go-template='[^']*'", "", text)
    volumes = pod(name)["volumes"]
    tokens = [one["secret"]["secretName"] for one in volumes if one["name"] == "api-tokens"]
    assert re.findall(r"get secret (\S+)", text) == tokens


def test_the_test_pod_asks_all_three_ports_and_its_program_is_python():
    for name in ("default", "ha", "all-on"):
        one = only(name, "Pod")
        assert one["metadata"]["annotations"]["helm.sh/hook"] == "test"
        (spec,) = one["spec"]["containers"]
        assert spec["command"] == ["python", "-c"]
        compile(spec["args"][0], "test-pod", "exec")
        assert "readyz" in spec["args"][0]
        assert "evenkeel_build_info" in spec["args"][0]
        assert ("grpc_health" in spec["args"][0]) == (name != "ha")
    assert not kind("minimal", "Pod")


def test_the_charts_version_is_the_packages():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (Path(CHART).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
