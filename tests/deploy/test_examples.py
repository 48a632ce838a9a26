"""Objects and patches beside the examples: valid, and they fit the pods that they belong to."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from evenkeel_moe.engines.guest.settings import GuestSettings
from tests.deploy.chart import ROOT, check_object, check_pod
from tests.waiting import deadline

pytestmark = pytest.mark.deploy
FOLDER = ROOT / "deploy" / "examples"
PODS = sorted(FOLDER.glob("*-decode.yaml"))
KNOWN = {f"EVENKEEL_RANK__{name.upper()}" for name in GuestSettings.model_fields}
"""The variables that a rank's plugin reads."""
OBJECTS = [
    one
    for path in (FOLDER / "objects").glob("*.yaml")
    for one in yaml.safe_load_all(path.read_text())
]


def workers(path):
    group = yaml.safe_load(path.read_text())
    assert group["kind"] == "LeaderWorkerSet"
    return group["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def read_patch(engine, name):
    """Return a patch of an engine's pool, and what it adds to the pod."""
    path = FOLDER / "patches" / f"{engine}-{name}.yaml"
    patch = yaml.safe_load(path.read_text())
    assert patch["metadata"]["name"] == f"{engine}-decode"
    return patch, workers(path)["spec"]


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: one["metadata"]["name"])
def test_objects_are_valid(one):
    check_object(one)


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
    _, added = read_patch(path.stem.removesuffix("-decode"), "tls")
    (container,) = added["containers"]
    whole = workers(path)
    assert container["name"] == whole["spec"]["containers"][0]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == added["volumes"][0]["name"]
    for variable in container["env"]:
        assert variable["name"] in KNOWN
        assert variable["value"].startswith(mount["mountPath"])
    _check_pod(whole, added)


def _check_pod(whole, added):
    """Check the pod with what a patch adds; lists merge by name, as in kubectl and kustomize."""
    for key in ("env", "volumeMounts"):
        whole["spec"]["containers"][0][key] += added["containers"][0][key]
    whole["spec"]["volumes"] += added["volumes"]
    whole["spec"].setdefault("initContainers", []).extend(added.get("initContainers", []))
    check_pod(whole)


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_the_patch_for_the_engines_own_image_fits_its_pod_and_the_controllers_image(path):
    _, added = read_patch(path.stem.removesuffix("-decode"), "plugin")
    wheel, plugin = added["initContainers"]
    (container,) = added["containers"]
    assert container["name"] == workers(path)["spec"]["containers"][0]["name"]
    assert plugin["image"] == container["image"], "another Python would install other packages"
    assert f"--wheel-dir {wheel['command'][2]} " in (ROOT / "Dockerfile").read_text()
    (volume,) = added["volumes"]
    for one in (wheel, plugin, container):
        (mount,) = one["volumeMounts"]
        assert (mount["name"], mount["mountPath"]) == (volume["name"], "/evenkeel")
    _check_pod(workers(path), added)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the pool")
def test_kustomize_adds_what_the_patches_have_and_keeps_the_rest(engine, tmp_path):
    whole = _rendered(
        tmp_path,
        ("patches: []", "patches:"),
        ("# - path", "- path"),
        ("patches/vllm-", f"patches/{engine}-"),
        ("vllm-decode", f"{engine}-decode"),
    )
    wanted = workers(FOLDER / f"{engine}-decode.yaml")
    for name in ("tls", "plugin"):
        _, added = read_patch(engine, name)
        _check_pod(wanted, added)
        wanted["spec"]["containers"][0] |= {
            key: value for key, value in added["containers"][0].items() if key == "image"
        }
    assert _sorted(whole) == _sorted(wanted)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the pool")
def test_without_patches_kustomize_changes_the_registry_and_nothing_else(engine, tmp_path):
    pushed = ("newName: registry.example", "newName: registry.here:5000/team")
    whole = _rendered(tmp_path, pushed, ("vllm-decode", f"{engine}-decode"))
    wanted = workers(FOLDER / f"{engine}-decode.yaml")
    container = wanted["spec"]["containers"][0]
    container["image"] = container["image"].replace("registry.example", "registry.here:5000/team")
    assert _sorted(whole) == _sorted(wanted)


def _rendered(folder, *changes):
    """Return the template of the workers that kustomize renders after changes of its file."""
    shutil.copytree(FOLDER, folder / "examples")
    file = folder / "examples" / "kustomization.yaml"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    done = subprocess.run(
        ["kubectl", "kustomize", file.parent],
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=True,
    )
    return yaml.safe_load(done.stdout)["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def _sorted(value):
    """Return the value with its lists of named objects in order: kustomize puts new ones first."""
    if isinstance(value, dict):
        return {key: _sorted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [_sorted(one) for one in value]
        named = all(isinstance(one, dict) for one in inner)
        return sorted(inner, key=lambda one: str(sorted(one.items()))) if named else inner
    return value


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["tls", "plugin"])
def test_the_schema_has_a_key_for_every_list_of_a_patch(engine, name):
    patch, _ = read_patch(engine, name)
    schema = json.loads((FOLDER / "leaderworkerset.schema.json").read_text())["definitions"]
    (kind,) = schema["LeaderWorkerSet"]["x-kubernetes-group-version-kind"]
    assert patch["apiVersion"] == f"{kind['group']}/{kind['version']}"
    _find_keys(schema, schema["LeaderWorkerSet"], patch)


def _find_keys(schema, part, value):
    """Check that each object of a list is found by a key, and is not put in place of all others."""
    part = schema[part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part
    if isinstance(value, dict):
        for key, inner in value.items():
            _find_keys(schema, part.get("properties", {}).get(key, {}), inner)
    elif isinstance(value, list) and isinstance(value[0], dict):
        assert part["x-kubernetes-patch-strategy"] == "merge"
        for one in value:
            assert part["x-kubernetes-patch-merge-key"] in one
            _find_keys(schema, part["items"], one)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Return a folder with the wheel of this checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "service", source / "service", ignore=ignored)
    made = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", made)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *options, source],
        check=True,
        timeout=deadline(120),
    )
    return made


def _engines_python(folder):
    """Return a Python that has every package of this one except Evenkeel."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "evenkeel" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python3"


@pytest.mark.slow
def test_the_engines_python_finds_the_plugin_in_the_volume_and_keeps_its_packages(wheels, tmp_path):
    python = _engines_python(tmp_path / "engine")
    volume = tmp_path / "volume"
    shutil.copytree(wheels, volume / "wheels")
    _, added = read_patch("vllm", "plugin")
    (script,) = added["initContainers"][1]["args"]
    (path,) = (one["value"] for one in added["containers"][0]["env"])
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "PIP_NO_INDEX": "1"}
    for _ in range(2):  # a restarted init container finds the volume as it left it
        subprocess.run(
            [*added["initContainers"][1]["command"], script.replace("/evenkeel", str(volume))],
            env=environment,
            check=True,
            timeout=deadline(120),
        )
    asked = (
        "from importlib.metadata import entry_points; import numpy, evenkeel_moe\n"
        "(one,) = entry_points(group='vllm.general_plugins', name='evenkeel')\n"
        "print(one.load().__name__, evenkeel_moe.__file__, numpy.__file__, sep='\\n')"
    )
    environment["PYTHONPATH"] = path.replace("/evenkeel", str(volume))
    found = subprocess.run(
        [python, "-c", asked],
        env=environment,
        check=True,
        timeout=deadline(120),
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert found[0] == "register"
    assert found[1].startswith(str(volume)) and not found[2].startswith(str(volume))
    assert not list(volume.rglob("numpy"))


def test_the_image_of_ranks_installs_the_extra_and_keeps_the_engines_torch():
    text = (ROOT / "Dockerfile.rank").read_text()
    assert re.search(r"^FROM \$\{BASE\}$", text, re.M)
    assert "'/tmp/evenkeel-moe[rank]'" in text
    sources = re.findall(r"^COPY (.*) \S+$", text, re.M)
    for name in " ".join(sources).split():
        assert (ROOT / name).exists()
    assert text.count("torch.__version__") == 2
