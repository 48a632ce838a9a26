"""Groups: ranks that do not come, and the parts of NCCL groups that need no device."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed

from evenkeel_moe.adapters.torch.groups import Communicator, Operation
from evenkeel_moe.adapters.torch.nccl_group import _no_watchdog, await_ranks
from evenkeel_moe.errors import InvalidInput, Unavailable
from tests.agent.ranks import Group, run_ranks
from tests.waiting import deadline

_distributed: Any = torch.distributed
VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"


class Backend:
    """The calls of an NCCL backend; the second operation fails."""

    def __init__(self):
        self.open = False
        self.started = 0

    def _start_coalescing(self):
        assert not self.open
        self.open = True

    def send(self, tensors, peer, tag):
        self.started += 1
        if self.started == 2:
            raise RuntimeError("peer 1 has left")

    recv = send

    def _end_coalescing(self):
        self.open = False


def test_a_name_that_a_rank_has_used_is_refused():
    """Two agents of one rank would poll on what is left of the first one's communicator."""
    group = Group(2)
    run_ranks(2, lambda rank: group.connect(rank, "gate/toy"))
    run_ranks(2, lambda rank: group.connect(rank, "gate/draft"))
    with pytest.raises(InvalidInput, match=r"has used the name gate/toy already"):
        run_ranks(2, lambda rank: group.connect(rank, "gate/toy"))


def test_a_batch_that_fails_half_way_closes_its_nccl_group():
    """A hang (R10): an open group takes in every later NCCL call of the thread."""
    backend = Backend()
    communicator = Communicator(backend, 0, 2, torch.device("cuda", 0))
    operations = [Operation(torch.zeros(1), 1, sends=sends) for sends in (True, False)]
    with pytest.raises(RuntimeError, match="peer 1 has left"):
        communicator.start_exchange(operations, 0)
    assert not backend.open


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("0", "0"), ("1", "1")])
def test_only_our_own_group_is_made_without_a_watchdog(monkeypatch, before, after):
    """Torch reads the variable when it makes a group; groups of the engine must not see it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(ValueError, match="no device"), _no_watchdog():
        assert os.environ[VARIABLE] == "1"
        raise ValueError("no device")
    assert os.environ[VARIABLE] == after


ABORT = """
import time, torch
from evenkeel_moe.adapters.torch.groups import Communicator

class Backend:
    def abort(self):
        time.sleep(0.5)
        print("aborted", flush=True)

Communicator(Backend(), 0, 1, torch.device("cuda", 0)).abort()
"""


def test_an_abort_in_flight_is_over_when_python_exits():
    """A thread that is back from NCCL after Python's end can end the process by an error."""
    done = subprocess.run(
        [sys.executable, "-c", ABORT], capture_output=True, text=True, timeout=120, check=True
    )
    assert "aborted" in done.stdout


def test_nccl_is_asked_only_once_all_ranks_are_there():
    """A hang (R10): NCCL waits for a missing rank without a limit."""
    store = _distributed.HashStore()
    run_ranks(3, lambda rank: await_ranks(store, rank, 3, deadline(20)))
    with pytest.raises(Unavailable, match=r"ranks \[0, 2\] of 3 did not come within 0.2 s"):
        await_ranks(_distributed.HashStore(), 1, 3, 0.2)
