import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, Reason, ShapeMismatch
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.schedule.partial_layers import partial_row
from evenkeel_moe.planning.schedule.relabel import count_moves, fewest_moves
from evenkeel_moe.planning.schedule.waves import schedule_waves
from tests.strategies import placements, shapes, topologies


@st.composite
def migrations(draw, /, **kwargs):
    shape = draw(shapes(**kwargs))
    base, target = draw(placements(shape)), draw(placements(shape))
    if draw(st.booleans()):
        target = fewest_moves(base, target, pooled=shape.pooled)
    return shape, base, target, draw(topologies(shape.num_ranks))


def replay(base, waves, shape, staging=None):
    """Execute the waves slot by slot and check every rule; returns the final map."""
    per_rank = shape.slots_per_rank
    rows = base.phy2log.copy()
    for index, wave in enumerate(waves):
        assert wave.index == index
        assert list(wave.layers) == sorted(set(wave.layers))
        used = Placement(rows, shape.num_ranks, shape.num_logical_experts).used_per_rank()
        received = np.zeros(shape.num_ranks, int)
        staged = {}
        for batch in wave.batches:
            peers: dict[int, int] = {}
            ways = set()
            assert [(t.layer, t.dst_slot) for t in batch] == sorted(
                (t.layer, t.dst_slot) for t in batch
            )
            for t in batch:
                # The source holds the expert in the map before the wave.
                assert rows[t.layer, t.src_slot] == t.logical_expert
                assert t.nbytes == shape.bytes_per_expert
                assert (t.layer, t.dst_slot) not in staged
                staged[t.layer, t.dst_slot] = t.logical_expert
                src, dst = t.src_slot // per_rank, t.dst_slot // per_rank
                received[dst] += 1
                if src != dst:
                    # R10: at most one peer per rank per batch, one transfer each way.
                    assert peers.setdefault(src, dst) == dst
                    assert peers.setdefault(dst, src) == src
                    assert (src, dst) not in ways
                    ways.add((src, dst))
        if staging is not None:
            assert (received * shape.bytes_per_expert <= staging).all()
        if shape.pooled:
            # R11: empty slots are filled only from buffers that were free before the wave.
            opened = (rows[list(wave.layers)] == EMPTY) & (wave.rows != EMPTY)
            by_rank = opened.sum(axis=0).reshape(shape.num_ranks, -1).sum(axis=1)
            assert (by_rank <= shape.pool_slots_per_rank - used).all()
        for layer, new in zip(wave.layers, wave.rows, strict=True):
            for slot in range(shape.num_slots):
                if (layer, slot) in staged:
                    rows[layer, slot] = staged[layer, slot]
                elif new[slot] == EMPTY:
                    rows[layer, slot] = EMPTY
            assert (rows[layer] == new).all()
        # Between waves every expert has a replica.
        Placement(rows, shape.num_ranks, shape.num_logical_experts).check(shape)
    return rows


def on_one_node(base, target, shape, staging):
    topology = Topology.single_node(base.num_ranks)
    return schedule_waves(base, target, shape, topology, staging)


@settings(max_examples=200)
@given(migrations())
def test_transfers_reproduce_the_target(case):
    shape, base, target, topology = case
    try:
        waves = schedule_waves(base, target, shape, topology, None)
    except InfeasiblePlan as error:
        assert error.reason is Reason.POOL_EXCEEDED
        return
    assert (replay(base, waves, shape) == target.phy2log).all()
    if not shape.pooled:
        assert len(waves) <= 1


@settings(max_examples=300)
@given(migrations(), st.integers(0, 4))
def test_waves_fit_the_staging_of_every_rank(case, experts):
    shape, base, target, topology = case
    staging = (
        np.arange(shape.num_ranks) % 2 * shape.bytes_per_expert + experts * shape.bytes_per_expert
    )
    try:
        waves = schedule_waves(base, target, shape, topology, staging.tolist())
    except InfeasiblePlan as error:
        assert error.reason in (Reason.STAGING_TOO_SMALL, Reason.POOL_EXCEEDED)
        return
    assert (replay(base, waves, shape, staging) == target.phy2log).all()


@given(migrations(pooled=False))
def test_whole_layers_move_no_more_than_needed(case):
    shape, base, target, topology = case
    waves = schedule_waves(base, target, shape, topology, None)
    crossing = sum(
        t.src_slot // shape.slots_per_rank != t.dst_slot // shape.slots_per_rank
        for wave in waves
        for t in wave.transfers
    )
    assert crossing == count_moves(base, target)


def test_nothing_to_do_is_no_wave():
    shape = ModelShape(1, 2, 2, 1, 1, 1)
    placement = Placement.initial(shape)
    assert on_one_node(placement, placement, shape, 0) == ()


def test_nearer_sources_are_preferred():
    shape = ModelShape(1, 2, 4, 2, 1, 7)
    base = Placement(np.array([[0, -1, 1, 0, 1, -1, 0, -1]]), 4, 2)
    target = Placement(np.array([[0, -1, 1, 0, 1, 0, 0, 1]]), 4, 2)
    (wave,) = schedule_waves(base, target, shape, Topology((0, 0, 1, 1)), None)
    sources = {t.dst_slot: t.src_slot // 2 for t in wave.transfers}
    assert sources == {5: 3, 7: 2}
    assert len(wave.batches) == 1  # both directions of one pair


def test_the_same_rank_is_the_nearest_source():
    shape = ModelShape(1, 2, 2, 2, 1, 7)
    base = Placement(np.array([[0, 1, 0, -1]]), 2, 2)
    target = Placement(np.array([[1, 0, 0, -1]]), 2, 2)
    (wave,) = on_one_node(base, target, shape, None)
    assert {t.dst_slot: t.src_slot for t in wave.transfers} == {0: 1, 1: 0}
    assert wave.nbytes(2) == 0


def test_holders_share_the_sending():
    shape = ModelShape(4, 2, 4, 2, 1, 1)
    base = Placement(np.array([[0, -1, 0, 1, 1, -1, 1, -1]] * 4), 4, 2)
    target = Placement(np.array([[0, -1, 0, 1, 1, 0, 1, -1]] * 4), 4, 2)
    (wave,) = schedule_waves(base, target, shape, Topology((0, 0, 1, 1)), None)
    assert sorted(t.src_slot // 2 for t in wave.transfers) == [0, 0, 1, 1]


def test_batches_are_few():
    rng = np.random.default_rng(0)
    shape = ModelShape(6, 64, 16, 5, 1, 1)
    rows = np.stack([np.concatenate([rng.permutation(64), np.full(16, EMPTY)]) for _ in range(12)])
    base, target = Placement(rows[:6], 16, 64), Placement(rows[6:], 16, 64)
    (wave,) = on_one_node(base, target, shape, None)
    busy = np.zeros((16, 16), int)
    for t in wave.transfers:
        busy[t.src_slot // 5, t.dst_slot // 5] += t.src_slot // 5 != t.dst_slot // 5
    least = np.maximum(busy, busy.T).sum(axis=1).max()
    assert least <= len(wave.batches) <= 1.3 * least


def test_layers_that_fill_a_rank_for_good_come_last_when_slots_are_pooled():
    # One buffer is free on rank 0. Layer 0 would keep it; layer 1 uses it and frees two.
    shape = ModelShape(2, 3, 3, 3, 1, 1, pool_slots_per_rank=4)
    base = Placement(
        np.array([[0, -1, -1, 1, 2, -1, -1, -1, -1], [0, 1, -1, 2, 0, -1, 1, -1, -1]]), 3, 3
    )
    target = Placement(
        np.array([[0, 1, -1, 1, 2, -1, -1, -1, -1], [-1, -1, 2, 2, 0, -1, 1, -1, -1]]), 3, 3
    )
    waves = on_one_node(base, target, shape, None)
    assert [wave.layers for wave in waves] == [(1,), (0,)]
    assert (replay(base, waves, shape) == target.phy2log).all()


def test_a_slot_that_changes_its_expert_needs_no_free_buffer():
    shape = ModelShape(1, 2, 2, 1, 1, 1, pool_slots_per_rank=1)
    base, target = Placement(np.array([[0, 1]]), 2, 2), Placement(np.array([[1, 0]]), 2, 2)
    assert len(on_one_node(base, target, shape, None)) == 1


def test_a_full_pool_gives_up_a_redundant_copy_first():
    # Experts 0 and 1 change ranks in layers 0 and 1, each into an empty slot of a full pool. The
    # redundant copies of the last layer are removed and then restored.
    shape = ModelShape(3, 2, 2, 2, 1, 1, pool_slots_per_rank=4)
    base = Placement(np.array([[0, 1, -1, -1], [-1, -1, 0, 1], [0, 1, 0, 1]]), 2, 2)
    target = Placement(np.array([[0, -1, 1, -1], [-1, 1, 0, -1], [0, 1, 0, 1]]), 2, 2)
    waves = on_one_node(base, target, shape, None)
    assert [wave.layers for wave in waves] == [(2,), (0, 1), (2,)]
    assert (replay(base, waves, shape) == target.phy2log).all()


def test_a_full_pool_without_a_redundant_copy_is_refused():
    shape = ModelShape(2, 2, 2, 2, 1, 1, pool_slots_per_rank=2)
    base = Placement(np.array([[0, 1, -1, -1], [-1, -1, 0, 1]]), 2, 2)
    target = Placement(np.array([[0, -1, 1, -1], [-1, 1, 0, -1]]), 2, 2)
    with pytest.raises(
        InfeasiblePlan, match="layer 0 fills 1 empty slots on rank 1: 0 pool buffers"
    ) as error:
        on_one_node(base, target, shape, None)
    assert error.value.reason is Reason.POOL_EXCEEDED


def test_a_layer_larger_than_staging_goes_in_steps():
    # Four experts rotate over four ranks; the redundant copy of expert 0 opens the cycle.
    shape = ModelShape(1, 4, 5, 1, 1, 10)
    base = Placement(np.array([[0, 1, 2, 3, 0]]), 5, 4)
    target = Placement(np.array([[3, 0, 1, 2, 0]]), 5, 4)
    staging = [0, 10, 10, 10, 10]
    with pytest.raises(InfeasiblePlan, match="rank 0: staging holds 0") as error:
        on_one_node(base, target, shape, staging)
    assert error.value.reason is Reason.STAGING_TOO_SMALL
    waves = on_one_node(base, target, shape, 10)
    assert len(waves) == 1
    two_each = ModelShape(1, 4, 2, 3, 1, 10)
    base = Placement(np.array([[0, 1, -1, 2, 3, -1]]), 2, 4)
    target = Placement(np.array([[2, 3, -1, 0, 1, -1]]), 2, 4)
    waves = on_one_node(base, target, two_each, 10)
    assert len(waves) > 1
    assert (replay(base, waves, two_each, 10) == target.phy2log).all()


def test_two_steps_do_not_both_rely_on_the_replica_the_other_drops():
    # Ranks 0 and 1 each change a slot of expert 0 to an expert that they hold in the next slot.
    # Rank 2, which is to receive expert 0, has no room in this wave.
    old = np.array([0, 1, 0, 2, 3, 4, 5, 4], np.int32)
    new = np.array([1, 4, 2, 5, 0, 4, 3, 4], np.int32)
    left = np.array([[2, 2, 0, 0], [0, 0, 0, 0]])
    row = partial_row(old, new, left)
    assert row.tolist() == [1, 4, 0, 2, 3, 4, 5, 4]
    assert left[0].tolist() == [0, 2, 0, 0]


def test_a_cycle_longer_than_staging_is_opened_by_parking():
    # Six experts with a single replica move in one cycle over ranks 0 and 1, three into each; two
    # fit. Expert 6 has redundant copies on every rank. Rank 0 would hold the parked expert twice at
    # once, rank 1 in the end, so only rank 2 can park it; its copy of expert 6 is restored
    # afterwards.
    shape = ModelShape(1, 10, 3, 4, 1, 10)
    base = Placement(np.array([[0, 1, 2, 6, 3, 4, 5, 6, 6, 7, 8, 9]]), 3, 10)
    target = Placement(np.array([[3, 4, 5, 6, 1, 2, 0, 6, 6, 7, 8, 9]]), 3, 10)
    waves = on_one_node(base, target, shape, 20)
    assert (replay(base, waves, shape, 20) == target.phy2log).all()
    lent = [wave.rows[0, 8] for wave in waves]
    assert lent[0] == 0
    assert lent[-1] == 6
    full = Placement(np.array([[0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, 9]]), 3, 10)
    goal = Placement(np.array([[3, 4, 5, -1, 1, 2, 0, -1, 6, 7, 8, 9]]), 3, 10)
    with pytest.raises(InfeasiblePlan, match=r"3 experts on rank 0: staging holds 2 \(20 bytes\)"):
        on_one_node(full, goal, shape, 20)


@pytest.mark.parametrize(
    ("nbytes", "limits", "words"),
    [
        (10, {"max_moves": 4, "max_bytes": 40, "max_layers": 2}, None),
        (10, {"max_moves": 3}, "needs 4, the limit max_moves is 3"),
        (10, {"max_bytes": 39}, "needs 40, the limit max_bytes is 39"),
        (10, {"max_layers": 1}, "needs 2, the limit max_layers is 1"),
        (0, {"max_moves": 4}, None),
        (
            0,
            {"max_bytes": 10**9},
            "needs copies of unknown size, the limit max_bytes is 1000000000",
        ),
    ],
)
def test_limits_bound_the_whole_plan_and_copies_of_unknown_size_exceed_any_bytes(
    nbytes, limits, words
):
    base = Placement(np.array([[0, 1], [0, 1]]), 2, 2)
    target = Placement(np.array([[1, 0], [1, 0]]), 2, 2)
    (wave,) = on_one_node(base, target, ModelShape(2, 2, 2, 1, 1, nbytes), 20)
    assert PlanLimits(**limits).exceeded([wave], 1) == words
    assert PlanLimits(max_bytes=0).exceeded([], 1) is None


def test_layers_that_take_buffers_from_each_other_without_end_are_refused_as_such():
    shape = ModelShape(3, 2, 2, 2, 1, 10, pool_slots_per_rank=4)
    base = Placement(np.array([[1, 0, 0, -1], [0, -1, 1, -1], [0, -1, 1, 0]]), 2, 2)
    target = Placement(np.array([[1, 0, 0, 1], [-1, -1, 1, 0], [0, 1, -1, -1]]), 2, 2)
    words = "layer 0 has room, but steps of 3 layers take the free buffers of the pool from each"
    with pytest.raises(InfeasiblePlan, match=words) as refused:
        on_one_node(base, target, shape, None)
    assert refused.value.reason is Reason.POOL_EXCEEDED


def test_a_wave_has_as_many_layers_as_fit():
    shape = ModelShape(5, 2, 2, 1, 1, 10)
    base, target = Placement(np.array([[0, 1]] * 5), 2, 2), Placement(np.array([[1, 0]] * 5), 2, 2)
    waves = on_one_node(base, target, shape, 30)
    assert [wave.layers for wave in waves] == [(0, 1, 2), (3, 4)]


def test_other_deployments_and_unsound_maps_are_refused():
    shape = ModelShape(1, 2, 2, 1, 1, 10)
    good, other = Placement(np.array([[0, 1]]), 2, 2), Placement(np.array([[0, 1, 0, 1]]), 2, 2)
    for base, target in ((good, other), (other, good)):
        with pytest.raises(ShapeMismatch):
            on_one_node(base, target, shape, None)
    with pytest.raises(ShapeMismatch, match="3 ranks"):
        schedule_waves(good, good, shape, Topology.single_node(3), None)
    with pytest.raises(InfeasiblePlan, match="1 experts without a replica") as error:
        on_one_node(good, Placement(np.array([[0, 0]]), 2, 2), shape, None)
    assert error.value.reason is Reason.EXPERT_WITHOUT_REPLICA
