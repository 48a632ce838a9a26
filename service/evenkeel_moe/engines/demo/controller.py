"""The demo's controller: `evenkeel serve` on free ports, with its data in the demo's folder."""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from evenkeel_moe.adapters.private_files import write_private
from evenkeel_moe.adapters.redis.client import connect, disconnect, store_errors
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.processes import ChildProcess, StopFlag, free_ports

_READY_S = 300.0
_PLANNER_READY_S = 900.0
"""Compiling the planner's kernels takes minutes at the first start on a busy machine."""
_PLANNER_STARTED = ("planner_ready", "planner_does_not_start", "planner_kernels_do_not_compile")
"""Events in the controller's log."""

COPY_BYTES_PER_S = 250_000
"""Limit of the copies per rank. Without it a plan would be over before a user or a step time
shows it."""

THRESHOLDS = {
    "min_window_steps": 64,
    "cooldown_s": 5,
    "consecutive_windows": 2,
    "plan_below": 0.95,
    "stop_above": 0.96,
    "min_gain": 0.02,
}
"""Thresholds for a run of one minute; a production fleet would wait longer before it moves
experts."""

SLOW_RANK_THRESHOLDS = THRESHOLDS | {"plan_below": 0.97, "stop_above": 0.98, "min_gain": 0.01}
"""A rank that is 12 % slower costs 4 to 8 % of the time of four ranks. After its recovery, the
placement made for it costs 1 to 3 %."""

SLOW_RANK_PLAN_STEPS = 192
"""A sixth of them is held out. On fewer, the promise is too uncertain to compare with so small a
saving."""


class DemoController:
    """A controller process and a client of its REST API."""

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        grpc_port, rest_port, metrics_port = free_ports(3)
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        self.rest_url = f"http://127.0.0.1:{rest_port}"
        self._redis_url = options.redis_url
        self._prefix = f"evenkeel-demo-{secrets.token_hex(4)}"
        token = secrets.token_urlsafe(24)
        self.token_file = tokens = folder / "tokens"
        write_private(tokens, f"demo operate {token}\n")
        store = folder / "store-url"
        write_private(store, options.redis_url)
        settings = {
            "DATA_DIR": folder / "controller",
            "LOG_LEVEL": "info",
            "GRPC__PORT": grpc_port,
            "REST__PORT": rest_port,
            "REST__TOKEN_FILE": tokens,
            "METRICS__PORT": metrics_port,
            # In a file: other users can read command lines, and the URL may contain a password.
            "REDIS__URL_FILE": store,
            "REDIS__PREFIX": self._prefix,
            "WINDOW__STEPS": 256,
            "WINDOW__PLAN_STEPS": SLOW_RANK_PLAN_STEPS if options.slow else 128,
            "WINDOW__TTL_S": 600,
            "PLANNER__MODE": options.mode,
            "PLANNER__POLICY": options.policy,
            "PLANNER__DISPATCH": options.dispatch.model.value,
            "PLANNER__COST": options.cost.value,
            "PLANNER__CYCLE_S": 1,
            "PLANNER__RECENT_STEPS": 16,
            "PLANNER__THRESHOLDS": json.dumps(SLOW_RANK_THRESHOLDS if options.slow else THRESHOLDS),
            "MIGRATION__MAX_BYTES_PER_S": COPY_BYTES_PER_S,
            "LEADER__REPLICA_ID": "demo",
        }
        variables = [f"EVENKEEL_{name}={value}" for name, value in settings.items()]
        command = ["/usr/bin/env", *variables, sys.executable, "-m", "evenkeel_moe", "serve"]
        self._process = ChildProcess(command, folder / "controller.log")
        self._http = httpx.Client(
            base_url=self.rest_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=2.0,
            trust_env=False,
        )

    def wait_ready(self, stop: StopFlag) -> bool:
        """Wait until it serves; return False if it ended, took too long, or was stopped."""
        deadline = time.monotonic() + _READY_S
        while self._process.running and not stop and time.monotonic() < deadline:
            try:
                if self._http.get("/readyz").is_success:
                    return True
            except httpx.TransportError:
                pass
            stop.wait(0.1)
        return False

    def wait_planner(self, stop: StopFlag) -> None:
        """Wait until the planner can plan or has failed to start; a run is too short to wait."""
        deadline = time.monotonic() + _PLANNER_READY_S
        while self._process.running and not stop and time.monotonic() < deadline:
            if planner_started(self._process.log()):
                return
            stop.wait(0.5)

    @property
    def running(self) -> bool:
        """True while its process runs."""
        return self._process.running

    def get(self, path: str) -> Any:
        """GET /v1/path; return None for a 404.

        Raises:
            httpx.HTTPError: no answer, or an error status.
        """
        response = self._http.get(f"/v1/{path}")
        return None if response.status_code == 404 else response.raise_for_status().json()

    def post(self, path: str) -> None:
        """POST /v1/path; a refusal is ignored, because the plan's story shows it."""
        self._http.post(f"/v1/{path}")

    def change(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        """Send a body to /v1/path; return None if the controller refuses it for now.

        Raises:
            httpx.HTTPError: no answer, or an error that lasts.
        """
        response = self._http.request(method, f"/v1/{path}", json=body, timeout=30.0)
        return None if response.status_code == 409 else response.raise_for_status().json()

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return self._process.log_tail()

    def stop(self) -> None:
        """Stop the controller and everything it started."""
        self._http.close()
        self._process.stop()
        if self._redis_url:
            # The controller's own store is in the folder. Another store must not keep the demo's
            # keys.
            asyncio.run(_delete_keys(self._redis_url, self._prefix))


def planner_started(log: str) -> bool:
    """Return True if a controller's log says that its planner started, or failed to."""
    return any(event in log for event in _PLANNER_STARTED)


async def _delete_keys(url: str, prefix: str) -> None:
    client = connect(url, timeout_s=2.0)
    try:
        with store_errors(f"deleting the keys {prefix}*"):
            async for key in client.scan_iter(match=f"{prefix}*"):
                await client.delete(key)
    finally:
        await disconnect(client)
