"""A controller and ranks on this machine, shared by the examples."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.engines.demo.processes import free_ports

THRESHOLDS = {
    "min_window_steps": 48,
    "cooldown_s": 1,
    "consecutive_windows": 1,
    "plan_below": 0.98,
    "stop_above": 0.99,
}


@contextmanager
def local_controller(folder: Path) -> Iterator[str]:
    """Run a controller that plans by itself within seconds; yield its address once it serves.

    Its data and its log, `controller.log`, are in the folder.
    """
    port, rest_port, metrics_port = free_ports(3)
    settings = {
        "DATA_DIR": folder / "data",
        "GRPC__PORT": port,
        "REST__PORT": rest_port,
        "METRICS__PORT": metrics_port,
        "WINDOW__STEPS": 128,
        "WINDOW__PLAN_STEPS": 128,
        "PLANNER__MODE": "auto",
        "PLANNER__POLICY": "keel",
        "PLANNER__CYCLE_S": 1,
        "PLANNER__RECENT_STEPS": 16,
        "PLANNER__THRESHOLDS": json.dumps(THRESHOLDS),
    }
    environment = {
        **os.environ,
        **{f"EVENKEEL_{name}": str(value) for name, value in settings.items()},
    }
    command = dying_with_parent([sys.executable, "-m", "evenkeel_moe", "serve"], signal.SIGTERM)
    with (folder / "controller.log").open("wb") as log:
        controller = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(controller, port)
        yield f"127.0.0.1:{port}"
    finally:
        controller.terminate()
        try:
            controller.wait(20)
        except subprocess.TimeoutExpired:
            controller.kill()
            controller.wait(10)


def wait_for(controller: subprocess.Popen[bytes], port: int, limit_s: float = 180.0) -> None:
    """Wait until the controller listens: its first start compiles the planner's kernels."""
    deadline = time.monotonic() + limit_s
    while controller.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the controller did not start within {limit_s:.0f} s; see controller.log")


def run_ranks(
    run_rank: Callable[..., None], size: int, controller: str, limit_s: float, *options: Any
) -> list[tuple[int, str, dict]]:
    """Run the processes of a group to their end; return (rank, kind, detail) of their events.

    Args:
        run_rank: called in each process with its parent's process id, its rank, the number of
            ranks, the port of their store, `controller`, the generation, `limit_s`, a queue for
            events, and `options`. A rank's last event has the kind "end".
        size: the number of ranks.
        controller: its address.
        limit_s: seconds in which a plan should be carried out.
        options: further arguments.
    """
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    shared = (size, free_ports(1)[0], controller, str(uuid.uuid4()), limit_s, events, *options)
    ranks = [
        context.Process(target=run_rank, args=(os.getpid(), number, *shared))
        for number in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        return watch(events, ranks, size, limit_s + 120)
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def watch(events, ranks, size: int, limit_s: float) -> list[tuple[int, str, dict]]:
    """Return the events of the ranks, once all have ended."""
    seen: list[tuple[int, str, dict]] = []
    deadline = time.monotonic() + limit_s
    while sum(kind == "end" for _, kind, _ in seen) < size and time.monotonic() < deadline:
        if events.empty():
            if not any(process.is_alive() for process in ranks):
                break
            time.sleep(0.1)
            continue
        number, kind, detail = events.get()
        seen.append((number, kind, detail))
        print(f"rank {number}: {kind} {detail}", flush=True)
    return seen
