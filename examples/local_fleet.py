"""A controller and ranks on this machine, shared by the examples."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
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


Event = tuple[int, str, dict]
"""Rank, kind and detail of what happened on a rank."""


class ControllerFailed(Exception):
    """The controller ended, or did not start."""


def run_example(
    run_rank: Callable[..., None],
    size: int,
    limit_s: float,
    judge: Callable[[list[Event], str], str],
    *options: Any,
) -> int:
    """Run a controller and ranks to their end; return the exit code.

    Args:
        run_rank, size, limit_s, options: as in `run_ranks`.
        judge: from the events of the ranks and the controller's log, returns what went wrong;
            empty if nothing did.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seen, fault = [], ""
        try:
            with local_controller(folder) as (controller, address):
                seen = run_ranks(run_rank, size, controller, address, limit_s, *options)
        except ControllerFailed as error:
            fault = str(error)
        log = (folder / "controller.log").read_text(errors="replace")
        fault = fault or judge(seen, log)
        if fault:
            print(f"FAILED: {fault}\nThe end of the controller's log:\n{log[-2000:]}")
    return 1 if fault else 0


@contextmanager
def local_controller(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a controller that plans by itself within seconds; yield it once it serves.

    Its data and its log, `controller.log`, are in the folder.

    Yields:
        Its process, and its address.

    Raises:
        ControllerFailed: it does not start.
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
        yield controller, f"127.0.0.1:{port}"
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
    while time.monotonic() < deadline:
        check_running(controller)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise ControllerFailed(f"the controller did not start within {limit_s:.0f} s")


def check_running(controller: subprocess.Popen[bytes]) -> None:
    """Raise ControllerFailed if the controller has ended."""
    code = controller.poll()
    if code is not None:
        raise ControllerFailed(f"the controller ended with code {code}, so this run shows nothing")


def run_ranks(
    run_rank: Callable[..., None],
    size: int,
    controller: subprocess.Popen[bytes],
    address: str,
    limit_s: float,
    *options: Any,
) -> list[Event]:
    """Run the processes of a group to their end; return their events.

    Args:
        run_rank: called in each process with its parent's process id, its rank, the number of
            ranks, the port of their store, `address`, the generation, `limit_s`, a queue for
            events, and `options`. A rank's last event has the kind "end".
        size: the number of ranks.
        controller: its process.
        address: of the controller.
        limit_s: seconds in which a plan should be carried out.
        options: further arguments.

    Raises:
        ControllerFailed: the controller ended before the ranks; they are killed.
    """
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    shared = (size, free_ports(1)[0], address, str(uuid.uuid4()), limit_s, events, *options)
    ranks = [
        context.Process(target=run_rank, args=(os.getpid(), number, *shared))
        for number in range(size)
    ]
    ends_within_s = 0.0
    try:
        for process in ranks:
            process.start()
        seen = watch(events, ranks, controller, limit_s + 120)
        ends_within_s = 10.0
        return seen
    finally:
        for process in ranks:
            process.join(ends_within_s)
            if process.is_alive():
                process.kill()
                process.join(10)


def watch(events, ranks, controller: subprocess.Popen[bytes], limit_s: float) -> list[Event]:
    """Return the events of the ranks, once all have ended; see `run_ranks`."""
    seen: list[Event] = []
    deadline = time.monotonic() + limit_s
    while sum(kind == "end" for _, kind, _ in seen) < len(ranks) and time.monotonic() < deadline:
        check_running(controller)
        if events.empty():
            if not any(process.is_alive() for process in ranks):
                break
            time.sleep(0.1)
            continue
        number, kind, detail = events.get()
        seen.append((number, kind, detail))
        print(f"rank {number}: {kind} {detail}", flush=True)
    return seen
