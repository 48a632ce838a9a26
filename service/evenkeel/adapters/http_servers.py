"""The two HTTP servers: the operators' API in the event loop, Prometheus in a thread."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, start_http_server

from evenkeel.errors import InvalidInput

__all__ = ["MetricsServer", "RestServer"]


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the controller's."""
        yield


class RestServer:
    """An ASGI application on a port."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise InvalidInput(f"cannot listen for operators on {host}:{port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, ws="none"
        )
        self._server = _Uvicorn(config)

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve([self._socket])

    async def stop(self) -> None:
        """Stop taking requests; those under way have a second."""
        self._server.should_exit = True
        await asyncio.sleep(0)

    def close(self) -> None:
        """Free the port, also if it never served."""
        self._socket.close()


class MetricsServer:
    """Prometheus' own server over one registry."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InvalidInput(f"cannot listen for Prometheus on {host}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
