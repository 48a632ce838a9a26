"""The table of checksums that a group agrees on before its first step."""

import numpy as np
import pytest

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.agent import AgentConfig
from evenkeel_moe.agent.checksums import agree_on_checksums, agree_on_start, checksums_digest
from evenkeel_moe.errors import PeerViolation
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import RankIdentity
from tests.agent.ranks import CPU, Group, ToyWeights, expert_tensors, run_ranks, shape_of

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


def test_a_table_with_an_expert_that_no_rank_holds_is_none():
    """Such a group may serve, but has nothing to compare a copy of that expert with."""
    lacking = Placement(np.array([[0, 1, 1, 2], [0, 1, 2, 3]], np.int32), 2, 4)
    group, weights = Group(2), [ToyWeights(lacking, rank) for rank in range(2)]

    def agree(rank):
        gate = group.connect(rank, "gate", CPU)
        return agree_on_checksums(gate, rank, lacking, weights[rank])

    assert run_ranks(2, agree) == [None, None]


def test_the_digest_of_a_table_tells_its_order_and_takes_the_largest_checksums():
    tables = [(), (1, 2), (2, 1), (1, 2, 0), (1, (1 << 64) - 1)]
    digests = [checksums_digest(table) for table in tables]
    assert len(set(digests)) == len(tables) and {len(digest) for digest in digests} == {32}


FACTS = ["generation", "deployment", "placement", "epoch", "weights version", "shape", "probe"]


@pytest.mark.parametrize("first", range(len(FACTS)))
def test_the_first_fact_on_which_ranks_disagree_is_named(first):
    """R1: rank 1 has another value of this fact and of all that follow."""
    group = Group(2)

    def work(rank):
        other = [rank == 1 and index >= first for index in range(len(FACTS))]
        config = AgentConfig(
            RankIdentity(DeploymentId(f"d{other[1]}"), EpRank(rank), Generation(f"{other[0]}"), 1),
            shape_of(TWICE, top_k=1 + other[5]),
            "node",
            weights_version=1 + other[4],
        )
        placement = Placement(TWICE.phy2log[:, ::-1], 2, 4) if other[2] else TWICE
        gate = group.connect(rank, "gate", CPU)
        with pytest.raises(PeerViolation, match=f"on their {FACTS[first]}; this rank has"):
            agree_on_start(gate, config, placement, int(other[3]), other[6])

    run_ranks(2, work)
