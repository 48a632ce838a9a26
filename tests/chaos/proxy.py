"""A TCP proxy for faults of the network: it can cut, silence or delay its connections."""

import asyncio
import contextlib
import ssl
from collections.abc import Iterator

from tests.chaos.judge.wire_log import TO_CLIENT, TO_SERVER, WireWriter

__all__ = ["Proxy"]

_CHUNK = 1 << 16


class Proxy:
    """Passes bytes between a port of its own and another on loopback.

    Args:
        port: where clients come; 0 takes a free one.
        target: where they are led.
        context: the port speaks TLS by it; the other does not.
    """

    def __init__(self, target: int, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self.port = port
        self.target = target
        self.delay_s = 0.0
        """Added to every chunk, in both directions."""
        self._cut = False
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wire: WireWriter | None = None
        self._about = ("", "")
        self._most_bytes = 0

    def record_to(self, wire: WireWriter, server: str, door: str, most_bytes: int) -> None:
        """Record each connection that is opened from now on.

        Args:
            wire: the log.
            server: the name of the process behind the proxy.
            door: the kind of clients that come here.
            most_bytes: the most bytes of one connection that are recorded.
        """
        self._wire, self._about, self._most_bytes = wire, (server, door), most_bytes

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection and each new one, until `connect`."""
        self._cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def connect(self) -> None:
        """Accept connections again after `cut`."""
        self._cut = False

    def silence(self) -> None:
        """Keep connections, pass nothing on, until `resume`: a network that swallows packets."""
        self._open.clear()

    def resume(self) -> None:
        """Pass everything on again after `silence`."""
        self._open.set()

    def heal(self) -> None:
        """Pass everything on again, at once, whatever the fault was."""
        self.connect()
        self.resume()
        self.delay_s = 0.0

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with self._known(writer), contextlib.suppress(OSError):
                if not self._cut:
                    await self._join(reader, writer)
        except asyncio.CancelledError:
            return  # Stopped; asyncio's own callback would log it as a failure.
        finally:
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        wire = self._wire
        connection = wire.opened(*self._about, self._most_bytes) if wire is not None else 0
        with self._known(other_writer):
            halves = [
                asyncio.create_task(self._pass(reader, other_writer, connection, TO_SERVER)),
                asyncio.create_task(self._pass(other_reader, writer, connection, TO_CLIENT)),
            ]
            try:
                await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for half in halves:
                    half.cancel()
                await asyncio.gather(*halves, return_exceptions=True)
                if wire is not None:
                    wire.closed(connection)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: int,
        direction: int,
    ) -> None:
        wire = self._wire if connection else None
        while data := await reader.read(_CHUNK):
            if wire is not None:
                wire.read(connection, direction, data)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._open.wait()
            if wire is not None:
                wire.passed(connection, direction, len(data))
            writer.write(data)
            await writer.drain()

    @contextlib.contextmanager
    def _known(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
