"""The two HTTP servers: the REST API in the event loop, and Prometheus in a thread of its own."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app

from evenkeel_moe.adapters.addresses import chosen_by, host_port
from evenkeel_moe.adapters.certificate_files import renewed_server_context
from evenkeel_moe.adapters.http_connections import BoundedConfig, BoundedHttp
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.peer_budget import DELIVERED_LIMITS, PeerLimits, Places

_METRICS_LIMITS = replace(DELIVERED_LIMITS, connections=64)
_STOP_WITHIN_S = 5.0


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the controller."""
        yield


class RestServer:
    """Serves an ASGI application.

    The constructor binds the port, so that the controller fails before it starts anything else.

    Args:
        readers: who connects to it, for the error.
        section: the section of the settings that has the address, for the error.
        limits: of its clients.
        probes: paths of probes, which wait for no other request; see `BoundedConfig`.
        tls: files with the certificate chain and its private key (PEM), which are read again when
            they change; None serves clear text. A TLS handshake has one minute, and takes no place
            in the table before it ends.

    Raises:
        InvalidInput: the address is in use, or does not belong to this machine; or the files
            cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        readers: str = "operators",
        section: str = "rest",
        limits: PeerLimits = DELIVERED_LIMITS,
        probes: Collection[str] = (),
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self._tls = None if tls is None else _tls_context(*tls)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            # Another process could bind a port that does not listen. Requests wait until `run`.
            self._socket.listen()
        except (OSError, UnicodeError) as error:
            self._socket.close()
            raise InvalidInput(
                f"cannot listen for {readers} on {host_port(host, port)}: {error}"
                f"{chosen_by(section)}"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.connections: Places[BoundedHttp] = Places(limits.connections, "connection_evicted")
        self._limits = limits
        self._probes = probes
        self._server: _Uvicorn | None = None
        self._stopped = False

    async def run(self, app: Any) -> None:
        """Serve an application until `stop`."""
        self._server = _Uvicorn(
            BoundedConfig(app, self.connections, self._limits, self._tls, self._probes)
        )
        self._server.should_exit = self._stopped
        await self._server.serve([self._socket])

    def stop(self) -> None:
        """Stop accepting requests; running ones have one second. May be called on any thread."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        """Free the port, also if `run` was never called."""
        self._socket.close()


def _tls_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    try:
        return renewed_server_context(cert_file, key_file)
    except OSError as error:
        raise InvalidInput(
            f"cannot use the certificate {cert_file} with the key {key_file}: {error}"
        ) from error


class MetricsServer:
    """Serves one registry to Prometheus, on one thread with an event loop of its own.

    It answers also while the controller's event loop is busy.

    Raises:
        InvalidInput: the address is in use, or does not belong to this machine.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._rest = RestServer(
            host,
            port,
            readers="Prometheus",
            section="metrics",
            limits=_METRICS_LIMITS,
        )
        self.port = self._rest.port
        app = _metrics_app(registry)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._rest.run(app)), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server and free the port."""
        self._rest.stop()
        self._thread.join(_STOP_WITHIN_S)
        self._rest.close()


def _metrics_app(registry: CollectorRegistry) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that answers every path with all series."""
    app = make_asgi_app(registry, disable_compression=True)

    async def answer(scope: dict[str, Any], *channel: Any) -> None:
        try:
            await app(scope, *channel)
        except (TypeError, ValueError):  # A header asks for a version that is not a number.
            await app({**scope, "headers": ()}, *channel)

    return answer
