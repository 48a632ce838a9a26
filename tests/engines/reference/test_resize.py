"""Who becomes which rank, with which experts and on which node, when a group changes its size."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet_report import FleetRecord
from evenkeel_moe.engines.reference.resize import (
    former_ranks,
    leaving_ranks,
    resized_config,
    resized_nodes,
    resized_placement,
)
from evenkeel_moe.engines.reference.resizing import Resizing
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.model.placement import EMPTY, Placement

X = EMPTY


@pytest.mark.parametrize(
    ("ranks", "wanted", "retire", "former", "leaving"),
    [
        (4, 6, (), (0, 1, 2, 3, None, None), ()),
        (6, 3, (), (0, 1, 2), (3, 4, 5)),
        (6, 3, (0, 2, 4), (1, 3, 5), (0, 2, 4)),
        (4, 4, (1,), (0, 2, 3, None), (1,)),
        (3, 5, (2,), (0, 1, None, None, None), (2,)),
        (2, 1, (0,), (1,), (0,)),
    ],
)
def test_those_who_stay_keep_their_order_and_come_first(ranks, wanted, retire, former, leaving):
    assert former_ranks(ranks, wanted, retire) == former
    assert leaving_ranks(ranks, former) == leaving


@pytest.mark.parametrize(
    ("wanted", "retire", "says"),
    [
        (4, (), r"4 ranks already"),
        (0, (), r"0 ranks"),
        (3, (4,), r"ranks \[4\] do not exist: .* 0\.\.3"),
        (3, (-1, 1), r"ranks \[-1\] do not exist"),
        (2, (1,), r"1 of 4 ranks retire, so 3 stay: more than the 2"),
        (4, (0, 1, 2, 3), r"all 4 ranks"),
    ],
)
def test_a_group_that_cannot_be_is_refused(wanted, retire, says):
    with pytest.raises(InvalidInput, match=says):
        former_ranks(4, wanted, retire)


ROWS = np.array([[0, 1, 2, X, 1, 2, 0, X], [2, 0, 1, X, 2, 1, X, 0]], np.int32)
"""Two layers of four ranks with two slots each, for three experts."""


@pytest.mark.parametrize(
    ("former", "rows"),
    [
        ((0, 1), [[0, 1, 2, X], [2, 0, 1, X]]),
        ((2, 3), [[1, 2, 0, X], [2, 1, X, 0]]),
        ((0, 2, None), [[0, 1, 1, 2, X, X], [2, 0, 2, 1, X, X]]),
        ((0, 1, 2, 3, None), [[*ROWS[0], X, X], [*ROWS[1], X, X]]),
    ],
)
def test_rows_move_with_their_ranks_and_who_joins_has_empty_slots(former, rows):
    found = resized_placement(Placement(ROWS, 4, 3), former)
    assert found.phy2log.tolist() == rows
    assert found.num_ranks == len(former)


def test_experts_on_leaving_ranks_alone_are_counted_and_named():
    says = r"4 experts .* ranks 0, 1, 2 alone.*layer 0 expert 1"
    with pytest.raises(InfeasiblePlan, match=says) as refused:
        resized_placement(Placement(ROWS, 4, 3), (3, None))
    assert refused.value.reason is Reason.EXPERT_WITHOUT_REPLICA


def test_a_drain_may_be_long_and_only_ranks_that_load_are_given_up(tmp_path):
    alive: Any = SimpleNamespace(poll=lambda: None)
    record = FleetRecord(tmp_path)
    before = RankConfig(run_folder=str(tmp_path), num_ranks=4, layers=1, experts=4)
    fewer = before.replace(num_ranks=3, former=(0, 1, 2), group=1)
    drains = Resizing(before, fewer, [alive] * 4, {}, began=0.0, drain_s=300.0)
    assert not drains.is_prepared(record, 299.0) and drains.is_prepared(record, 301.0)
    assert drains.trouble(record, 301.0, saved_epoch=-1) == ""
    more = before.replace(num_ranks=5, former=(0, 1, 2, 3, None), group=1)
    loads = Resizing(before, more, [alive] * 4, {4: alive}, began=0.0, drain_s=300.0)
    assert loads.trouble(record, 420.0, saved_epoch=-1) == ""
    assert loads.trouble(record, 421.0, saved_epoch=-1) == (
        "the new ranks [4] did not load within 420 s"
    )


@pytest.mark.parametrize(
    ("nodes", "former", "found"),
    [
        ((), (0, 1, None), ()),
        ((0, 0, 1, 1), (0, 1, 2, 3, None, None), (0, 0, 1, 1, 0, 1)),
        ((0, 0, 1, 1), (0, 1), (0, 0)),
        ((0, 0, 1, 1), (0, 1, None), (0, 0, 1)),
    ],
)
def test_who_joins_comes_to_the_node_with_the_fewest_ranks(nodes, former, found):
    assert resized_nodes(nodes, former) == found


@pytest.mark.parametrize(
    ("changes", "wanted", "says"),
    [
        ({"slots_per_rank": 4, "pool_slots_per_layer": 4}, 1, "1 ranks x 4 slots"),
        ({"slots_per_rank": 8, "pool_slots_per_layer": 4}, 1, "1 ranks x 12 pooled slots"),
        ({"slow_rank": 1}, 1, "slow_rank 1 is outside"),
    ],
)
def test_a_configuration_that_the_new_size_breaks_is_refused(changes, wanted, says):
    config = RankConfig(run_folder="unused", num_ranks=2, layers=3, experts=8, **changes)
    with pytest.raises(InvalidInput, match=says):
        resized_config(config, Placement.initial(config.shape), wanted)
