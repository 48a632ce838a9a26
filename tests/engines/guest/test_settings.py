"""Plugin settings from the environment."""

from pathlib import Path

import pytest

from evenkeel_moe.engines.guest.settings import GuestMode, load_guest_settings
from evenkeel_moe.errors import InvalidInput


def test_the_environment_is_read_once_and_checked(monkeypatch):
    assert load_guest_settings().addresses == ()
    monkeypatch.setenv("EVENKEEL_RANK__CONTROLLERS", "a:1, [fd00::2]:2,")
    monkeypatch.setenv("EVENKEEL_RANK__MODE", "place")
    settings = load_guest_settings()
    assert settings.addresses == ("a:1", "[fd00::2]:2")
    assert settings.mode is GuestMode.PLACE


def test_the_engines_own_network_variables_are_followed(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1, eth2")
    settings = load_guest_settings()
    assert (settings.host, settings.interface) == ("10.0.0.7", "eth1")
    monkeypatch.setenv("EVENKEEL_RANK__HOST", "rank-0.moe")
    monkeypatch.setenv("EVENKEEL_RANK__INTERFACE", "eth3")
    settings = load_guest_settings()
    assert (settings.host, settings.interface) == ("rank-0.moe", "eth3")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MODE", "move", "EVENKEEL_RANK__MODE"),
        ("DEPLOYMENT", "Not One", "is not a valid deployment name"),
        ("POLL_EVERY", "1", "EVENKEEL_RANK__POLL_EVERY"),
        ("RESOLVE_AFTER", "40", "exceeds EVENKEEL_RANK__POLL_EVERY"),
        ("GATE_TIMEOUT_S", "inf", "EVENKEEL_RANK__GATE_TIMEOUT_S"),
        ("GROUP_TIMEOUT_S", "1e300", "EVENKEEL_RANK__GROUP_TIMEOUT_S"),
        ("WEIGHTS_VERSION", str(2**64), "EVENKEEL_RANK__WEIGHTS_VERSION"),
        ("CONTROLLERS", "a:1,controller", "'controller' is not host:port"),
        ("CONTROLLERS", "http://controller:50051", "is not host:port"),
        ("CONTROLLERS", "fd00::2:50051", "IPv6 addresses need brackets"),
        (
            "TLS_KEY_FILE",
            "/key",
            "TLS_CERT_FILE and EVENKEEL_RANK__TLS_KEY_FILE must be set together",
        ),
    ],
)
def test_invalid_settings_are_refused_by_name(monkeypatch, name, value, words):
    monkeypatch.setenv(f"EVENKEEL_RANK__{name}", value)
    with pytest.raises(InvalidInput, match=words):
        load_guest_settings()


def test_a_certificate_without_a_ca_is_refused(monkeypatch):
    monkeypatch.setenv("EVENKEEL_RANK__TLS_CERT_FILE", "/cert")
    monkeypatch.setenv("EVENKEEL_RANK__TLS_KEY_FILE", "/key")
    with pytest.raises(InvalidInput, match="needs EVENKEEL_RANK__TLS_CA_FILE"):
        load_guest_settings()
    monkeypatch.setenv("EVENKEEL_RANK__TLS_CA_FILE", "/ca")
    assert load_guest_settings().tls_ca_file == Path("/ca")


def test_a_recording_takes_the_place_of_a_controller(monkeypatch):
    assert not load_guest_settings().is_on
    monkeypatch.setenv("EVENKEEL_RANK__RECORD", "/loads")
    assert load_guest_settings().is_on
    monkeypatch.setenv("EVENKEEL_RANK__MODE", "place")
    with pytest.raises(InvalidInput, match="EVENKEEL_RANK__RECORD needs EVENKEEL_RANK__MODE"):
        load_guest_settings()
    monkeypatch.setenv("EVENKEEL_RANK__CONTROLLERS", "a:1")
    with pytest.raises(InvalidInput, match="and EVENKEEL_RANK__CONTROLLERS names one"):
        load_guest_settings()


def test_a_rank_that_starts_from_a_file_may_record_in_mode_place(monkeypatch):
    for name, value in (("PLACEMENT", "/map.json"), ("MODE", "place"), ("RECORD", "/loads")):
        monkeypatch.setenv(f"EVENKEEL_RANK__{name}", value)
    assert load_guest_settings().placement == "/map.json", "the map stays, and loads are recorded"


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    for name in (
        "CONTROLLERS",
        "DEPLOYMENT",
        "POLL_EVERY",
        "TLS_CA_FILE",
        "TLS_CERT_FILE",
        "TLS_KEY_FILE",
    ):
        monkeypatch.setenv(f"EVENKEEL_RANK__{name}", "")
    settings = load_guest_settings()
    assert settings.tls_ca_file is None, (
        "an empty path would switch TLS on with the current folder as the CA"
    )
    assert (settings.addresses, settings.deployment, settings.poll_every) == ((), "default", 16)
