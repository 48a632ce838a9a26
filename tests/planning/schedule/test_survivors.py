import numpy as np
import pytest

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.schedule.survivors import adopt_lost, surviving_placement
from tests.planning.schedule.test_width_change import random_placement, shape


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_expert_gets_an_empty_slot_and_nothing_else_moves(seed):
    of = shape(3, 4, pool_slots_per_rank=6)
    rows = random_placement(shape(3, 2), seed).phy2log.reshape(2, 3, 2)
    rows = np.concatenate([rows, np.full_like(rows, EMPTY)], axis=2)
    lost = rows[:, 1, 0].copy()
    rows[:, 1, 0] = EMPTY
    before = Placement(rows.reshape(2, -1), 3, 6)
    found = adopt_lost(before, of)
    found.check(of)
    changed = found.phy2log != before.phy2log
    assert (changed.sum(axis=1) == 1).all() and (found.phy2log[changed] == lost).all()
    # It comes to the rank with the fewest experts.
    assert (found.used_per_rank() == 4).all()


def test_a_lost_expert_replaces_a_replica_where_no_slot_is_empty_or_the_pool_is_full():
    full = Placement(np.array([[0, 1, 0, 2, 0, 1]], np.int32), 3, 4)
    found = adopt_lost(full, shape(3, 2, experts=4, layers=1))
    assert found.phy2log.tolist() == [[3, 1, 0, 2, 0, 1]]
    pooled = Placement(np.array([[0, 1, -1, 0, 2, -1]], np.int32), 2, 4)
    found = adopt_lost(pooled, shape(2, 3, experts=4, layers=1, pool_slots_per_rank=2))
    assert found.phy2log.tolist() == [[3, 1, -1, 0, 2, -1]]


def test_a_replica_of_another_layer_makes_room_for_a_lost_expert():
    rows = [[0, 1, 2, 0, 1, 2], [0, -1, -1, 1, -1, -1]]
    of = shape(2, 3, experts=3, pool_slots_per_rank=4)
    found = adopt_lost(Placement(np.array(rows, np.int32), 2, 3), of)
    found.check(of)
    assert found.logcnt.min() >= 1
    assert found.phy2log.tolist() == [[-1, 1, 2, 0, 1, 2], [0, 2, -1, 1, -1, -1]]


def test_those_who_stay_keep_their_slots_and_take_in_who_lived_elsewhere_alone():
    before = Placement(np.array([[0, 1, 2, 0, 3, 3], [3, 2, 1, 0, 0, 1]], np.int32), 3, 4)
    of = shape(2, 2, experts=4)
    found = surviving_placement(before, (0, 1), of)
    assert found.phy2log.tolist() == [[3, 1, 2, 0], [3, 2, 1, 0]]
    found = surviving_placement(before, (0, 2), of)
    assert found.phy2log.tolist() == [[0, 1, 2, 3], [3, 2, 0, 1]]
