"""The table of checksums that a group agrees on before its first step."""

import numpy as np
import pytest

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.agent.checksums import agree_on_checksums
from evenkeel_moe.model.placement import Placement
from tests.agent.ranks import CPU, Group, ToyWeights, expert_tensors, run_ranks

TWICE = Placement(np.array([[0, 1, 1, 2, 3, 0]], np.int32), 2, 4)
"""Rank 0 holds expert 1 twice, and no other rank holds it."""


def agreed(weights):
    group = Group(2)
    return run_ranks(
        2,
        lambda rank: agree_on_checksums(
            group.connect(rank, "gate", CPU), rank, TWICE, weights[rank]
        ),
    )


@pytest.mark.parametrize("spoiled", [None, (0, 1), (0, 2)])
def test_copies_of_an_expert_on_one_rank_are_compared_too(spoiled):
    """R4: a copy from the wrong one would pass every later check."""
    weights = [ToyWeights(TWICE, rank) for rank in range(2)]
    if spoiled is not None:
        weights[0].slots[spoiled] = expert_tensors(0, 1, version=9)
        assert agreed(weights) == [None, None]
        return
    table = tuple(checksum(expert_tensors(0, expert)) for expert in range(4))
    assert agreed(weights) == [table, table]
