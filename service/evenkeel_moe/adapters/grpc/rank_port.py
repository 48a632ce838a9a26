"""The port of the rank link: its settings for gRPC, and its end where a CA has lost our trust."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from evenkeel_moe.adapters.addresses import chosen_by, host_port
from evenkeel_moe.adapters.grpc.server_tls import client_authorities, renewed_credentials
from evenkeel_moe.adapters.watched_files import WatchedFiles
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.peer_budget import DELIVERED_LIMITS, PeerLimits

_log = structlog.get_logger(__name__)
_WINDOW_BYTES = 256 * 1024
"""Bytes of one stream that are on their way to us and not yet read."""
_HANDSHAKE_WITHIN_MS = 10_000
_UNUSED_MS = 120_000
"""A connection without a stream for so long is closed, at the latest after twice the time."""
_LOOK_EVERY_S = 10.0
"""Time between two looks at the CAs of clients."""
_RETRY_S = 1.0
_MOST_OF_GRPC = 2**31 - 1
"""The largest number that an option of gRPC takes."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Addresses, limits and TLS files of the server."""

    host: str
    port: int
    max_message_bytes: int
    send_queue: int
    keepalive_s: float
    keepalive_timeout_s: float
    limits: PeerLimits = DELIVERED_LIMITS
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    max_connection_age_s: float = 3600.0
    """A connection of this age, plus or minus a random tenth, is asked to close; 0: never."""
    max_connection_age_grace_s: float = 60.0
    """Time after that until its streams are cut."""
    tls_require_identity: bool = False
    """Refuse certificates that name no ranks. Names in a certificate are checked in any case."""
    reflection: bool = False
    """Describe the services and messages to clients that ask."""


class RankPort:
    """A gRPC server on the port of the ranks.

    gRPC compares certificates with the CAs in a handshake only. So where a CA is taken out of its
    file, all connections are closed, and ranks that are still trusted connect again.

    Args:
        options: of the server.
        add_services: adds what is served to a new server.

    Attributes:
        number: the port; known once bound.
    """

    def __init__(self, options: ServerOptions, add_services: Callable[[Any], None]) -> None:
        self._options, self._add_services = options, add_services
        self._server: Any = None
        self._authorities: WatchedFiles[frozenset[bytes]] | None = None
        self._trusted: frozenset[bytes] = frozenset()
        """The CAs of clients at the last look."""
        self._watching: asyncio.Task[None] | None = None
        self.number = options.port

    def bind(self) -> None:
        """Bind the port.

        Raises:
            InvalidInput: the address is in use or a TLS file cannot be read.
        """
        options = self._options
        server = grpc.aio.server(options=_channel_arguments(options))
        self._add_services(server)
        address = host_port(options.host, self.number)
        cert, key, client_ca = (
            options.tls_cert_file,
            options.tls_key_file,
            options.tls_client_ca_file,
        )
        try:
            if cert is None or key is None:
                self.number = server.add_insecure_port(address)
            else:
                if client_ca is not None:
                    self._authorities = client_authorities(client_ca)
                    self._trusted = self._authorities.first()
                credentials = renewed_credentials(cert, key, client_ca)
                self.number = server.add_secure_port(address, credentials)
        except OSError as error:
            raise InvalidInput(f"cannot listen for ranks on {address}: {error}") from error
        except RuntimeError as error:
            # gRPC goes on with advice for its own developers.
            words, _, _ = str(error).partition("; set GRPC_VERBOSITY")
            raise InvalidInput(
                f"cannot listen for ranks on {address}: {words}{chosen_by('grpc')}"
            ) from error
        self._server = server

    async def start(self) -> None:
        """Accept connections, and watch the CAs of clients."""
        await self._server.start()
        if self._authorities is not None:
            self._watching = asyncio.create_task(self._watch(), name="client-authorities")

    async def stop(self, grace_s: float) -> None:
        """Stop accepting connections and end the open ones. May be called twice."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            assert self._authorities is not None
            fresh = await asyncio.to_thread(self._authorities.changed)
            if fresh is None:  # An unusable file changes nothing.
                continue
            before, self._trusted = self._trusted, fresh
            if before - fresh:
                _log.warning("client_ca_removed", file=str(self._options.tls_client_ca_file))
                await self._close_connections()

    async def _close_connections(self) -> None:
        await self._server.stop(None)
        while True:
            try:
                self.bind()
                await self._server.start()
                return
            except InvalidInput as error:  # Another file may be under way.
                _log.error("rank_port_closed", error=str(error))
                await asyncio.sleep(_RETRY_S)


def _channel_arguments(options: ServerOptions) -> list[tuple[str, int]]:
    """Return gRPC's options of the server."""
    arguments = {
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.max_send_message_length": options.max_message_bytes,
        # Identity alone: a compressed message may be a thousand times larger than what arrived.
        "grpc.compression_enabled_algorithms_bitset": 1,
        # More than one address may have, so that a stream too many is told why it is refused.
        "grpc.max_concurrent_streams": min(2 * options.limits.max_streams_per_peer, _MOST_OF_GRPC),
        "grpc.keepalive_time_ms": round(options.keepalive_s * 1000),
        "grpc.keepalive_timeout_ms": round(options.keepalive_timeout_s * 1000),
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        # Ranks send pings too; a server that counts them as abuse would disconnect the ranks.
        "grpc.http2.min_ping_interval_without_data_ms": 1000,
        "grpc.http2.max_ping_strikes": 0,
        # To size this window, gRPC would measure each connection's bandwidth with a ping after
        # every read. That would be half of the work of its threads here.
        "grpc.http2.bdp_probe": 0,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_WITHIN_MS,
        "grpc.max_connection_idle_ms": _UNUSED_MS,
        "grpc.http2.lookahead_bytes": _WINDOW_BYTES,
        # Otherwise a second server could bind the port and receive every other rank.
        "grpc.so_reuseport": 0,
    }
    if options.max_connection_age_s:
        # gRPC spreads the ages by 10 %, so that the ranks of a fleet do not reconnect all at once.
        grace_s = options.max_connection_age_grace_s
        arguments |= {
            "grpc.max_connection_age_ms": max(1, round(options.max_connection_age_s * 1000)),
            "grpc.max_connection_age_grace_ms": max(1, round(grace_s * 1000)),
        }
    return list(arguments.items())
