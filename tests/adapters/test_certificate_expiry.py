"""The end of certificates in files, as openssl tells it."""

import ssl
import subprocess

import pytest

from evenkeel_moe.adapters.certificate_expiry import ca_expiry, certificate_expiry
from tests.adapters.serving import Authority


@pytest.fixture
def authority(tmp_path):
    made = Authority(tmp_path)
    made.issue("server")
    return made


def told_by_openssl(path) -> float:
    command = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return ssl.cert_time_to_seconds(text.strip().removeprefix("notAfter="))


def test_the_end_of_a_server_certificate_and_of_its_ca(authority):
    folder = authority.folder
    expected = told_by_openssl(folder / "server.pem")
    assert certificate_expiry(folder / "server.pem", folder / "server.key") == expected
    assert ca_expiry(folder / "ca.pem") == told_by_openssl(folder / "ca.pem")


def test_of_a_chain_the_servers_own_certificate_counts(authority):
    folder = authority.folder
    chain = folder / "chain.pem"
    chain.write_bytes((folder / "server.pem").read_bytes() + (folder / "ca.pem").read_bytes())
    assert certificate_expiry(chain, folder / "server.key") == told_by_openssl(chain)


def test_an_expired_certificate_still_tells_its_end(authority):
    folder = authority.folder
    request = ["-in", "server.csr", "-out", "old.pem", "-CA", "ca.pem", "-CAkey", "ca.key"]
    subprocess.run(
        ["openssl", "x509", "-req", *request, "-days", "-1"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    expired = certificate_expiry(folder / "old.pem", folder / "server.key")
    assert expired == told_by_openssl(folder / "old.pem")
    assert expired < told_by_openssl(folder / "server.pem") - 86_400


def test_of_several_cas_the_first_to_end_counts(authority, tmp_path_factory):
    other = Authority(tmp_path_factory.mktemp("other"))
    both = authority.folder / "both.pem"
    both.write_bytes(
        (authority.folder / "ca.pem").read_bytes() + (other.folder / "ca.pem").read_bytes()
    )
    ends = [told_by_openssl(one.folder / "ca.pem") for one in (authority, other)]
    assert ca_expiry(both) == min(ends)


def test_files_that_cannot_be_used_are_refused(authority):
    folder = authority.folder
    authority.issue("other")
    with pytest.raises(OSError):
        certificate_expiry(folder / "server.pem", folder / "other.key")
    with pytest.raises(OSError):
        certificate_expiry(folder / "absent.pem", folder / "server.key")
    with pytest.raises(OSError, match="no certificate of a CA"):
        ca_expiry(folder / "server.pem")
