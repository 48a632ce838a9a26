"""The examples, with those for other stacks: their pods are valid, and carry what ranks need."""

import pytest
import yaml

from evenkeel_moe.engines.guest.settings import GuestSettings
from tests.deploy.chart import ROOT, check_pod, values_of
from tests.deploy.test_examples import KNOWN, workers

pytestmark = pytest.mark.deploy
FOLDER = ROOT / "deploy" / "examples"
STACKS = FOLDER / "stacks"


def read(name):
    return yaml.safe_load((STACKS / name).read_text())


def production_stack():
    """The parts of its values that its chart copies into a pod as they are."""
    (model,) = read("production-stack-values.yaml")["servingEngineSpec"]["modelSpec"]
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "args": model["vllmConfig"]["extraArgs"],
        "env": model["env"],
    }
    return {"metadata": {"labels": model["podLabels"]}, "spec": {"containers": [container]}}


def rbg():
    group = read("rbg-sglang.yaml")
    assert (group["apiVersion"], group["kind"]) == ("workloads.x-k8s.io/v1alpha2", "RoleBasedGroup")
    (role,) = group["spec"]["roles"]
    assert set(role) == {"name", "replicas", "leaderWorkerPattern"}
    pattern = role["leaderWorkerPattern"]
    assert set(pattern) == {"size", "restartPolicyConfig", "template"}
    return pattern["template"]


def dynamo():
    graph = read("dynamo-vllm.yaml")
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    frontend, worker = graph["spec"]["components"]
    assert frontend["type"] == "frontend"
    assert [one["name"] for one in worker["podTemplate"]["spec"]["containers"]] == ["main"]
    return worker["podTemplate"]


def llm_d():
    """A LeaderWorkerSet after the component's patch."""
    component = read("llm-d/kustomization.yaml")
    assert component["kind"] == "Component"
    (patch,) = component["patches"]
    whole = yaml.safe_load((FOLDER / "vllm-decode.yaml").read_text())
    template = whole["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    del template["metadata"]["labels"]["evenkeel/rank"]
    (container,) = template["spec"]["containers"]
    container["env"] = [{"name": "HF_HOME", "value": "/models"}]
    for change in read(f"llm-d/{patch['path']}"):
        apply(whole, change)
    return template


def apply(document, change):
    """Apply one change of a JSON patch (RFC 6902); the place must exist."""
    *above, last = (
        part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]
    )
    for part in above:
        document = document[int(part) if isinstance(document, list) else part]
    if last == "-":
        document.append(change["value"])
        return
    assert change["op"] == "add" or last in document
    document[last] = change["value"]


PODS = {
    "production-stack": production_stack,
    "rbg": rbg,
    "dynamo": dynamo,
    "llm-d": llm_d,
    "vllm": lambda: workers(FOLDER / "vllm-decode.yaml"),
    "sglang": lambda: workers(FOLDER / "sglang-decode.yaml"),
}
every_stack = pytest.mark.parametrize("name", PODS)


@every_stack
def test_a_pod_is_valid(name):
    check_pod(PODS[name]())


@every_stack
def test_ranks_find_the_controller_and_only_observe(name, monkeypatch):
    pod = PODS[name]()
    # Who may open streams, as the chart's policy has it.
    allowed = values_of("networkPolicy", "ranksFrom")[0]["podSelector"]["matchLabels"]
    assert allowed.items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    variables = [one for one in container["env"] if one["name"].startswith("EVENKEEL_")]
    assert {one["name"] for one in variables} <= KNOWN
    assert len({one["name"] for one in variables}) == len(variables)
    sources = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in variables
        if "valueFrom" in one
    }
    assert sources == {
        "EVENKEEL_RANK__NODE": "spec.nodeName",
        "EVENKEEL_RANK__HOST": "status.podIP",
    }
    for one in variables:
        if "value" in one:
            monkeypatch.setenv(one["name"], one["value"])
    settings = GuestSettings()
    assert settings.addresses == ("evenkeel.evenkeel.svc:50051",)
    assert settings.mode == "observe"
    assert "--enable-eplb" in " ".join(container["args"])


def test_deployments_have_names_of_their_own():
    """Two groups with one name would take each other's places."""
    names = []
    for make in PODS.values():
        (container,) = make()["spec"]["containers"]
        names += [one["value"] for one in container["env"] if one["name"].endswith("DEPLOYMENT")]
    assert len(names) == len(PODS) == len(set(names))


def test_every_example_is_on_the_page_and_its_engine_is_a_tested_version():
    page = (FOLDER / "README.md").read_text()
    for path in STACKS.iterdir():
        assert f"(stacks/{path.name}" in page
    versions = {
        engine: (FOLDER / f"{engine}-decode.yaml").read_text().split("-evenkeel:")[1].split("\n")[0]
        for engine in ("vllm", "sglang")
    }
    assert (
        read("production-stack-values.yaml")["servingEngineSpec"]["modelSpec"][0]["tag"]
        == (versions["vllm"])
    )
    assert rbg()["spec"]["containers"][0]["image"].endswith(f":{versions['sglang']}")
    assert llm_d()["spec"]["containers"][0]["image"].endswith(f":{versions['vllm']}")
