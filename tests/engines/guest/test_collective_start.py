"""All ranks start their guest, or none does."""

import threading

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.guest.collective_start import all_or_none, require_plugin_on_all
from evenkeel_moe.errors import Unavailable
from tests.waiting import deadline


def test_a_rank_without_the_plugin_is_missed_before_any_collective():
    store = torch.distributed.HashStore()
    all_there = [
        threading.Thread(target=require_plugin_on_all, args=(store, "a", rank, 3, 20.0))
        for rank in (1, 2)
    ]
    for thread in all_there:
        thread.start()
    require_plugin_on_all(store, "a", 0, 3, 20.0)
    for thread in all_there:
        thread.join(20)
    errors = {}

    def asks(rank):
        try:
            require_plugin_on_all(store, "b", rank, 3, 0.2)
        except Unavailable as error:
            errors[rank] = str(error)

    late = threading.Thread(target=asks, args=(2,))
    late.start()
    asks(0)
    late.join(20)
    assert errors == dict.fromkeys(
        (0, 2),
        "the plugin did not start on ranks [1] of 3 within 0.2 s: it must run on all of them",
    )
    asks(1)
    assert 1 in errors, "one that comes when the others have gone on does not begin alone"


def test_a_start_that_fails_anywhere_fails_everywhere_and_is_taken_back():
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

    with pytest.raises(RuntimeError, match="no more threads"):
        all_or_none("begin", fails, lambda row: among(0)(rows.append(row) or row), undone.append)
    assert [row.tolist() for row in rows] == [[1]], (
        "the others wait for a word also of a rank that failed"
    )
    assert undone == [7]
