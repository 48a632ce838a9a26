import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape, Topology


@st.composite
def shapes(draw):
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 24))
    layers = draw(st.integers(1, 3))
    least = -(-experts // ranks)
    per_rank = draw(st.integers(least, least + 4))
    fewest = -(-layers * experts // ranks)
    pool = draw(st.one_of(st.none(), st.integers(fewest, layers * per_rank)))
    return ModelShape(layers, experts, ranks, per_rank, 1, 100, pool_slots_per_rank=pool)


@given(shapes())
def test_initial_placement_meets_every_invariant(shape):
    Placement.initial(shape).check(shape)


@given(shapes())
def test_linear_placement_is_the_initial_one_with_one_slot_for_each_expert(shape):
    linear, initial = Placement.linear(shape), Placement.initial(shape)
    linear.check(shape)
    assert (linear.logcnt == 1).all()
    held = linear.phy2log != EMPTY
    np.testing.assert_array_equal(linear.phy2log[held], initial.phy2log[held])


@given(shapes())
def test_initial_placement_leaves_a_slot_empty_only_if_no_expert_may_go_there(shape):
    placement = Placement.initial(shape)
    used = placement.used_per_rank()
    per_layer = shape.slots_per_rank
    if shape.pool_slots_per_rank is not None:
        per_layer = min(per_layer, shape.pool_slots_per_rank // shape.num_layers)
        assert (used <= shape.pool_slots_per_rank).all()
    if per_layer * shape.num_ranks < shape.num_logical_experts:
        # Some layers take more of a rank's pool than others, and the pool is used up.
        assert used.sum() == shape.num_layers * shape.num_logical_experts
        return
    assert (used == shape.num_layers * min(per_layer, shape.num_logical_experts)).all()


@given(shapes(), st.randoms(use_true_random=False))
def test_log2phy_and_logcnt_invert_phy2log(shape, rng):
    phy2log = Placement.initial(shape).phy2log.copy()
    for row in phy2log:
        rng.shuffle(row)
    placement = Placement(phy2log, shape.num_ranks, shape.num_logical_experts)
    for layer in range(shape.num_layers):
        for expert in range(shape.num_logical_experts):
            slots = [s for s in range(shape.num_slots) if phy2log[layer, s] == expert]
            listed = [s for s in placement.log2phy[layer, expert] if s >= 0]
            assert listed == slots
            assert placement.logcnt[layer, expert] == len(slots)


def test_digest_differs_between_maps_and_shapes():
    base = Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4)
    assert base.digest == Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4).digest
    assert base.digest != Placement(np.array([[0, 1, 3, 2]], np.int32), 2, 4).digest
    assert base.digest != Placement(np.array([[0, 1, 2, 3]], np.int32), 4, 4).digest
    assert base.digest != Placement(np.array([[0], [1], [2], [3]], np.int32), 1, 4).digest


def test_placement_is_immutable():
    placement = Placement(np.array([[0, 1]], np.int32), 2, 2)
    with pytest.raises(ValueError, match="read-only"):
        placement.phy2log[0, 0] = 1


def test_placement_keeps_its_own_copy():
    source = np.array([[0, 1]], np.int32)
    placement = Placement(source, 2, 2)
    source[0, 0] = 1
    assert placement.phy2log[0, 0] == 0


SHAPE = ModelShape(1, 4, 2, 3, 2, 100)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0, 1, 2, 0, 1, 2], Reason.EXPERT_WITHOUT_REPLICA),
        ([0, 0, 1, 2, 3, EMPTY], Reason.DUPLICATE_ON_RANK),
    ],
)
def test_broken_invariants_are_named(row, reason):
    with pytest.raises(InfeasiblePlan) as caught:
        Placement(np.array([row], np.int32), 2, 4).check(SHAPE)
    assert caught.value.reason is reason


def test_duplicates_pass_only_where_allowed():
    Placement(np.array([[0, 0, 1, 2, 3, EMPTY]], np.int32), 2, 4).check(
        SHAPE, allow_duplicates=True
    )


def test_an_exceeded_pool_is_refused_with_its_numbers():
    shape = ModelShape(2, 4, 2, 3, 2, 100, pool_slots_per_rank=5)
    full = Placement(np.array([[0, 1, 2, 2, 3, 0], [0, 1, 2, 2, 3, 0]], np.int32), 2, 4)
    with pytest.raises(InfeasiblePlan, match="would hold 6 experts, its pool has 5") as caught:
        full.check(shape)
    assert caught.value.reason is Reason.POOL_EXCEEDED


@pytest.mark.parametrize(
    ("phy2log", "reason"),
    [
        (np.array([0, 1], np.int32), Reason.WRONG_SHAPE),
        (np.array([[0, 1, 2]], np.int32), Reason.WRONG_SHAPE),
        (np.array([[0, 4]], np.int32), Reason.EXPERT_OUT_OF_RANGE),
        (np.array([[0, -2]], np.int32), Reason.EXPERT_OUT_OF_RANGE),
    ],
)
def test_malformed_maps_are_refused(phy2log, reason):
    with pytest.raises(ShapeMismatch) as caught:
        Placement(phy2log, 2, 4)
    assert caught.value.reason is reason


def test_another_shape_is_refused():
    with pytest.raises(ShapeMismatch):
        Placement(np.array([[0, 1, 2, 3]], np.int32), 2, 4).check(SHAPE)


def test_with_rows_replaces_only_the_named_layers():
    base = Placement(np.array([[0, 1], [0, 1], [0, 1]], np.int32), 2, 2)
    changed = base.with_rows((1,), np.array([[1, 0]], np.int32))
    assert changed.phy2log.tolist() == [[0, 1], [1, 0], [0, 1]]
    assert base.phy2log.tolist() == [[0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(10))
def test_slots_by_expert_are_those_of_log2phy(seed):
    rng = np.random.default_rng(seed)
    placement = Placement(rng.integers(-1, 5, (3, 12)).astype(np.int32), 4, 5)
    dense = [[[s for s in slots if s >= 0] for slots in row] for row in placement.log2phy.tolist()]
    assert placement.slots_by_expert() == dense


def test_slots_by_expert_of_a_hostile_map_take_little_memory():
    """One expert has every spare slot: log2phy would take 3 GB."""
    row = np.zeros((1, 60_000), np.int32)
    row[0, :20_000] = np.arange(20_000)
    tracemalloc.start()
    (found,) = Placement(row, 4, 20_000).slots_by_expert()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found[0]) == 40_001 and found[19_999] == [19_999] and peak < 20 << 20


# --- topology -------------------------------------------------------------------------------------


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
