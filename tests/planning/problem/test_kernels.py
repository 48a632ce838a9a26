import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.planning.problem.kernels import batch_split_kernel
from tests.planning import twins
from tests.strategies import loads, placements, shapes


@given(st.data(), shapes())
def test_each_expert_is_on_one_slot_and_the_worst_rank_has_the_fewest(data, shape):
    placement = data.draw(placements(shape))
    load = data.draw(loads(shape.num_layers, shape.num_logical_experts))
    split = batch_split_kernel(load, placement.phy2log.copy(), shape.num_ranks, True)
    assert split.shape == (*load.shape[:2], placement.num_slots)
    for t in range(load.shape[0]):
        for layer, row in enumerate(placement.phy2log):
            used = np.flatnonzero(split[t, layer])
            assert np.sort(row[used]).tolist() == np.flatnonzero(load[t, layer]).tolist()
            assert split[t, layer][used].tolist() == load[t, layer][row[used]].tolist()
            active = (split[t, layer].reshape(shape.num_ranks, -1) > 0).sum(axis=1)
            assert active.max() == twins.fewest_active(load[t, layer], row, shape.num_ranks)


@pytest.mark.parametrize("dtype", [np.uint32, np.float64])
def test_every_batch_chooses_anew_and_whole_counts_need_no_copy(dtype):
    row = np.array([[0, 1, 2, 0, 3, -1]], np.int32)
    load = np.array([[[6, 1, 1, 1]], [[6, 0, 1, 1]], [[0, 0, 0, 0]]], dtype)
    split = batch_split_kernel(load, row, 2, True)
    assert split.dtype == np.float64
    assert split[:, 0].tolist() == [[0, 1, 1, 6, 1, 0], [6, 0, 1, 0, 1, 0], [0] * 6]
