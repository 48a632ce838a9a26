"""All ranks start their guest, or none does."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenkeel_moe.agent.together import together
from evenkeel_moe.engines.guest.collective_start import RollCall
from evenkeel_moe.errors import Unavailable
from tests.waiting import deadline, wait_until

dist: Any = torch.distributed


def test_a_rank_without_the_plugin_is_found_before_any_collective():
    store = dist.HashStore()
    patience_s = deadline(20.0)

    def ask(name, rank, timeout_s):
        RollCall(store, name, rank, 3).require_all(timeout_s)

    others = [threading.Thread(target=ask, args=("a", rank, patience_s)) for rank in (1, 2)]
    for thread in others:
        thread.start()
    ask("a", 0, patience_s)
    for thread in others:
        thread.join(patience_s)
    errors = {}

    def ask_in_vain(rank):
        try:
            ask("b", rank, 0.2)
        except Unavailable as error:
            errors[rank] = str(error)

    late = threading.Thread(target=ask_in_vain, args=(2,))
    late.start()
    wait_until(lambda: store.check(["b/2"]))
    ask_in_vain(0)
    late.join(patience_s)
    message = "the plugin did not start on ranks [1] of 3 within 0.2 s: it must run on all of them"
    assert errors == {0: message, 2: message}
    ask_in_vain(1)
    assert 1 in errors, "a rank that comes after the others gave up does not start alone"


def test_ranks_that_join_without_the_plugin_are_named_and_the_others_need_not_wait():
    store = dist.HashStore()
    RollCall(store, "c", 1, 3).announce()
    with pytest.raises(Unavailable, match=r"ranks \[2\] join without the plugin"):
        RollCall(store, "c", 0, 3).require_announced(1)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="did not start"):
        RollCall(store, "c", 1, 3).require_all(deadline(20.0))
    assert time.monotonic() - began < 10


def test_a_start_that_fails_on_one_rank_fails_on_all_and_is_undone():
    undone = []

    rows = []

    def among(*others):
        def all_gather(row):
            rows.append(row.tolist())
            return torch.tensor([row.tolist(), *([other] for other in others)])

        return SimpleNamespace(all_gather=all_gather)

    assert together(among(0, 0), "begin", lambda: 7, undone.append) == 7
    with pytest.raises(Unavailable, match=r"ranks \[2\] cannot begin: their logs say why"):
        together(among(0, 1), "begin", lambda: 7, undone.append)
    assert undone == [7]
    rows.clear()

    def fails():
        raise RuntimeError("no more threads")

    with pytest.raises(RuntimeError, match="no more threads"):
        together(among(0), "begin", fails, undone.append)
    assert rows == [[1]], "a rank that failed takes part in the comparison too"
    assert undone == [7]
