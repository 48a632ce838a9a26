"""`python -m examples.qwen3moe`: a controller, and a Hugging Face MoE model split over ranks."""

import argparse
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
from pathlib import Path

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from examples.qwen3moe.child import run_rank

THRESHOLDS = {
    "min_window_steps": 48,
    "cooldown_s": 1,
    "consecutive_windows": 1,
    "plan_below": 0.98,
    "stop_above": 0.99,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_controller(folder: Path, grpc_port: int) -> subprocess.Popen[bytes]:
    """Start a controller with its data in a folder; it ends with this process."""
    settings = {
        "DATA_DIR": folder / "data",
        "GRPC__PORT": grpc_port,
        "REST__PORT": free_port(),
        "METRICS__PORT": free_port(),
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
    log = (folder / "controller.log").open("wb")
    command = dying_with_parent([sys.executable, "-m", "evenkeel_moe", "serve"], signal.SIGTERM)
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    options.add_argument(
        "--limit-s", type=float, default=120.0, help="give up if no plan was carried out by then"
    )
    asked = options.parse_args()
    size = asked.ranks
    with tempfile.TemporaryDirectory() as name:
        folder, grpc_port = Path(name), free_port()
        controller = start_controller(folder, grpc_port)
        context = multiprocessing.get_context("spawn")
        events = context.Queue()
        shared = (
            size,
            free_port(),
            f"127.0.0.1:{grpc_port}",
            str(uuid.uuid4()),
            asked.limit_s,
            events,
        )
        ranks = [
            context.Process(target=run_rank, args=(os.getpid(), number, *shared))
            for number in range(size)
        ]
        try:
            for process in ranks:
                process.start()
            seen = watch(events, ranks, size, asked.limit_s + 120)
        finally:
            for process in ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join(10)
            controller.terminate()
            try:
                controller.wait(20)
            except subprocess.TimeoutExpired:
                controller.kill()
                controller.wait(10)
        verdict = judge(seen, size)
        if verdict:
            print(f"FAILED: {verdict}")
            print((folder / "controller.log").read_text(errors="replace")[-2000:])
            return 1
    print("the outputs before and after the migration are equal, bit for bit, on every rank")
    return 0


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


def judge(seen: list[tuple[int, str, dict]], size: int) -> str:
    """Return what went wrong; empty if nothing did."""
    ends = [detail for _, kind, detail in seen if kind == "end"]
    if len(ends) < size:
        return f"{size - len(ends)} ranks did not finish"
    if any(kind == "differs" for _, kind, _ in seen):
        return "an output changed"
    if not all(detail["as_untouched_model"] for _, kind, detail in seen if kind == "start"):
        return "the split model's outputs differ from the library's model"
    if len({detail["digest"] for detail in ends}) > 1:
        return "the ranks ended with different maps"
    if not all(detail["epoch"] > 0 for detail in ends):
        return "no plan was carried out in time"
    return ""


if __name__ == "__main__":
    sys.exit(main())
