"""The two HTTP servers: the REST API in the event loop, and Prometheus in a thread."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, start_http_server

from evenkeel_moe.adapters.addresses import host_port
from evenkeel_moe.errors import InvalidInput


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the controller."""
        yield


class RestServer:
    """Serves an ASGI application.

    The constructor binds the port, so that the controller fails before it starts anything else.

    Raises:
        InvalidInput: the address is in use, or does not belong to this machine.
    """

    def __init__(self, host: str, port: int) -> None:
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
                f"cannot listen for operators on {host_port(host, port)}: {error}"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._server: _Uvicorn | None = None
        self._stopped = False

    async def run(self, app: Any) -> None:
        """Serve an application until `stop`."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            ws="none",
        )
        self._server = _Uvicorn(config)
        self._server.should_exit = self._stopped
        await self._server.serve([self._socket])

    async def stop(self) -> None:
        """Stop accepting requests; running ones have one second."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True
        await asyncio.sleep(0)

    def close(self) -> None:
        """Free the port, also if `run` was never called."""
        self._socket.close()


class MetricsServer:
    """Serves one registry with Prometheus' own server.

    Raises:
        InvalidInput: the address is in use, or does not belong to this machine.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            raise InvalidInput(
                f"cannot listen for Prometheus on {host_port(host, port)}: {error}"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop the server and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
