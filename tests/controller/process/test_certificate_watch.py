"""Which certificates are watched, and what is exported of them."""

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.process.certificate_watch import CertificateWatch, certificates_of
from evenkeel_moe.settings_sources import load_settings

NAME = "evenkeel_certificate_expiry_timestamp_seconds"


async def test_an_end_stays_while_files_are_replaced_and_the_cause_is_logged_once():
    registry = CollectorRegistry()
    answers = iter((100.0, OSError("half written"), OSError("half written"), 200.0))

    def read():
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    watch = CertificateWatch({"rest": read}, ControllerMetrics(registry))
    assert registry.get_sample_value(NAME, {"kind": "rest"}) is None
    seen = []
    with capture_logs() as logs:
        for _ in range(4):
            await watch.check()
            seen.append(registry.get_sample_value(NAME, {"kind": "rest"}))
    assert seen == [100.0, 100.0, 100.0, 200.0]
    assert [row["event"] for row in logs] == ["certificate_unreadable"]


def test_every_certificate_of_the_settings_is_watched(tmp_path, monkeypatch):
    assert certificates_of(load_settings()) == {}
    for name in ("cert", "key", "client_ca"):
        monkeypatch.setenv(f"EVENKEEL_GRPC__TLS_{name.upper()}_FILE", str(tmp_path / name))
    for name in ("cert", "key"):
        monkeypatch.setenv(f"EVENKEEL_REST__TLS_{name.upper()}_FILE", str(tmp_path / name))
    assert set(certificates_of(load_settings())) == {"grpc", "grpc_client_ca", "rest"}
