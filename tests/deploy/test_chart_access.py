"""How people reach the API, where pods run, and what the chart's defaults let them use."""

import pytest

from tests.deploy.chart import container, kind, notes, only, pod, refusal, rendered_with, values_of

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
    variables = {one["name"]: one.get("value") for one in spec["env"]}
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


def test_strict_wants_certificates_identities_tokens_and_a_network_policy():
    variables = {one["name"]: one.get("value") for one in container("strict")["env"]}
    assert variables["EVENKEEL_GRPC__TLS_REQUIRE_IDENTITY"] == "true"
    assert variables["EVENKEEL_GRPC__TLS_CLIENT_CA_FILE"] == "/etc/evenkeel/grpc-tls/ca.crt"
    assert variables["EVENKEEL_REST__TLS_CERT_FILE"] == "/etc/evenkeel/rest-tls/tls.crt"
    assert variables["EVENKEEL_REST__TOKEN_FILE"] == "/etc/evenkeel/api/tokens"
    assert only("strict", "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert kind("default", "NetworkPolicy") == []
    plain = {one["name"] for one in container("default")["env"]}
    assert "EVENKEEL_GRPC__TLS_REQUIRE_IDENTITY" not in plain


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


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("extraEnv[0].nam=x", "extraEnv"),
        ("extraEnv[0].value=x", "extraEnv"),
        ("resources.request.cpu=1", "resources"),
        ("resources.limits.memory=2Gib", "resources"),
        ("emptyDir.tmpSizeLimit=1 GB", "tmpSizeLimit"),
    ],
)
def test_misspelt_values_are_refused(value, named):
    assert named in refusal(value)


def test_mode_observe_is_locked_unless_the_values_say_otherwise(tmp_path):
    settings = only("default", "ConfigMap")["data"]["settings.yaml"]
    assert "observe_lock: true" in settings
    assert "It is locked" in notes(tmp_path, "default")
    kept = only("default", "ConfigMap", "config.planner.cycle_s=5")["data"]["settings.yaml"]
    assert "observe_lock: true" in kept and "cycle_s: 5" in kept
