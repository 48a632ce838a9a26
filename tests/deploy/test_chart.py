"""The chart against the conventions of operators: each is something a cluster would trip over."""

import copy
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from deploy.generate import CHARTS_OWN, described, values
from evenkeel.api.app import create_app
from evenkeel.api.auth import OPEN_PATHS, TokenSet
from evenkeel.controller.serve import _STOP_S
from evenkeel.settings import Settings, load_settings
from tests.api.fakes import FakeOperations
from tests.deploy.chart import (
    CHART,
    VALUES,
    container,
    helm,
    kind,
    notes,
    only,
    pod,
    refusal,
    rendered,
    rendered_text,
)

pytestmark = pytest.mark.deploy
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator: Kubernetes has no schema for them."""
every_values = pytest.mark.parametrize("name", sorted(VALUES))


# --- renders, and is what Kubernetes takes --------------------------------------------------------


@every_values
def test_helm_lint_is_strict_and_clean(name):
    values_file = ["-f", VALUES[name]] if VALUES[name] else []
    answer = helm("lint", "--strict", CHART, *values_file)
    assert answer.code == 0, answer.out


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@every_values
def test_every_manifest_is_valid(name, version):
    objects = rendered(name)
    assert len(objects) >= 5
    for one in objects:
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(copy.deepcopy(one), version, strict=True)


def test_the_validator_would_see_a_misspelt_field():
    broken = copy.deepcopy(only("default", "StatefulSet"))
    broken["spec"]["template"]["spec"]["automountServiceAccountTokens"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_the_defaults_need_no_custom_resources():
    assert not {one["kind"] for one in rendered("default")} & CUSTOM


def test_a_misspelt_value_is_refused():
    assert "replicaCuont" in refusal("replicaCuont=2")
    assert "thresholds" in refusal("prometheusRule.thresholds.balancednessMinimum=1")
    assert "config.planner" in refusal("config.planner.mde=auto")
    assert "config.planner.mode" in refusal("config.planner.mode=sometimes")
    assert "grpc" in refusal("config.grpc.port=1")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["replicaCount=2"], "replicaCount above 1 needs an external store"),
        (["replicaCount=2", "redis.url=redis://r:6379"], "needs api.tokens.existingSecret"),
        (["redis.url=redis://:hunter2@r:6379"], "redis.url holds a password"),
        (["redis.url=redis://u:p@ss@r:6379"], "redis.url holds a password"),
        (["redis.url=redis://r", "devValkey.enabled=true"], "two stores"),
        (["redis.passwordKey=p"], "existingSecret, which is empty"),
        (["redis.existingSecret=s"], "names a key of it"),
        (["redis.url=redis://r", "redis.existingSecret=s", "redis.urlKey=u"], "both name the store"),
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


# --- labels and selectors -----------------------------------------------------------------------------


@every_values
def test_every_object_has_the_common_labels(name):
    for one in rendered(name):
        labels = one["metadata"]["labels"]
        for label in ("name", "instance", "version", "managed-by"):
            assert labels[f"app.kubernetes.io/{label}"], (one["kind"], label)
        assert labels["helm.sh/chart"] == "evenkeel-0.1.0"


@every_values
def test_selectors_hold_name_and_instance_only_and_find_their_pods(name):
    names = {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    for one in rendered(name):
        if one["kind"] in ("StatefulSet", "Deployment"):
            selector = one["spec"]["selector"]["matchLabels"]
            assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        elif one["kind"] == "Service":
            selector = one["spec"]["selector"]
        elif one["kind"] in ("PodDisruptionBudget", "ServiceMonitor"):
            selector = one["spec"]["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            selector = one["spec"]["podSelector"]["matchLabels"]
        else:
            continue
        assert set(selector) == names, one["kind"]


def test_controllers_do_not_select_other_pods_of_the_release():
    ours = only("all-on", "StatefulSet")["spec"]["selector"]["matchLabels"]
    others = [only("all-on", "Deployment")["spec"]["template"]["metadata"], only("all-on", "Pod")["metadata"]]
    for other in others:
        assert not ours.items() <= other["labels"].items()


def test_own_labels_reach_every_object():
    assert all(one["metadata"]["labels"]["team"] == "serving" for one in rendered("all-on"))


# --- monitoring objects -------------------------------------------------------------------------------


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
    ports = [port["name"] for service in kind("all-on", "Service") for port in service["spec"]["ports"]]
    assert ports.count(endpoint["port"]) == 1


def test_rules_carry_labels_thresholds_and_the_job_of_the_release():
    rule = only("all-on", "PrometheusRule")
    assert rule["metadata"]["namespace"] == "monitoring"
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    alerts = {one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]}
    assert "EvenkeelTargetDown" not in alerts
    assert "EvenkeelTargetAbsent" in alerts
    low = alerts["EvenkeelBalancednessLow"]
    assert low["expr"].strip().endswith("< 0.8")
    assert 'job="r-evenkeel-metrics",namespace="ek"' in low["expr"]
    assert low["labels"] == {"severity": "warning", "team": "serving"}
    assert low["annotations"]["runbook_url"] == "https://wiki.example/evenkeel/EvenkeelBalancednessLow.md"
    assert "{{ $labels.deployment }}" in low["annotations"]["summary"]
    services = {service["metadata"]["name"] for service in kind("all-on", "Service")}
    assert "r-evenkeel-metrics" in services
    assert not re.search(r"\$\{", yaml.safe_dump(rule))


def test_every_threshold_is_used_by_a_rule():
    text = (CHART / "rules" / "evenkeel.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)\}", text.split("groups:", 1)[1])) - {"selector", "runbookUrl"}
    assert used == set(values()["prometheusRule"]["thresholds"])


def test_dashboards_are_config_maps_the_sidecar_finds():
    maps = [one for one in kind("all-on", "ConfigMap") if "grafana_dashboard" in one["metadata"]["labels"]]
    assert len(maps) == len(list((CHART / "dashboards").glob("*.json"))) == 2
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Serving"}
        assert one["metadata"]["namespace"] == "monitoring"
        ((name, body),) = one["data"].items()
        assert body == (CHART / "dashboards" / name).read_text()
    renamed = rendered(
        "default", "dashboards.enabled=true", "dashboards.label=board", "dashboards.labelValue=yes"
    )
    assert [one for one in renamed if one["metadata"]["labels"].get("board") == "yes"]


# --- availability --------------------------------------------------------------------------------------


def test_a_disruption_budget_exists_for_more_than_one_replica_only():
    assert not kind("default", "PodDisruptionBudget")
    spec = only("ha", "PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec


def test_probes_ask_three_different_questions_of_routes_that_exist():
    spec = container("default")
    startup, liveness, readiness = (spec[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
    assert startup["grpc"] == {"port": 50051, "service": "evenkeel.v1.RankLink"}
    assert liveness["httpGet"]["path"] == "/healthz"
    assert readiness["httpGet"]["path"] == "/readyz"
    app = create_app(FakeOperations(), TokenSet.parse("operator operate 0123456789abcdef"))
    paths = set(app.openapi()["paths"])
    assert {liveness["httpGet"]["path"], readiness["httpGet"]["path"]} <= paths & OPEN_PATHS


def test_the_kubelet_is_not_asked_for_grpc_over_tls():
    startup = container("ha")["startupProbe"]
    assert startup["tcpSocket"] == {"port": "grpc"}
    assert "grpc" not in startup


@every_values
def test_the_grace_period_is_above_the_drain(name):
    assert pod(name)["terminationGracePeriodSeconds"] > _STOP_S
    assert "terminationGracePeriodSeconds" in refusal("terminationGracePeriodSeconds=20")


def test_replicas_have_names_of_their_own_that_ranks_can_reach():
    state = only("ha", "StatefulSet")
    variables = {one["name"]: one.get("value") for one in container("ha")["env"]}
    assert variables["EVENKEEL_LEADER__REPLICA_ID"] == "$(POD_NAME)"
    assert variables["EVENKEEL_LEADER__REPLICAS"] == "3" == str(state["spec"]["replicas"])
    service = state["spec"]["serviceName"]
    assert variables["EVENKEEL_GRPC__ADVERTISE"] == f"$(POD_NAME).{service}.ek.svc.cluster.local:50051"
    headless = next(one for one in kind("ha", "Service") if one["metadata"]["name"] == service)
    assert headless["spec"]["clusterIP"] == "None"
    # Variables refer to those before them.
    names = [one["name"] for one in container("ha")["env"]]
    assert names.index("POD_NAME") < names.index("EVENKEEL_LEADER__REPLICA_ID")
    assert names.index("REDIS_USERNAME") < names.index("EVENKEEL_REDIS__URL")


@every_values
def test_an_upgrade_meets_no_field_that_cannot_change(name):
    """Name, selector, service name and claim templates of a StatefulSet are fixed once and for all."""
    state = only(name, "StatefulSet")
    assert state["metadata"]["name"] == "r-evenkeel"
    assert state["spec"]["serviceName"] == "r-evenkeel-headless"
    assert state["spec"]["podManagementPolicy"] == "Parallel"
    assert "volumeClaimTemplates" not in state["spec"]
    assert "version" not in yaml.safe_dump(state["spec"]["selector"])


def test_a_change_of_the_settings_restarts_the_pods():
    def checksum(*sets):
        return only("default", "StatefulSet", *sets)["spec"]["template"]["metadata"]["annotations"][
            "checksum/config"
        ]

    assert checksum() != checksum("config.planner.mode=auto")
    assert checksum() == checksum("service.type=NodePort")


# --- security ------------------------------------------------------------------------------------------


@every_values
def test_pods_run_without_rights_and_as_any_user(name):
    specs = [
        (one["spec"]["template"]["spec"], one["kind"])
        for one in rendered(name)
        if "template" in one.get("spec", {})
    ]
    specs += [(one["spec"], "Pod") for one in kind(name, "Pod")]
    for spec, of in specs:
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "runAsUser" not in spec["securityContext"]
        for one in spec["containers"]:
            security = one["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            if of != "Deployment":  # the trial store's image names no numeric user
                assert "runAsUser" not in security
            mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
            assert mounts & {"/tmp", "/data"}


def test_no_fixed_group_by_default():
    assert "fsGroup" not in pod("default")["securityContext"]


@every_values
def test_no_rights_in_the_cluster_are_asked_for(name):
    kinds = {one["kind"] for one in rendered(name)}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for account in kind(name, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@every_values
def test_secrets_are_files_and_nothing_else(name):
    text = rendered_text(name)
    assert not kind(name, "Secret")
    for one in container(name)["env"]:
        if "secretKeyRef" in one.get("valueFrom", {}):
            assert one["name"] == "REDIS_USERNAME"
        assert not re.search(r"PASSWORD$|TOKEN$", one["name"])
    for one in kind(name, "ConfigMap"):
        assert "password" not in one["data"].get("settings.yaml", "")
    assert "args: [serve, --config, /etc/evenkeel/settings.yaml]" in text


def test_a_password_of_any_characters_reaches_the_settings(tmp_path, monkeypatch):
    variables = {one["name"]: one.get("value", "") for one in container("ha")["env"]}
    monkeypatch.setenv(
        "EVENKEEL_REDIS__URL", variables["EVENKEEL_REDIS__URL"].replace("$(REDIS_USERNAME)", "keeper")
    )
    secret = "p@ss:w/o%rd#"
    (tmp_path / "password").write_text(secret)
    assert variables["EVENKEEL_REDIS__PASSWORD_FILE"] == "/etc/evenkeel/redis/password"
    monkeypatch.setenv("EVENKEEL_REDIS__PASSWORD_FILE", str(tmp_path / "password"))
    settings = load_settings()
    assert settings.redis.password == secret
    assert settings.redis.url.startswith("rediss://keeper@redis.data.svc")


@every_values
def test_no_image_of_bitnami(name):
    assert "bitnami" not in rendered_text(name).lower()


def test_the_trial_store_is_opt_in_official_and_marked():
    assert not kind("default", "Deployment")
    trial = only("all-on", "Deployment")
    assert trial["spec"]["template"]["spec"]["containers"][0]["image"].startswith("valkey/valkey:")
    assert "development only" in trial["metadata"]["annotations"]["evenkeel/purpose"]


def test_the_network_policy_names_who_may_speak_to_what():
    policy = next(one for one in kind("all-on", "NetworkPolicy") if one["metadata"]["name"] == "r-evenkeel")[
        "spec"
    ]
    ports = {port["port"]: rule["from"] for rule in policy["ingress"][:3] for port in rule["ports"]}
    assert set(ports) == {"grpc", "rest", "metrics"}
    assert all(ports.values())
    allowed = {(port["port"], port["protocol"]) for rule in policy["egress"] for port in rule["ports"]}
    assert {(53, "UDP"), (53, "TCP"), (6379, "TCP"), (443, "TCP")} <= allowed
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    external = only("url-in-secret", "NetworkPolicy")["spec"]["egress"]
    redis = next(rule for rule in external if {"port": 6379, "protocol": "TCP"} in rule["ports"])
    assert redis["to"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    assert not kind("default", "NetworkPolicy")


# --- settings ------------------------------------------------------------------------------------------


@every_values
def test_every_variable_of_the_chart_is_a_setting_and_the_whole_is_sound(name, monkeypatch, tmp_path):
    for one in container(name)["env"]:
        value = one.get("value")
        if not one["name"].startswith("EVENKEEL_"):
            continue
        assert value is not None, one
        if one["name"].endswith("_FILE") and "__TLS_" not in one["name"]:
            path = tmp_path / one["name"]
            path.write_text("redis://:p@redis:6379" if "URL" in one["name"] else "secret")
            value = str(path)
        monkeypatch.setenv(
            one["name"], value.replace("$(POD_NAME)", "r-evenkeel-0").replace("$(REDIS_USERNAME)", "u")
        )
    file = tmp_path / "settings.yaml"
    file.write_text(
        next(one for one in kind(name, "ConfigMap") if "settings.yaml" in one["data"])["data"][
            "settings.yaml"
        ]
    )
    settings = load_settings(file)
    assert settings.grpc.host == settings.rest.host == settings.metrics.host == "0.0.0.0"
    assert settings.leader.replica_id == "r-evenkeel-0"
    assert settings.leader.replicas == only(name, "StatefulSet")["spec"]["replicas"]
    if name == "all-on":
        assert settings.planner.mode == "auto"
        assert settings.metrics.layer_rank_series == 4392


def test_what_the_chart_keeps_from_config_are_settings():
    sections = {field.name: field for field in Settings.__dataclass_fields__.values()}
    for section, keys in CHARTS_OWN.items():
        assert section in sections
        for key in keys or ():
            assert key in sections[section].type.__dataclass_fields__


def test_ports_in_the_pod_are_those_of_the_settings():
    ports = {
        one["name"]: one["containerPort"] for one in container("default", "service.grpcPort=6000")["ports"]
    }
    variables = {
        one["name"]: one.get("value") for one in container("default", "service.grpcPort=6000")["env"]
    }
    for name, port in ports.items():
        assert variables[f"EVENKEEL_{name.upper()}__PORT"] == str(port)


# --- values --------------------------------------------------------------------------------------------


def leaves(value, path=()):
    if isinstance(value, dict) and value and path not in described():
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def test_every_value_is_described():
    assert [".".join(path) for path in leaves(values()) if path not in described()] == []


@pytest.mark.parametrize(
    ("sets", "where"),
    [
        (
            "resources.limits.cpu=2",
            lambda: container("default", "resources.limits.cpu=2")["resources"]["limits"]["cpu"],
        ),
        ("image.tag=x", lambda: container("default", "image.tag=x")["image"] == "evenkeel:x"),
    ],
)
def test_values_reach_the_pod(sets, where):
    assert where()


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
    own = rendered("persistent", "persistence.existingClaim=mine")
    assert not [one for one in own if one["kind"] == "PersistentVolumeClaim"]


# --- what people read ----------------------------------------------------------------------------------


@every_values
def test_the_notes_name_objects_that_exist(name, tmp_path):
    text = notes(tmp_path, name)
    names = {one["metadata"]["name"] for one in rendered(name)}
    assert re.findall(r"statefulset/(\S+)", text) == ["r-evenkeel"]
    assert set(re.findall(r"svc/(\S+)", text)) <= names
    assert "helm -n ek test r" in text
    assert "{{" not in re.sub(r"go-template='[^']*'", "", text)
    secret = only(name, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
    tokens = [one["secret"]["secretName"] for one in secret if one["name"] == "api-tokens"]
    assert re.findall(r"get secret (\S+)", text) == tokens


def test_the_notes_say_what_is_missing(tmp_path):
    default, full = notes(tmp_path, "default"), notes(tmp_path, "all-on")
    for words in ("Not scraped yet", "No alerts yet", "Nothing moves in mode observe", "lost with the pod"):
        assert words in default
    assert "Not scraped yet" not in full
    assert "mode auto" in full


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
