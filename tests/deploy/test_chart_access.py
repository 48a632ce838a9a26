"""How people reach the API, where pods run, and what the chart's defaults let them use."""

import re
from dataclasses import fields

import pytest

from deploy.generate import health_thresholds
from evenkeel_moe.ports.status import HealthBounds
from evenkeel_moe.settings import PlannerSettings
from evenkeel_moe.settings_sources import load_settings
from tests.deploy.chart import (
    CUSTOM,
    check_object,
    container,
    environment,
    every_values,
    kind,
    notes,
    only,
    pod,
    refusal,
    rendered,
    rendered_by,
    rendered_with,
    settings_file,
    values_of,
)

pytestmark = pytest.mark.deploy


def test_ingress_and_route_lead_to_the_api():
    services = {one["metadata"]["name"]: one for one in kind("all-on", "Service")}
    (rule,) = only("all-on", "Ingress")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    target = path["backend"]["service"]
    ports = {one["name"]: one["port"] for one in services[target["name"]]["spec"]["ports"]}
    assert (rule["host"], path["path"], target["port"]["name"]) == ("evenkeel.example", "/", "rest")
    route = only("all-on", "HTTPRoute")["spec"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend == {"name": target["name"], "port": ports["rest"]}
    assert route["parentRefs"][0]["name"] == "gateway"
    assert route["hostnames"] == ["evenkeel.example"]


def test_neither_is_made_by_default_and_each_needs_a_place():
    assert kind("default", "Ingress") == kind("default", "HTTPRoute") == []
    assert "needs ingress.hosts" in refusal("ingress.enabled=true")
    assert "needs httpRoute.parentRefs" in refusal("httpRoute.enabled=true")


def test_with_a_certificate_the_api_its_probes_and_its_users_speak_https(tmp_path):
    spec = container("all-on")
    variables = environment("all-on")
    files = {variables[f"EVENKEEL_REST__TLS_{name}_FILE"] for name in ("CERT", "KEY")}
    (mount,) = (one for one in spec["volumeMounts"] if one["name"] == "rest-tls")
    assert files == {f"{mount['mountPath']}/chain.pem", f"{mount['mountPath']}/key.pem"}
    assert mount["readOnly"]
    # The kubelet does not follow changes of a file that is mounted by subPath.
    assert "subPath" not in mount
    secrets = [one["secret"] for one in pod("all-on")["volumes"] if one["name"] == "rest-tls"]
    assert secrets == [{"secretName": "evenkeel-rest"}]
    for name, scheme in (("all-on", "HTTPS"), ("default", "HTTP")):
        for probe in ("livenessProbe", "readinessProbe"):
            assert container(name)[probe]["httpGet"]["scheme"] == scheme
        (asker,) = only(name, "Pod")["spec"]["containers"]
        assert f'"{scheme.lower()}://r-evenkeel:8080/readyz"' in asker["args"][0]
        assert f"--address {scheme.lower()}://" in notes(tmp_path, name)


def test_notes_tell_whom_a_network_policy_must_let_in(tmp_path):
    words = "must match networkPolicy.operatorsFrom"
    assert words in notes(tmp_path, "all-on")
    assert words not in notes(tmp_path, "default", "networkPolicy.enabled=true")
    assert words not in notes(tmp_path, "all-on", "networkPolicy.enabled=false")
    route = ("httpRoute.enabled=true", "httpRoute.parentRefs[0].name=gateway")
    assert words in notes(tmp_path, "strict", *route)


def test_strict_wants_certificates_identities_tokens_and_a_network_policy():
    variables = environment("strict")
    assert variables["EVENKEEL_GRPC__TLS_REQUIRE_IDENTITY"] == "true"
    assert variables["EVENKEEL_GRPC__TLS_CLIENT_CA_FILE"] == "/etc/evenkeel/grpc-tls/ca.crt"
    assert variables["EVENKEEL_REST__TLS_CERT_FILE"] == "/etc/evenkeel/rest-tls/tls.crt"
    assert variables["EVENKEEL_REST__TOKEN_FILE"] == "/etc/evenkeel/api/tokens"
    assert only("strict", "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert kind("default", "NetworkPolicy") == []
    assert "EVENKEEL_GRPC__TLS_REQUIRE_IDENTITY" not in environment("default")


STRICT_NEEDS = [
    "grpc.tls.existingSecret",
    "grpc.tls.clientCaKey",
    "rest.tls.existingSecret",
    "api.tokens.existingSecret",
]


@pytest.mark.parametrize("missing", STRICT_NEEDS)
def test_strict_is_refused_without_what_it_needs(missing):
    told = refusal(f"{missing}=", name="strict")
    assert f"security: strict needs {missing} (" in told
    assert [name for name in STRICT_NEEDS if name in told] == [missing]


def test_strict_names_all_that_is_missing_at_once():
    told = refusal("security=strict")
    assert all(name in told for name in STRICT_NEEDS)


def test_strict_takes_no_store_without_a_password_and_no_other_word_is_taken():
    changes = ("redis.url=", "devValkey.enabled=true")
    assert "strict refuses devValkey" in refusal(*changes, name="strict")
    assert "security" in refusal("security=strickt")


def test_replicas_spread_over_nodes_by_default():
    (spread,) = pod("default")["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one node must still do"
    labels = only("default", "StatefulSet")["spec"]["selector"]["matchLabels"]
    assert spread["labelSelector"] == {"matchLabels": labels}


def test_scratch_volumes_are_bounded():
    scratch = [one for one in pod("default")["volumes"] if "emptyDir" in one]
    assert {one["name"]: one["emptyDir"].get("sizeLimit") for one in scratch} == {
        "data": "2Gi",
        "tmp": "1Gi",
    }
    (test_pod,) = kind("default", "Pod")
    for one in test_pod["spec"]["volumes"]:
        assert one["emptyDir"]["sizeLimit"]


def test_a_pod_stops_after_its_service_has_let_it_go():
    hook = container("default")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "python", "the image has no shell to rely on"
    assert values_of("terminationGracePeriodSeconds") >= 20 + 5


def test_other_containers_run_before_and_beside_the_controller():
    beside = {"name": "beside", "image": "busybox"}
    (whole,) = (
        one
        for one in rendered_with({"extraContainers": [beside], "initContainers": [beside]})
        if one["kind"] == "StatefulSet"
    )
    spec = whole["spec"]["template"]["spec"]
    assert [one["name"] for one in spec["containers"]] == ["evenkeel", "beside"]
    assert spec["initContainers"] == [beside]


def test_the_test_pod_runs_where_the_controllers_run():
    (same,) = kind("all-on", "Pod")
    assert same["spec"]["tolerations"] == pod("all-on")["tolerations"]
    (own,) = kind("all-on", "Pod", "tests.tolerations[0].operator=Exists")
    assert own["spec"]["tolerations"] == [{"operator": "Exists"}]


def test_thresholds_that_the_controllers_would_refuse_are_refused():
    names = health_thresholds()
    assert {field.name for field in fields(HealthBounds)} - set(names.values()) == {
        "epoch_mismatch_s"
    }
    told = refusal(*(f"prometheusRule.thresholds.{name}=0" for name in names))
    assert sorted(re.findall(r"thresholds\.(\w+): Must be", told)) == sorted(names)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("2m", 120), ("1h30m", 5400), ("1500ms", 1.5), ("1d", 86400), ("0s", 0.001)],
)
def test_health_bears_different_epochs_as_long_as_the_alert_does(tmp_path, written, seconds):
    given = rendered("default", f"prometheusRule.thresholds.epochMismatchFor={written}")
    assert load_settings(settings_file(tmp_path, given)).health.epoch_mismatch_s == seconds


def test_profile_observe_is_locked_unless_the_values_say_otherwise(tmp_path):
    def planner(*sets: str) -> PlannerSettings:
        return load_settings(settings_file(tmp_path, rendered("default", *sets))).planner

    assert planner().observe_lock
    assert "It is locked" in notes(tmp_path, "default")
    kept = planner("config.planner.cycle_s=5")
    assert kept.observe_lock and kept.cycle_s == 5
    assert not planner("config.planner.observe_lock=false").observe_lock


@pytest.mark.parametrize("profile", ["observe", "propose", "auto"])
def test_a_profile_sets_the_mode_and_creates_what_watches_it(tmp_path, profile):
    watching = {"ServiceMonitor", "PrometheusRule"}
    apis = [f"monitoring.coreos.com/v1/{one}" for one in sorted(watching)]
    words = [word for api in apis for word in ("--api-versions", api)]
    for given in ([], words):
        objects = rendered_by("--set", f"profile={profile}", *given)
        plans = profile != "observe"
        assert watching & {one["kind"] for one in objects} == (
            watching if given and plans else set()
        )
        boards = [one for one in objects if "grafana_dashboard" in one["metadata"]["labels"]]
        assert bool(boards) == plans
        assert load_settings(settings_file(tmp_path, objects)).planner.mode == profile


@pytest.mark.parametrize("profile", ["propose", "auto"])
def test_what_a_profile_creates_can_be_switched_off(profile):
    names = ("serviceMonitor", "prometheusRule", "dashboards")
    sets = [word for name in names for word in ("--set", f"{name}.enabled=false")]
    api = ("--api-versions", "monitoring.coreos.com/v1/ServiceMonitor")
    objects = rendered_by("--set", f"profile={profile}", *api, *sets)
    assert [one["kind"] for one in objects] == [one["kind"] for one in rendered_by()]


@pytest.mark.parametrize(
    ("profile", "next_step"),
    [
        ("observe", "--set profile=propose"),
        ("propose", "--set profile=auto"),
        ("auto", "evenkeel pause"),
    ],
)
def test_notes_say_the_profile_and_how_to_go_on(tmp_path, profile, next_step):
    text = notes(tmp_path, "default", f"profile={profile}")
    assert f"Profile {profile}: " in text and next_step in text


# --- labels, selectors and names of the chart's objects -------------------------------------------


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
    others = [
        only("all-on", "Deployment")["spec"]["template"]["metadata"],
        only("all-on", "Pod")["metadata"],
    ]
    for other in others:
        assert not ours.items() <= other["labels"].items()


def test_own_labels_reach_every_object():
    assert all(one["metadata"]["labels"]["team"] == "serving" for one in rendered("all-on"))


EVERYTHING = {
    "devValkey": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus", "team": "metrics"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus", "team": "metrics"}},
    "dashboards": {"enabled": True, "label": "team", "labelValue": "drawn"},
}


def labels_of(objects):
    """Every map of labels, and every selector of a workload or service."""
    for one in objects:
        yield one["metadata"]["labels"]
        spec = one.get("spec", {})
        yield from (spec[key] for key in ("selector",) if one["kind"] == "Service")
        if "template" in spec:
            yield spec["selector"]["matchLabels"]
            yield spec["template"]["metadata"]["labels"]


def test_names_that_look_like_numbers_stay_names():
    values = {
        **EVERYTHING,
        "nameOverride": "1e5",
        "commonLabels": {"team": 7},
        "podLabels": {"shard": 8, "canary": True},
        "podAnnotations": {"a": True, "b": 1000000, "none": None},
        "service": {"annotations": {"b": 1}},
        "ingress": {"enabled": True, "hosts": ["h"], "annotations": {"c": 1.5}},
        "nodeSelector": {"gpu": False},
        "priorityClassName": "1000",
        "serviceAccount": {"create": False, "name": "77"},
        "imagePullSecrets": [{"name": "12"}],
        "api": {"tokens": {"existingSecret": "123", "key": "1"}},
        "grpc": {"tls": {"existingSecret": "124", "certKey": "2", "keyKey": "3"}},
        "persistence": {"enabled": True, "existingClaim": "31", "storageClass": "32"},
    }
    objects = rendered_with(values, release="123", namespace="456")
    for labels in labels_of(objects):
        assert all(isinstance(value, str) for value in labels.values()), labels
    for one in objects:
        assert one["metadata"]["namespace"] == "456"
        if one["kind"] not in CUSTOM:
            check_object(one)
    by_kind = {one["kind"]: one for one in objects}
    pods = by_kind["StatefulSet"]["spec"]["template"]
    annotations = pods["metadata"]["annotations"]
    assert (annotations["a"], annotations["b"]) == ("true", "1000000")
    assert "none" not in annotations
    assert pods["spec"]["nodeSelector"] == {"gpu": "false"}
    tls = {"tls": {"existingSecret": "1e3"}, "sentinel": {"tls": {"existingSecret": "126"}}}
    in_secret = {"existingSecret": "1e5", "passwordKey": "5", "urlKey": "6", **tls}
    url = "redis://$(REDIS_USERNAME)@r"
    for redis in (in_secret, {"existingSecret": "1e5", "usernameKey": "4", "url": url}):
        more = {"redis": redis, "persistence": {"enabled": True, "storageClass": "32"}}
        for one in rendered_with(more, release="123", namespace="456"):
            check_object(one)


def test_a_label_given_twice_is_written_once_and_selectors_are_not_the_users():
    wanted = {
        "team": "serving",
        "app.kubernetes.io/managed-by": "argocd",
        "app.kubernetes.io/name": "mine",
    }
    values = {
        **EVERYTHING,
        "commonLabels": wanted,
        "podLabels": {"team": "night", "app.kubernetes.io/instance": "x"},
    }
    objects = rendered_with(values)
    by_kind = {one["kind"]: one for one in objects}
    assert by_kind["ServiceMonitor"]["metadata"]["labels"]["team"] == "metrics"
    assert by_kind["PrometheusRule"]["metadata"]["labels"]["release"] == "prometheus"
    assert by_kind["ConfigMap"]["metadata"]["labels"]["team"] == "drawn"
    state = by_kind["StatefulSet"]
    assert state["metadata"]["labels"]["team"] == "serving"
    assert state["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "argocd"
    pods = state["spec"]["template"]["metadata"]["labels"]
    assert pods["team"] == "night"
    assert state["spec"]["selector"]["matchLabels"].items() <= pods.items()
    assert pods["app.kubernetes.io/instance"] == "r"


def test_names_of_any_length_give_labels_that_fit():
    for override in ("a" * 63, "a" * 70, "a" * 55 + "-" + "b" * 7):
        values = {**EVERYTHING, "nameOverride": override}
        for labels in labels_of(rendered_with(values)):
            for value in labels.values():
                assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value), (
                    value
                )
