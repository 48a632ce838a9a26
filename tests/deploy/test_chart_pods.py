"""The pods of the chart: availability, rights, secrets, network and environment variables."""

import re

import pytest
import yaml

from deploy.generate import CHARTS_OWN
from evenkeel_moe.adapters.redis.client import connect
from evenkeel_moe.api.app import create_app
from evenkeel_moe.api.auth import OPEN_PATHS, TokenSet
from evenkeel_moe.controller.process.serve import STOP_S
from evenkeel_moe.settings import Settings
from evenkeel_moe.settings_sources import load_settings
from tests.api.fakes import FakeOperations
from tests.deploy.chart import (
    check_object,
    container,
    environment,
    every_values,
    kind,
    only,
    pod,
    refusal,
    rendered,
    rendered_text,
    rendered_with,
    settings_file,
)

pytestmark = pytest.mark.deploy


# --- availability ---


def test_a_disruption_budget_exists_for_more_than_one_replica_only():
    assert not kind("default", "PodDisruptionBudget")
    spec = only("ha", "PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec


def test_probes_ask_three_different_questions_of_routes_that_exist():
    spec = container("default")
    startup, liveness, readiness = (
        spec[f"{name}Probe"] for name in ("startup", "liveness", "readiness")
    )
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
    assert pod(name)["terminationGracePeriodSeconds"] > STOP_S
    assert "terminationGracePeriodSeconds" in refusal("terminationGracePeriodSeconds=20")


def test_replicas_have_names_of_their_own_that_ranks_can_reach():
    state = only("ha", "StatefulSet")
    variables = environment("ha")
    assert variables["EVENKEEL_LEADER__REPLICA_ID"] == "$(POD_NAME)"
    assert variables["EVENKEEL_LEADER__REPLICAS"] == "3" == str(state["spec"]["replicas"])
    service = state["spec"]["serviceName"]
    assert (
        variables["EVENKEEL_GRPC__ADVERTISE"] == f"$(POD_NAME).{service}.ek.svc.cluster.local:50051"
    )
    headless = next(one for one in kind("ha", "Service") if one["metadata"]["name"] == service)
    assert headless["spec"]["clusterIP"] == "None"
    # Variables refer to those before them.
    names = list(variables)
    assert names.index("POD_NAME") < names.index("EVENKEEL_LEADER__REPLICA_ID")
    assert names.index("REDIS_USERNAME") < names.index("EVENKEEL_REDIS__URL")


@every_values
def test_an_upgrade_meets_no_field_that_cannot_change(name):
    """Name, selector, service name and claim templates of a StatefulSet cannot change."""
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

    assert checksum() != checksum("profile=auto")
    assert checksum() == checksum("service.type=NodePort")


# --- security ---


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
            assert one["name"] in ("REDIS_USERNAME", "SENTINEL_USERNAME")
        assert not re.search(r"PASSWORD$|TOKEN$", one["name"])
    for one in kind(name, "ConfigMap"):
        assert "password" not in one["data"].get("settings.yaml", "")
    assert "args: [serve, --config, /etc/evenkeel/settings.yaml]" in text


def test_a_password_of_any_characters_reaches_the_settings(tmp_path, monkeypatch):
    variables = environment("ha")
    monkeypatch.setenv(
        "EVENKEEL_REDIS__URL",
        variables["EVENKEEL_REDIS__URL"].replace("$(REDIS_USERNAME)", "keeper"),
    )
    secret = "p@ss:w/o%rd#"
    (tmp_path / "password").write_text(secret)
    assert variables["EVENKEEL_REDIS__PASSWORD_FILE"] == "/etc/evenkeel/redis/password"
    monkeypatch.setenv("EVENKEEL_REDIS__PASSWORD_FILE", str(tmp_path / "password"))
    settings = load_settings()
    assert settings.redis.password == secret
    assert settings.redis.url.startswith("rediss://keeper@redis.data.svc")


def test_the_trial_store_is_opt_in_official_and_marked():
    assert not kind("default", "Deployment")
    trial = only("all-on", "Deployment")
    assert trial["spec"]["template"]["spec"]["containers"][0]["image"].startswith("valkey/valkey:")
    assert "development only" in trial["metadata"]["annotations"]["evenkeel/purpose"]


def test_the_network_policy_names_who_may_speak_to_what():
    policy = next(
        one for one in kind("all-on", "NetworkPolicy") if one["metadata"]["name"] == "r-evenkeel"
    )["spec"]
    ports = {port["port"]: rule["from"] for rule in policy["ingress"][:3] for port in rule["ports"]}
    assert set(ports) == {"grpc", "rest", "metrics"}
    assert all(ports.values())
    allowed = {
        (port["port"], port["protocol"]) for rule in policy["egress"] for port in rule["ports"]
    }
    assert {(53, "UDP"), (53, "TCP"), (6379, "TCP"), (443, "TCP")} <= allowed
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    names = next(
        rule for rule in policy["egress"] if {"port": 53, "protocol": "UDP"} in rule["ports"]
    )
    assert "to" not in names, "a DNS cache on the node is no pod that a selector could find"
    assert {"port": 5353, "protocol": "UDP"} in names["ports"], "where OpenShift's DNS pods listen"
    external = only("url-in-secret", "NetworkPolicy")["spec"]["egress"]
    redis = next(rule for rule in external if {"port": 6379, "protocol": "TCP"} in rule["ports"])
    assert redis["to"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    assert not kind("default", "NetworkPolicy")


@pytest.mark.parametrize("nobody", [[], None])
def test_an_empty_list_of_peers_lets_nobody_in(nobody):
    """`from: []` would let everybody in."""
    ports = {"ranksFrom": "grpc", "operatorsFrom": "rest", "metricsFrom": "metrics"}

    def open_ports(*shut: str, test_pod: bool = False) -> set[str]:
        network = {"enabled": True, **dict.fromkeys(shut, nobody)}
        objects = rendered_with({"networkPolicy": network, "tests": {"enabled": test_pod}})
        (policy,) = (one for one in objects if one["kind"] == "NetworkPolicy")
        check_object(policy)
        rules = policy["spec"]["ingress"] or []
        assert all(rule["from"] for rule in rules)
        return {port["port"] for rule in rules for port in rule["ports"]}

    for name, port in ports.items():
        assert open_ports(name) == {*ports.values()} - {port}
    assert open_ports(*ports) == set()
    assert open_ports(*ports, test_pod=True) == {*ports.values()}


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://h:6380", ["6380"]),
        ("rediss://keeper@[fd00::12]:7000/0?client_name=x:1", ["7000"]),
        (r"redis+sentinel://s1:26379\,s2:26380/main", ["26380"]),
        ("redis://h", []),
    ],
)
def test_the_network_policy_allows_the_ports_of_the_stores_address(url, named):
    sets = ("networkPolicy.enabled=true", f"redis.url={url}")
    egress = only("default", "NetworkPolicy", *sets)["spec"]["egress"]
    (redis,) = (
        rule["ports"] for rule in egress if {"port": 6379, "protocol": "TCP"} in rule["ports"]
    )
    assert [port["port"] for port in redis] == [6379, 26379, *map(int, named)]


def test_controllers_listen_where_pods_have_ipv6_addresses():
    variables = environment("default", "service.listenAddress=::").items()
    hosts = {name: value for name, value in variables if name.endswith("__HOST")}
    assert hosts == {f"EVENKEEL_{part}__HOST": "::" for part in ("GRPC", "REST", "METRICS")}


# --- settings ---


@every_values
def test_every_variable_of_the_chart_is_a_setting_and_the_whole_is_sound(
    name, monkeypatch, tmp_path
):
    for variable, value in environment(name).items():
        if not variable.startswith("EVENKEEL_"):
            continue
        assert value is not None, variable
        if variable.endswith("_FILE") and "__TLS_" not in variable:
            path = tmp_path / variable
            path.write_text("redis://:p@redis:6379" if "URL" in variable else "secret")
            value = str(path)
        value = value.replace("$(POD_NAME)", "r-evenkeel-0")
        monkeypatch.setenv(variable, re.sub(r"\$\((REDIS|SENTINEL)_USERNAME\)", "u", value))
    settings = load_settings(settings_file(tmp_path, rendered(name)))
    assert settings.grpc.host == settings.rest.host == settings.metrics.host == "0.0.0.0"
    assert settings.leader.replica_id == "r-evenkeel-0"
    assert settings.leader.replicas == only(name, "StatefulSet")["spec"]["replicas"]
    if name == "sentinel":
        redis = settings.redis
        assert (redis.password, redis.sentinel_username, redis.sentinel_password) == (
            "secret",
            "u",
            "secret",
        )
        assert (settings.grpc.max_connection_age_s, settings.grpc.max_connection_age_grace_s) == (
            7200,
            120,
        )
        assert redis.wait_replicas == 1
        # Every file the URL names is below a mounted secret.
        connect(redis.url, timeout_s=1)
        mounts = {one["mountPath"] for one in container(name)["volumeMounts"]}
        files = re.findall(r"=(/[^&]*)", redis.url)
        assert len(files) == 4
        assert {path.rsplit("/", 1)[0] for path in files} <= mounts
    if name == "all-on":
        assert settings.planner.mode == "auto"
        assert settings.metrics.layer_rank_series == 4392


def test_what_the_chart_keeps_from_config_are_settings():
    sections = Settings.sections()
    for section, keys in CHARTS_OWN.items():
        assert section in Settings.model_fields
        for key in keys or ():
            assert key in sections[section].__dataclass_fields__


def test_ports_in_the_pod_are_those_of_the_settings():
    variables = environment("default", "service.grpcPort=6000")
    for one in container("default", "service.grpcPort=6000")["ports"]:
        assert variables[f"EVENKEEL_{one['name'].upper()}__PORT"] == str(one["containerPort"])
