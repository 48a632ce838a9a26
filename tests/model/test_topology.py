import pytest

from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.topology import ModelShape, Topology


def test_shape_knows_its_slots_and_budget():
    fixed = ModelShape(58, 256, 32, 9, 8, 44_040_192, num_expert_groups=8)
    assert (fixed.num_slots, fixed.num_redundant, fixed.pooled) == (288, 32, False)
    assert fixed.mean_slots_per_rank == fixed.slots_per_rank
    pooled = ModelShape(4, 16, 4, 8, 2, 100, pool_slots_per_rank=20)
    assert (pooled.num_slots, pooled.num_redundant, pooled.pooled) == (32, 4, True)
    assert pooled.mean_slots_per_rank == 20 / 4 < pooled.slots_per_rank


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 4, 2, 2, 1, 1), "num_layers is 0"),
        ((1, 4, 2, 2, 5, 1), "top_k 5 exceeds 4 experts"),
        ((1, 4, 2, 2, 1, -1), "bytes_per_expert is -1"),
        ((1, 4, 2, 2, 1, 1, 3), "4 experts do not divide over 3 expert groups"),
    ],
)
def test_impossible_shapes_are_refused_with_their_numbers(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        ModelShape(*arguments)


def test_too_few_slots_is_a_shape_error():
    with pytest.raises(
        ShapeMismatch, match="2 ranks x 2 slots = 4 slots cannot hold 5 experts"
    ) as caught:
        ModelShape(1, 5, 2, 2, 1, 1)
    assert caught.value.reason is Reason.EXPERT_WITHOUT_REPLICA


def test_too_small_a_pool_is_a_shape_error():
    with pytest.raises(ShapeMismatch, match="2 ranks x 7 pooled slots") as caught:
        ModelShape(2, 8, 2, 4, 1, 1, pool_slots_per_rank=7)
    assert caught.value.reason is Reason.POOL_EXCEEDED


def test_topology_counts_nodes_and_refuses_gaps():
    topology = Topology((0, 0, 1, 1))
    assert (topology.num_ranks, topology.num_nodes) == (4, 2)
    with pytest.raises(InvalidInput, match="without gaps"):
        Topology((0, 2))
