"""The commands and the example that issue certificates for `security: strict`."""

import re
import subprocess

import pytest
import yaml

from evenkeel_moe.adapters.certificate_files import server_context
from evenkeel_moe.adapters.grpc.server_tls import read_grants
from tests.deploy.chart import CHART, ROOT
from tests.waiting import deadline

pytestmark = pytest.mark.deploy
EXAMPLES = ROOT / "deploy" / "examples"
NAMES = {
    "grpc": ["DNS:evenkeel.evenkeel.svc", "DNS:*.evenkeel-headless.evenkeel.svc.cluster.local"],
    "rest": ["DNS:evenkeel.evenkeel.svc", "DNS:localhost"],
    "rank": ["URI:evenkeel://deepseek-decode-vllm/ranks/0-15"],
}


def run(*command, cwd):
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=deadline(60), check=True
    )
    return done.stdout


def test_the_commands_of_openssl_issue_certificates_with_these_names(tmp_path):
    page = (ROOT / "docs" / "operations.md").read_text()
    (block,) = (one for one in re.findall(r"```sh\n(.*?)```", page, re.S) if "issue rank" in one)
    run("bash", "-euc", block, cwd=tmp_path)
    folder = tmp_path / "secrets"
    assert not [file for file in folder.iterdir() if file.stat().st_mode & 0o077]
    for name, wanted in NAMES.items():
        run("openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", f"{name}.crt", cwd=folder)
        shown = run(
            *("openssl", "x509", "-in", f"{name}.crt", "-noout", "-ext", "subjectAltName"),
            cwd=folder,
        )
        assert shown.splitlines()[1].strip().split(", ") == wanted
        server_context(folder / f"{name}.crt", folder / f"{name}.key")


def test_the_ranks_of_the_certificate_are_those_of_the_example():
    text = (EXAMPLES / "vllm-decode.yaml").read_text()
    (deployment,) = re.findall(r"EVENKEEL_RANK__DEPLOYMENT, value: ([^}]+)}", text)
    (ranks,) = re.findall(r"--data-parallel-size (\d+)", text)
    grants = read_grants(name.removeprefix("URI:") for name in NAMES["rank"])
    assert grants is not None
    (grant,) = grants
    assert (grant.deployment, grant.first, grant.last) == (deployment, 0, int(ranks) - 1)


def test_cert_manager_writes_the_secrets_that_strict_values_and_ranks_name():
    documents = yaml.safe_load_all((EXAMPLES / "cert-manager" / "certificates.yaml").read_text())
    specs = {
        one["spec"]["secretName"]: one["spec"] for one in documents if one["kind"] == "Certificate"
    }
    assert specs.pop("evenkeel-ca")["isCA"] is True
    values = yaml.safe_load((CHART / "ci" / "strict-values.yaml").read_text())
    patch = (EXAMPLES / "patches" / "vllm-tls.yaml").read_text()
    secrets = {
        "grpc": values["grpc"]["tls"]["existingSecret"],
        "rest": values["rest"]["tls"]["existingSecret"],
        "rank": re.findall(r"secretName: ([\w-]+)", patch)[0],
    }
    assert set(secrets.values()) == set(specs)
    for name, secret in secrets.items():
        spec = specs[secret]
        named = [f"DNS:{one}" for one in spec.get("dnsNames", [])]
        assert named + [f"URI:{one}" for one in spec.get("uris", [])] == NAMES[name]
