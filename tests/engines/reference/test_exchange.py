"""Dispatch and combine between two ranks on real sockets."""

import time

import pytest
import torch

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.exchange import EpochMismatch, Exchange
from evenkeel_moe.engines.reference.model import original_expert
from evenkeel_moe.engines.reference.pace import Pace
from tests.agent.ranks import Group, run_ranks
from tests.waiting import deadline

SLOTS, D = 3, 8


def expert_in(slot):
    return original_expert(1, 0, slot, D, 16)


def test_seconds_are_of_routed_experts_alone():
    """The last slot is of the shared expert, and its 20 rows are paced to half a second."""
    group = Group(2, timeout_s=deadline(20))

    def work(rank):
        pace = Pace(RankConfig("", rank=rank, num_ranks=2, pace_s_per_token=0.025))
        exchange = Exchange(group.connect(rank, "engine"), SLOTS, D, pace, shared_slots=1)
        slots = torch.tensor([rank * SLOTS] * 2 + [rank * SLOTS + SLOTS - 1] * 20)
        began = time.perf_counter()
        result = exchange.layer(torch.ones(22, D), slots, 0, False, expert_in)
        took = time.perf_counter() - began
        assert result.received.tolist() == [2, 0, 20]
        assert pace.paced_s == [pytest.approx(0.05)]
        assert 0.05 <= result.compute_s <= took - 0.5
        return True

    assert run_ranks(2, work) == [True, True]


def test_an_epoch_that_differs_is_refused_by_every_rank_before_it_computes():
    """R8: ranks with different maps never compute; the message has the epoch of each rank."""
    group = Group(2, timeout_s=deadline(20))

    def work(rank):
        exchange = Exchange(group.connect(rank, "engine"), SLOTS, D)
        rows, slots = torch.ones(4, D), torch.zeros(4, dtype=torch.int64)

        def never(local):
            raise AssertionError("computed under different maps")

        with pytest.raises(EpochMismatch, match="rank 0 at 5, rank 1 at 6"):
            exchange.layer(rows, slots, 5 + rank, False, never)
        return True

    assert run_ranks(2, work) == [True, True]


def test_a_request_to_stop_reaches_all_ranks_in_the_same_exchange():
    group = Group(2, timeout_s=deadline(20))

    def work(rank):
        exchange = Exchange(group.connect(rank, "engine"), SLOTS, D)
        rows, slots = torch.ones(2, D), torch.zeros(2, dtype=torch.int64)
        return exchange.layer(rows, slots, 0, rank == 1, lambda local: expert_in(local)).stop

    assert run_ranks(2, work) == [True, True]
