"""Lines of ranks joined by step."""

import numpy as np
import pytest

from evenkeel_moe.engines.demo.fleet_log import FleetLog
from tests.engines.demo.lines import step_lines, swap_line


def test_a_step_counts_once_every_rank_wrote_it():
    fleet = FleetLog(2)
    first, second = step_lines(0, (12, 4), seconds=0.01)
    fleet.feed([first])
    assert fleet.newest is None
    assert fleet.layer_shares() is None
    assert fleet.balancedness() is None
    fleet.feed([{**second, "seconds": 0.5}])
    assert fleet.newest is not None
    assert fleet.newest.seconds == 0.5
    assert fleet.newest.balancedness == pytest.approx(8 / 12)
    assert fleet.layer_shares()[0] == pytest.approx([0.75, 0.25])


def test_balance_is_taken_over_ranks_layer_by_layer():
    fleet = FleetLog(2)
    lines = step_lines(0, (0, 0))
    # Each layer loads another rank. Summed over the layers, the ranks would look even.
    lines[0]["rank_load"], lines[1]["rank_load"] = [8, 0], [0, 8]
    fleet.feed(lines)
    assert fleet.balancedness() == pytest.approx(0.5)


def test_a_step_without_load_is_unknown_not_zero():
    fleet = FleetLog(2)
    fleet.feed(step_lines(0, (0, 0)))
    assert fleet.balancedness() is None
    shares = fleet.layer_shares()
    assert shares is not None and np.isnan(shares).all()
    fleet.feed(step_lines(1, (4, 4)))
    assert fleet.balancedness() == 1.0


def test_swaps_come_back_to_the_caller():
    fleet = FleetLog(2)
    assert [swap.step for swap in fleet.feed([swap_line(1, 5, "p1")])] == [5]
    assert fleet.feed(step_lines(6, (4, 4))) == []
    assert len(fleet.swaps) == 1
