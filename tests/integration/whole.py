"""A controller process and a fleet of ranks on loopback, as operators start them."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.lines import read_new_lines
from evenkeel_moe.engines.reference.supervisor import Supervisor
from tests.waiting import deadline

DEPLOYMENT = "fleet"
THRESHOLDS = {"min_window_steps": 48, "cooldown_s": 2, "consecutive_windows": 2}
EAGER = {
    "min_window_steps": 48,
    "cooldown_s": 1,
    "consecutive_windows": 1,
    "plan_below": 0.98,
    "stop_above": 0.99,
}
"""Thresholds with which a controller plans at once, for a small gain too."""


def evenkeel(*words: object) -> str:
    """Run a command as an operator does; return what it prints."""
    command = [sys.executable, "-m", "evenkeel_moe", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline(120), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Served:
    """`evenkeel serve` on fixed ports: killed and started again, it is the same controller."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.grpc_port, rest_port, self.metrics_port = free_ports(3)
        self.grpc_address = f"127.0.0.1:{self.grpc_port}"
        token = secrets.token_urlsafe(16)
        tokens = folder / "tokens"
        tokens.write_text(f"test operate {token}\n", encoding="utf-8")
        values: dict[str, object] = {
            "DATA_DIR": folder / "data",
            "GRPC__PORT": self.grpc_port,
            "REST__PORT": rest_port,
            "REST__TOKEN_FILE": tokens,
            "METRICS__PORT": self.metrics_port,
            "WINDOW__STEPS": 256,
            "WINDOW__PLAN_STEPS": 96,
            "PLANNER__MODE": "auto",
            "PLANNER__POLICY": "eplb",
            "PLANNER__CYCLE_S": 0.5,
            "PLANNER__RECENT_STEPS": 16,
            "PLANNER__THRESHOLDS": json.dumps(THRESHOLDS),
            "LEADER__REPLICA_ID": "test",
        }
        self._environment = os.environ | {
            f"EVENKEEL_{name}": str(value) for name, value in (values | settings).items()
        }
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{rest_port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=deadline(5.0),
            trust_env=False,
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_parent([sys.executable, "-m", "evenkeel_moe", "serve"]),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.wait(self.alive, 60, "the controller to serve")

    def alive(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the controller ended:\n{self.log()[-3000:]}"
        try:
            return self.http.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """As a power cut would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        if self._process is None or self._process.poll() is not None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(deadline(20))
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def get(self, path: str = "") -> dict:
        """Read from the API; while it is temporarily unavailable, as when a busy disk stops the
        store for longer than the lease, ask again, as clients do.
        """
        until = time.monotonic() + deadline(15)
        while True:
            answer = self.http.get(f"/v1/deployments/{DEPLOYMENT}{path}")
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
                answer.raise_for_status()
                return answer.json()
            signal.sigtimedwait([], 0.2)

    def status(self) -> dict | None:
        try:
            answer = self.http.get(f"/v1/deployments/{DEPLOYMENT}")
        except httpx.TransportError:
            return None
        return answer.json() if answer.is_success else None

    def post(self, path: str, body: object = None) -> httpx.Response:
        return self.http.post(f"/v1/deployments/{DEPLOYMENT}{path}", json=body)

    def patch_policy(self, **changes: object) -> None:
        self.http.patch(f"/v1/deployments/{DEPLOYMENT}/policy", json=changes).raise_for_status()

    def export(self, deployment: str, path: Path, form: str, *options: object) -> None:
        """Write the placement of a deployment to a file."""
        where = ("--address", self.http.base_url, "--token-file", self.folder / "tokens")
        placement = ("placement", "export", "-d", deployment, "-f", form, "--out", path)
        evenkeel(*placement, *options, *where)

    def wait(self, condition, timeout_s: float, what: str):
        """Poll until the condition holds, and return what it returned."""
        began = time.monotonic()
        while time.monotonic() - began < deadline(timeout_s):
            found = condition()
            if found:
                return found
            signal.sigtimedwait([], 0.05)
        waited = time.monotonic() - began
        raise AssertionError(
            f"waited {waited:.1f} s for {what}; status {self.status()}\nlog: {self.log()[-3000:]}"
        )


class Fleet:
    """Ranks of the reference engine under one controller."""

    def __init__(self, folder: Path, controllers: tuple[str, ...], **config: object) -> None:
        known: dict = {
            "run_folder": str(folder),
            "num_ranks": 4,
            "deployment": DEPLOYMENT,
            "controllers": controllers,
            "steps": 0,
            "min_step_s": 0.02,
            "tokens_per_step": 128,
        }
        self.config = RankConfig(**(known | config))
        self.supervisor = Supervisor(self.config, max_restarts=3)
        self._offsets: dict[Path, int] = {}
        self.steps: dict[int, int] = {}
        self.mismatches = 0

    def poll(self) -> None:
        assert self.supervisor.poll() is None, "the ranks ended"
        for line in read_new_lines(self.supervisor.folder, self._offsets):
            if line["kind"] == "step":
                self.steps[line["rank"]] = line["step"]
                self.mismatches = max(self.mismatches, line["mismatches"])

    def newest_step(self) -> int:
        """Newest step that every rank of the present group has written."""
        self.poll()
        return min(self.steps.get(rank, -1) for rank in range(self.supervisor.num_ranks))

    def finish(self):
        """Ask the ranks to end, and return their report with the final checks."""
        self.supervisor.request_stop()
        began = time.monotonic()
        while time.monotonic() - began < deadline(60):
            report = self.supervisor.poll()
            if report is not None:
                return report
            signal.sigtimedwait([], 0.05)
        raise AssertionError("the ranks did not end")


@contextmanager
def whole(folder: Path, settings: dict | None = None, config: dict | None = None):
    """(controller, fleet), both running; both gone afterwards."""
    served = Served(folder / "controller", **(settings or {}))
    fleet = Fleet(folder / "ranks", (served.grpc_address,), **(config or {}))
    try:
        served.start()
        fleet.supervisor.start()
        yield served, fleet
    finally:
        fleet.supervisor.stop()
        served.stop()
        served.http.close()


def plans(served: Served, phase: str | None = None) -> list[dict]:
    """Plans, newest first."""
    items = served.get("/plans")["items"]
    return [plan for plan in items if phase is None or plan["phase"] == phase]
