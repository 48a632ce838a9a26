"""All ranks start their guest, or none does."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.guest.collective_start import RollCall, all_or_none
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

    def among(*others):
        return lambda row: np.array([[int(row[0])], *([other] for other in others)])

    assert all_or_none("begin", lambda: 7, among(0, 0), undone.append) == 7
    with pytest.raises(Unavailable, match=r"ranks \[2\] could not begin: see their logs"):
        all_or_none("begin", lambda: 7, among(0, 1), undone.append)
    assert undone == [7]
    rows = []

    def fails():
        raise RuntimeError("no more threads")

    def compare(row):
        rows.append(row)
        return among(0)(row)

    with pytest.raises(RuntimeError, match="no more threads"):
        all_or_none("begin", fails, compare, undone.append)
    assert [row.tolist() for row in rows] == [[1]], (
        "a rank that failed takes part in the comparison too"
    )
    assert undone == [7]
