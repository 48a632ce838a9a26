"""Ranks of a toy engine as processes over Gloo; each runs a scenario by name."""

import faulthandler
import importlib
import multiprocessing
import os
import queue
import time
import traceback
from typing import Any

from evenkeel_moe.adapters.processes.child_process import die_with_parent
from evenkeel_moe.engines.demo.processes import free_ports
from tests.waiting import deadline

TIMEOUT_S = 240.0
_seen: dict[Any, list[Any]] = {}


def once(module: str, scenario: str, size: int = 2, **options: Any) -> list[Any]:
    """Do what `run` does, once for all tests that ask for the same."""
    key = (module, scenario, size, *sorted(options.items()))
    if key not in _seen:
        _seen[key] = run(module, scenario, size, **options)
    return _seen[key]


def run(module: str, scenario: str, size: int = 2, **options: Any) -> list[Any]:
    """Return each rank's result, by rank; an error of any rank fails the test."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = free_ports(1)[0]
    ranks = [
        context.Process(
            target=_child,
            args=(os.getpid(), module, scenario, rank, size, port, options, answers),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    errors: list[str] = []
    limit_s = deadline(TIMEOUT_S)
    end = time.monotonic() + limit_s
    try:
        while len(found) < size and not errors:
            try:
                rank, answer, error = answers.get(timeout=1.0)
            except queue.Empty:
                silent = [rank for rank in range(size) if rank not in found]
                assert all(ranks[rank].is_alive() for rank in silent), (
                    f"ranks {silent} ended without an answer"
                )
                assert time.monotonic() < end, f"ranks {silent} hang; their stacks are on stderr"
                continue
            found[rank] = answer
            if error:
                errors.append(f"rank {rank}: {error}")
    finally:
        for process in ranks:
            process.join(deadline(5))
            if process.is_alive():
                process.kill()
                process.join(5)
    assert not errors, "\n".join(errors)
    return [found[rank] for rank in range(size)]


def _child(parent, module, scenario, rank, size, port, options, answers):
    die_with_parent(parent)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * deadline(TIMEOUT_S))
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}"
        )
        answer = getattr(importlib.import_module(module), scenario)(rank, size, **options)
        answers.put((rank, answer, None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    # Daemon threads of the engine and of the agent may wait in collectives that never complete.
    os._exit(0)
