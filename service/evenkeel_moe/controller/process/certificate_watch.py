"""Exports until when the certificates of this controller are valid."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from evenkeel_moe.adapters.certificate_expiry import ca_expiry, certificate_expiry
from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.process.options import rest_tls
from evenkeel_moe.settings import Settings

_log = structlog.get_logger(__name__)
_EVERY_S = 60.0


def certificates_of(settings: Settings) -> Mapping[str, Callable[[], float]]:
    """Return how to read the end [Unix s] of each certificate of the settings, by its kind."""
    grpc, rest = settings.grpc, settings.rest
    found: dict[str, Callable[[], float]] = {}
    if grpc.tls_cert_file is not None and grpc.tls_key_file is not None:
        found["grpc"] = partial(certificate_expiry, grpc.tls_cert_file, grpc.tls_key_file)
    if grpc.tls_client_ca_file is not None:
        found["grpc_client_ca"] = partial(ca_expiry, grpc.tls_client_ca_file)
    if (tls := rest_tls(rest)) is not None:
        found["rest"] = partial(certificate_expiry, *tls)
    return found


class CertificateWatch:
    """Reads certificates every minute, because files may be replaced while the controller runs.

    While files are unusable, the servers keep the certificate that they have, and its end stays
    exported. Each new cause is logged once.

    Args:
        certificates: reads the end of a certificate [Unix s] or raises OSError, by its kind.
        metrics: takes the ends.
    """

    def __init__(
        self, certificates: Mapping[str, Callable[[], float]], metrics: ControllerMetrics
    ) -> None:
        self._certificates = certificates
        self._metrics = metrics
        self._causes: dict[str, str] = {}

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_EVERY_S)

    async def check(self) -> None:
        """Read each certificate once."""
        for kind, read in self._certificates.items():
            cause = ""
            try:
                self._metrics.certificate_ends(kind, await asyncio.to_thread(read))
            except OSError as error:
                cause = str(error)
                if cause != self._causes.get(kind):
                    _log.warning("certificate_unreadable", kind=kind, error=cause)
            self._causes[kind] = cause
