"""Objects and patches beside the examples: valid, and they fit the pods that they belong to."""

import copy
import re

import kubernetes_validate
import pytest
import yaml

from evenkeel_moe.engines.guest.settings import GuestSettings
from tests.deploy.chart import ROOT

pytestmark = pytest.mark.deploy
FOLDER = ROOT / "deploy" / "examples"
PODS = sorted(FOLDER.glob("*-decode.yaml"))
OBJECTS = [
    one
    for path in (FOLDER / "objects").glob("*.yaml")
    for one in yaml.safe_load_all(path.read_text())
]


def workers(path):
    template = yaml.safe_load(path.read_text())["spec"]["leaderWorkerTemplate"]
    return template["workerTemplate"]


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: one["metadata"]["name"])
def test_objects_are_valid(one):
    kubernetes_validate.validate(copy.deepcopy(one), "1.37", strict=True)


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_every_pool_has_a_service_that_finds_its_first_pod(path):
    pod = workers(path)
    (service,) = (one for one in OBJECTS if one["metadata"]["name"] == path.stem)
    wanted = dict(service["spec"]["selector"])
    assert wanted.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    assert wanted.items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert service["spec"]["ports"][0]["port"] == ports["http"]


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_pods_mount_the_claim_and_keep_the_model_there(path):
    spec = workers(path)["spec"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert set(claims.values()) <= {one["metadata"]["name"] for one in OBJECTS}
    (container,) = spec["containers"]
    (cache,) = (env["value"] for env in container["env"] if env["name"] == "HF_HOME")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert [mounts[name] for name in claims] == [cache]


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_the_patch_for_tls_names_its_container_and_files_that_it_mounts(path):
    engine = path.stem.removesuffix("-decode")
    patch = yaml.safe_load((FOLDER / "patches" / f"{engine}-tls.yaml").read_text())
    assert patch["metadata"]["name"] == path.stem
    added = patch["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (container,) = added["containers"]
    whole = workers(path)
    assert container["name"] == whole["spec"]["containers"][0]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == added["volumes"][0]["name"]
    fields = {f"EVENKEEL_RANK__{name.upper()}" for name in GuestSettings.model_fields}
    for variable in container["env"]:
        assert variable["name"] in fields
        assert variable["value"].startswith(mount["mountPath"])
    # Merged by name, as kubectl and kustomize do with lists of a pod.
    for key in ("env", "volumeMounts"):
        whole["spec"]["containers"][0][key] += container[key]
    whole["spec"]["volumes"] += added["volumes"]
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(whole)}
    pod["metadata"]["name"] = "x"
    kubernetes_validate.validate(pod, "1.37", strict=True)


def test_the_image_of_ranks_installs_the_extra_and_keeps_the_engines_torch():
    text = (ROOT / "Dockerfile.rank").read_text()
    assert re.search(r"^FROM \$\{BASE\}$", text, re.M)
    assert "'/tmp/evenkeel-moe[rank]'" in text
    sources = re.findall(r"^COPY (.*) \S+$", text, re.M)
    for name in " ".join(sources).split():
        assert (ROOT / name).exists()
    assert text.count("torch.__version__") == 2
